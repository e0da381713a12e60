"""Schedules that compute weight gradients separately, at times when a rank would be idle: ZB-H1, ZB-H2."""

from __future__ import annotations

from collections.abc import Iterator

from pase.pipeline.registry import register
from pase.pipeline.types import Action, Kind


def _delayed(stage: int, warm: int, delay: int, micro_batches: int) -> Iterator[Action]:
    """1F1B in which weight gradients are computed ``delay`` micro-batches after activation gradients."""
    warm, weights = min(warm, micro_batches), 0
    for i in range(warm):
        yield Action(stage, Kind.FORWARD, i)
    for i in range(micro_batches):
        if warm + i < micro_batches:
            yield Action(stage, Kind.FORWARD, warm + i)
        yield Action(stage, Kind.INPUT, i)
        if i >= delay:
            yield Action(stage, Kind.WEIGHT, weights)
            weights += 1
    for i in range(weights, micro_batches):
        yield Action(stage, Kind.WEIGHT, i)


@register(
    "zb-h1",
    "1F1B's memory and a third of its bubble: weight gradients fill the drain",
    source="Qi et al., ICLR 2024, section 3 (2401.10241)",
)
def zb_h1(ranks: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    return [list(_delayed(r, ranks - r - 1, r, micro_batches)) for r in range(ranks)]


@register(
    "zb-h2",
    "no bubble if all actions take equally long, for up to twice the memory",
    source="Qi et al., ICLR 2024, section 3 (2401.10241)",
)
def zb_h2(ranks: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    return [list(_delayed(r, 2 * (ranks - r - 1), 2 * r, micro_batches)) for r in range(ranks)]
