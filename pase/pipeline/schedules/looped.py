"""Schedules with several stages per rank, assigned round-robin: interleaved 1F1B, and circular (one program)."""

from __future__ import annotations

from pase.pipeline.registry import register
from pase.pipeline.types import Action, Kind


def _order(ranks: int, micro_batches: int, chunks: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order of forwards.

    Micro-batches run in groups of ``ranks``. Each group passes through all chunks before the next one starts.
    """
    groups = [range(at, min(at + ranks, micro_batches)) for at in range(0, micro_batches, ranks)]
    return [(c, i) for group in groups for c in range(chunks) for i in group]


@register(
    "interleaved",
    "1F1B with several stages per rank: shorter fill and drain, for as many times the transfers",
    source="Narayanan et al., SC 2021, section 2.2.2; Megatron-LM, core/pipeline_parallel/schedules.py",
    chunks=(2, 0),
    multiple=True,
)
def interleaved(ranks: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    forwards = _order(ranks, micro_batches, chunks)
    out = []
    for r in range(ranks):
        forward = [Action(c * ranks + r, Kind.FORWARD, i) for c, i in forwards]
        backward = [Action((chunks - 1 - c) * ranks + r, Kind.BACKWARD, i) for c, i in forwards]
        warm = min(2 * (ranks - r - 1) + (chunks - 1) * ranks, len(forwards))
        order = forward[:warm]
        for n, b in enumerate(backward):
            order += [*forward[warm + n : warm + n + 1], b]
        out.append(order)
    return out


@register(
    "circular",
    "one program: a scan in which every rank runs one stage per iteration, then its derivative",
    source="praxis, layers/pipeline.py; maxtext, layers/pipeline.py",
    chunks=(1, 0),
    lockstep=True,
    multiple=True,
)
def circular(ranks: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    forwards = _order(ranks, micro_batches, chunks)
    return [
        [Action(c * ranks + r, Kind.FORWARD, i) for c, i in forwards]
        + [Action(c * ranks + r, Kind.BACKWARD, i) for c, i in reversed(forwards)]
        for r in range(ranks)
    ]
