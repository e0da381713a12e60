"""Cuts a traced model into pipeline stages: the equations, loop iterations, parameters and inputs of each stage.

The program is a list of segments (``segments``). ``pase.local.stage_assignment`` says what belongs to which stage.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pase.backends.jax.pipeline.segments import Segment, SegmentList, StageEnv, StageKey, variables
from pase.backends.jax.spmd.interpreter import ManualWalk
from pase.backends.jax.spmd.values import Cache, DeviceValue
from pase.errors import PaseError
from pase.frontends.jax.frontend import TracedJax
from pase.frontends.jax.types import Aval
from pase.ir.blocks import Block
from pase.ir.cut_points import UnitChain
from pase.local.stage_assignment import PinnedSegment, SegmentedProgram, StageSegments
from pase.pytree import Tree

__all__ = ["Stage", "StageWeight", "stages_of"]


@dataclass(frozen=True)
class StageWeight:
    """A leaf of the parameters in a stage.

    rows: (first, end) of the leaf's rows in this stage, or None if the stage has the whole leaf.
    """

    leaf: int
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """A stage of a pipeline.

    segments: in the order in which they run. batch: the indices of the batch leaves that it reads. read_whole: the
    parameter leaves that its blocks read as a whole, not by rows. alike: a key that is equal for stages that do the
    same work with other weights. enters, leaves: the activations that are passed in and on. names: value -> tensor of
    the traced graph. constants: the program's constants.
    """

    segments: tuple[Segment, ...]
    weights: tuple[StageWeight, ...]
    batch: tuple[int, ...]
    read_whole: frozenset[int]
    alike: Hashable
    enters: tuple[StageKey, ...]
    leaves: tuple[StageKey, ...]
    given: tuple[StageKey, ...]
    rows: Mapping[str, int]
    names: Mapping[StageKey, str]
    constants: Mapping[StageKey, Tree]
    avals: Mapping[StageKey, Aval]

    def run(self, walk: ManualWalk, given: Sequence[DeviceValue], cache: Cache) -> list[DeviceValue]:
        """The outputs of the stage on one device.

        given: the values of its weights, batch leaves and entering activations. cache: the state of the model's body.
        """
        env: StageEnv = {key: DeviceValue(array=x) for key, x in self.constants.items()}
        env.update(zip(self.given, given, strict=True))
        for segment in self.segments:
            segment.run(walk, env, cache)
        return [walk.value(key, env) for key in self.leaves]


def stages_of(
    traced: TracedJax,
    leaf_names: Sequence[str],
    cuts: Sequence[int],
    recomputed: Sequence[Block] = (),
    chain: UnitChain | None = None,
) -> tuple[Stage, ...]:
    """The stages of a model.

    traced: the model on one micro-batch. cuts: the number of blocks of each stage, or of units of the chain.
    recomputed: blocks that any stage recomputes. Raises PaseError if the program does not have that many blocks in a
    row.
    """
    listing = SegmentList(traced=traced, cuts=cuts, recomputed=recomputed, chain=chain)
    inputs = traced.jaxpr.jaxpr.invars
    listing.names.update(zip(inputs, leaf_names, strict=True))
    listing.avals.update({v: v.aval for v in inputs})
    return _Cut(listing=listing, every=tuple(listing.segments())).stages()


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """Makes the stages of a list of segments. every: the segments, in order."""

    listing: SegmentList
    every: tuple[Segment, ...]

    @cached_property
    def inputs(self) -> Mapping[StageKey, int]:
        """Variable of the program's inputs -> index of the leaf."""
        return {v: i for i, v in enumerate(self.listing.traced.jaxpr.jaxpr.invars)}

    @cached_property
    def program(self) -> SegmentedProgram[Segment, StageKey]:
        n = len(self.listing.traced.param_paths)
        weights, batch = ([v for v, i in self.inputs.items() if (i < n) == first] for first in (True, False))
        program = SegmentedProgram(
            segments={p: PinnedSegment(p.reads, p.makes, p.block) for p in self.every},
            weights=weights,
            batch=batch,
            cuts=self.listing.cuts,
            returned=variables(self.listing.traced.jaxpr.jaxpr.outvars),
        )
        if any(program.maker.get(v) in program.pinned for p in self.every for v in p.stacks):
            raise PaseError(
                "it cannot be run in stages: its loop over layers slices a stack that is computed from the batch and "
                "parameters",
                where=f"'{self.listing.traced.graph.name}'",
                fix="pass the value on from layer to layer instead",
            )
        return program

    def stages(self) -> tuple[Stage, ...]:
        cut = self.program.stages()
        run = {p for s in cut for p in s.segments}
        by_rows = self._by_rows([p for p in self.every if p in run])
        return tuple(self._stage(k, s, by_rows) for k, s in enumerate(cut))

    def _by_rows(self, segments: Sequence[Segment]) -> Mapping[StageKey, str]:
        """Stack -> the loop whose rows alone each stage has of it: parameters, and what is made from them row by row.

        segments: those that any stage runs. All other stacks are whole in each stage that reads them.
        """
        n, made = len(self.listing.traced.param_paths), set(self.program.pinned)
        of_rows = [p for p in segments if p.row_by_row and p not in made]
        can = {v for v, i in self.inputs.items() if i < n} | {v for p in of_rows for v in p.makes}
        while True:
            readers: dict[StageKey, set[str]] = {v: {""} for v in self.program.returned}
            for p in reversed(segments):
                through = readers.get(p.makes[0], set()) if p.row_by_row and p.makes[0] in can else {""}
                for v in p.reads:
                    readers.setdefault(v, set()).update({p.loop} if v in p.stacks else through)
            found = {v: loops.pop() for v, loops in readers.items() if v in can and len(loops) == 1}
            found = {v: loop for v, loop in found.items() if loop and v.aval.shape}
            mixed = {
                p.makes[0]
                for p in of_rows
                if p.makes[0] in found and any(v.aval.shape and v not in found for v in p.reads)
            }
            if not mixed:
                return found
            can -= mixed

    def _stage(
        self, stage: int, cut: StageSegments[Segment, StageKey], by_rows: Mapping[StageKey, str]
    ) -> Stage:
        listing, n = self.listing, len(self.listing.traced.param_paths)
        read = sorted((self.inputs[v], v) for v in cut.given if v in self.inputs)
        of_blocks, last = self._read_by_blocks(stage, cut), stage + 1 == len(listing.cuts)
        return Stage(
            segments=cut.segments,
            weights=tuple(
                StageWeight(i, listing.rows[by_rows[v], stage] if v in by_rows else None)
                for i, v in read
                if i < n
            ),
            batch=tuple(i - n for i, _ in read if i >= n),
            rows=self._rows(stage, by_rows),
            given=(*(v for _, v in read), *cut.enters),
            read_whole=frozenset(i for i, v in read if i < n and v in of_blocks and v not in by_rows),
            alike=self._alike(stage, cut, by_rows),
            enters=cut.enters,
            leaves=tuple(listing.traced.jaxpr.jaxpr.outvars) if last else cut.leaves,
            names=listing.names,
            constants=listing.constants,
            avals=listing.avals,
        )

    def _rows(self, stage: int, by_rows: Mapping[StageKey, str]) -> dict[str, int]:
        """``Stage.rows``."""
        listing, found = self.listing, dict[str, int]()
        for v, loop in by_rows.items():
            first, stop = listing.rows[loop, stage]
            if stop > first:
                found[listing.names[v]] = stop - first
        return found | {
            inside: found[stack]
            for pairs in listing.stacks.values()
            for stack, inside in pairs
            if stack in found
        }

    def _read_by_blocks(self, stage: int, cut: StageSegments[Segment, StageKey]) -> Collection[StageKey]:
        """The values that the stage's blocks read, and those that these are made from."""
        layers = [range(*of) for of in self.listing.loops.values()] or [range(self.listing.blocks)]
        mine = {
            p
            for p in cut.segments
            if self.program.pinned.get(p) == stage and any(p.block in of for of in layers)
        }
        mine |= self.program.needed([v for p in mine for v in p.reads], cut.enters)
        return {v for p in mine for v in p.reads}

    def _alike(
        self, stage: int, cut: StageSegments[Segment, StageKey], by_rows: Mapping[StageKey, str]
    ) -> Hashable:
        """``Stage.alike``. A stage whose only work on activations is iterations of a loop does the same as any other
        that has as many, if each has just its own rows of the stacks."""
        mine = [p for p in cut.segments if self.program.pinned.get(p) == stage]
        if len(mine) != 1 or not mine[0].loop or any(v not in by_rows for v in mine[0].stacks):
            return stage
        first = sum(self.listing.cuts[:stage])

        def counted(keys: Sequence[StageKey]) -> tuple[StageKey, ...]:
            """The keys, with iterations counted from the stage's first one."""
            return tuple(
                (*k[:2], k[2] - first, k[3]) if isinstance(k, tuple) and len(k) == 4 else k for k in keys
            )

        beside = tuple(p for p in cut.segments if p is not mine[0])
        return self.listing.cuts[stage], beside, counted(cut.enters), counted(cut.leaves)
