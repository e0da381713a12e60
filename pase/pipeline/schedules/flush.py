"""Schedules with one stage per rank and an undivided backward: GPipe, 1F1B, and 1F1B with eager forwards."""

from __future__ import annotations

from collections.abc import Iterator

from pase.pipeline.registry import register
from pase.pipeline.types import Action, Kind

__all__ = ["alternating"]


def alternating(stage: int, warm: int, micro_batches: int) -> Iterator[Action]:
    """``warm`` forwards, then a forward and a backward alternately, then the remaining backwards."""
    warm = min(warm, micro_batches)
    for i in range(warm):
        yield Action(stage, Kind.FORWARD, i)
    for i in range(micro_batches):
        if warm + i < micro_batches:
            yield Action(stage, Kind.FORWARD, warm + i)
        yield Action(stage, Kind.BACKWARD, i)


@register(
    "gpipe",
    "all forwards, then all backwards; keeps every micro-batch's activations",
    source="Huang et al., NeurIPS 2019 (1811.06965)",
)
def gpipe(ranks: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    return [list(alternating(r, micro_batches, micro_batches)) for r in range(ranks)]


@register(
    "1f1b",
    "each backward as early as possible; rank r keeps at most ranks - r micro-batches",
    source="Narayanan et al., SC 2021, section 2.2.1 (2104.04473)",
)
def one_forward_one_backward(ranks: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    return [list(alternating(r, ranks - r - 1, micro_batches)) for r in range(ranks)]


@register(
    "eager-1f1b",
    "1F1B with twice the warm-up forwards; transfers cost time only during fill and drain",
    source="jaxpp, src/jaxpp/schedules.py (Eager1F1B); Zhuang et al., MLSys 2023 (2211.05322)",
)
def eager(ranks: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    return [list(alternating(r, 2 * (ranks - r - 1), micro_batches)) for r in range(ranks)]
