"""Cuts a program of segments into the stages of a pipeline: which segments each stage runs, and what crosses.

A segment that works on activations (values that depend on both parameters and the batch) belongs to one stage: that of
its block. Such segments before the blocks belong to the first stage, those after the blocks to the last one. Any other
segment (a mask, a cast of weights, labels) runs in each stage that needs it. Activations that a later stage reads are
sent from stage to stage.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

__all__ = ["PinnedSegment", "SegmentedProgram", "StageSegments", "pinned"]

P = TypeVar("P", bound=Hashable)
V = TypeVar("V", bound=Hashable)


class PinnedSegment(NamedTuple, Generic[V]):
    """A segment of a program.

    reads, makes: the values that it reads and makes. block: the number of its block (or unit); -1 if it is before the
    first block, and the number of blocks if it is after the last.
    """

    reads: Collection[V]
    makes: Collection[V]
    block: int


def pinned(
    segments: Iterable[tuple[P, PinnedSegment[V]]],
    weights: Collection[V],
    batch: Collection[V],
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
    made_in: dict[V, int] = {}
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


@dataclass(frozen=True, kw_only=True)
class StageSegments(Generic[P, V]):
    """What one stage runs.

    segments: in the order of the program. enters, leaves: the activations that it gets from the previous stage, and
    sends to the next one, in the order of the program. given: the values that it reads and no segment makes, such as
    parameters and the batch.
    """

    segments: tuple[P, ...]
    enters: tuple[V, ...]
    leaves: tuple[V, ...]
    given: tuple[V, ...]


@dataclass(frozen=True, kw_only=True)
class SegmentedProgram(Generic[P, V]):
    """A program that is cut into stages.

    segments: in the order of the program. weights, batch: the values that are parameters and those that are the batch.
    cuts: the number of blocks of each stage. returned: the values that the last stage returns.
    """

    segments: Mapping[P, PinnedSegment[V]]
    weights: Collection[V]
    batch: Collection[V]
    cuts: Sequence[int]
    returned: Collection[V]

    @cached_property
    def pinned(self) -> Mapping[P, int]:
        """Segment that works on activations -> its stage."""
        return pinned(self.segments.items(), self.weights, self.batch, self.cuts)

    @cached_property
    def maker(self) -> Mapping[V, P]:
        """Value -> the segment that makes it, in the order of the program."""
        return {value: p for p, s in self.segments.items() for value in s.makes}

    def needed(self, values: Iterable[V], have: Collection[V]) -> set[P]:
        """The segments that a stage must run for these values, besides those that work on activations.

        have: the values that enter the stage.
        """
        seen, todo, out = set(have), list(values), set[P]()
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            p = self.maker.get(value)
            if p is not None and p not in self.pinned:
                out.add(p)
                todo += self.segments[p].reads
        return out

    def stages(self) -> tuple[StageSegments[P, V], ...]:
        """The stages, in order."""
        many = len(self.cuts)
        wanted: list[dict[V, None]] = [{} for _ in range(many)]
        for p, s in self.pinned.items():
            wanted[s].update(dict.fromkeys(self.segments[p].reads))
        wanted[-1].update(dict.fromkeys(self.returned))
        enters: list[tuple[V, ...]] = [()]
        for s in range(1, many):
            later = set().union(*wanted[s:])
            enters.append(tuple(v for v, p in self.maker.items() if v in later and self.pinned.get(p, s) < s))
        leaves = [*enters[1:], ()]
        return tuple(self._stage(s, wanted[s], enters[s], leaves[s]) for s in range(many))

    def _stage(
        self, stage: int, wanted: Collection[V], enters: tuple[V, ...], leaves: tuple[V, ...]
    ) -> StageSegments[P, V]:
        needed = self.needed(wanted, enters)
        mine = tuple(p for p in self.segments if self.pinned.get(p) == stage or p in needed)
        reads = dict.fromkeys((*(v for p in mine for v in self.segments[p].reads), *wanted))
        given = tuple(v for v in reads if v not in self.maker)
        return StageSegments(segments=mine, enters=enters, leaves=leaves, given=given)
