"""Which stage of a pipeline each piece of a program belongs to."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

__all__ = ["PinnedSegment", "pinned"]

P = TypeVar("P", bound=Hashable)


class PinnedSegment(NamedTuple):
    """The values that a piece reads and makes, and its block (or unit): -1 before the first, their number behind the
    last."""

    reads: Collection[Hashable]
    makes: Collection[Hashable]
    block: int


def pinned(
    segments: Iterable[tuple[P, PinnedSegment]],
    weights: Collection[Hashable],
    batch: Collection[Hashable],
    cuts: Sequence[int],
) -> dict[P, int]:
    """Pieces that work on activations, which depend on parameters and on the batch -> their stage: that of their block,
    and none before what they read. Any other piece runs wherever it is read.

    segments: in the order of the program. cuts: the number of blocks of each stage.

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
