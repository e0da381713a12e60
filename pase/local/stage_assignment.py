"""Assigns each segment of a program to a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

__all__ = ["PinnedSegment", "pinned"]

P = TypeVar("P", bound=Hashable)


class PinnedSegment(NamedTuple):
    """A segment of a program.

    reads, makes: the values that it reads and makes. block: the number of its block (or unit); -1 if it is before the
    first block, and the number of blocks if it is after the last.
    """

    reads: Collection[Hashable]
    makes: Collection[Hashable]
    block: int


def pinned(
    segments: Iterable[tuple[P, PinnedSegment]],
    weights: Collection[Hashable],
    batch: Collection[Hashable],
    cuts: Sequence[int],
) -> dict[P, int]:
    """The stage of each segment that computes activations: values that depend on both parameters and the batch.

    This is the stage of the segment's block, or a later one if the segment reads something that a later stage makes.
    Other segments are left out: they run in every stage that reads their results.

    segments: in the order of the program. weights, batch: the values that are parameters and those that are the batch.
    cuts: the number of blocks of each stage.

    >>> blocks = [PinnedSegment({"w", "x"}, {"y"}, 0), PinnedSegment({"w"}, {"v"}, 1), PinnedSegment({"v", "y"}, {"z"},
    ... 2)]
    >>> pinned(enumerate(blocks), {"w"}, {"x"}, [1, 1])
    {0: 0, 2: 1}
    """
    of_weights, of_batch, last = set(weights), set(batch), len(cuts) - 1
    stage_of = [s for s, many in enumerate(cuts) for _ in range(many)]
    made_in: dict[Hashable, int] = {}
    out: dict[P, int] = {}
    for segment, (reads, makes, block) in segments:
        trained, given = not of_weights.isdisjoint(reads), not of_batch.isdisjoint(reads)
        of_weights.update(makes if trained else ())
        of_batch.update(makes if given else ())
        if trained and given:
            at = 0 if block < 0 else stage_of[block] if block < len(stage_of) else last
            out[segment] = max([at, *(made_in[k] for k in reads if k in made_in)])
            made_in |= dict.fromkeys(makes, out[segment])
    return out
