"""Cuts a traced model into pipeline stages: the equations, loop iterations, parameters and inputs of each stage.

The program is a list of segments, each of which reads and makes values. A segment is one equation, one written-out
block, or one iteration of the loop over layers. A segment that works on activations (values that depend on both
parameters and the batch) belongs to one stage. Such segments before the blocks belong to the first stage, and those
after the blocks to the last one. Any other segment (a mask, a cast of weights, labels) runs in each stage that needs
it. Activations that a later stage reads are passed on from stage to stage.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.jax.frontend import TracedJax
from pase.frontends.jax.types import Aval
from pase.frontends.jax.versions import value_of
from pase.ir.blocks import Block
from pase.ir.cut_points import UnitChain
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array

    from pase.backends.jax.gspmd import Copies, JaxprWalk
from pase.backends.jax.pipeline.segments import (
    ITERATIONS,
    Segment,
    SegmentList,
    StageEnv,
    StageKey,
    StageRows,
    variables,
)
from pase.local.stage_assignment import PinnedSegment, pinned

__all__ = ["Stage", "StageWeight", "stages_of"]


@dataclass(frozen=True)
class StageWeight:
    """A leaf of the parameters in a stage.

    rows: (first, end) of the leaf's rows in this stage, or None if the stage has the whole leaf. loop: the path of the
    loop whose iterations read these rows.
    """

    leaf: int
    rows: tuple[int, int] | None = None
    loop: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """A stage of a pipeline.

    segments: in the order in which they run. batch: the indices of the batch leaves that it reads. read_whole: the
    parameter leaves that its blocks read as a whole, not by rows. alike: a key that is equal for stages that do the
    same work with other weights. enters, leaves: the activations that are passed in and on. inputs: variable of the
    program's inputs -> index of the leaf. names: value -> tensor of the traced graph. constants: the program's
    constants.
    """

    segments: tuple[Segment, ...]
    weights: tuple[StageWeight, ...]
    batch: tuple[int, ...]
    read_whole: frozenset[int]
    alike: Hashable
    enters: tuple[StageKey, ...]
    leaves: tuple[StageKey, ...]
    inputs: Mapping[StageKey, int]
    names: Mapping[StageKey, str]
    constants: Mapping[StageKey, Tree]
    avals: Mapping[StageKey, Aval]

    def run(
        self, walk: JaxprWalk, weights: Sequence[Array], batch: Sequence[Array], entered: Sequence[Array]
    ) -> list[Array]:
        """The outputs of the stage, computed from the values (or tracers) of one micro-batch."""
        env: StageEnv = dict(self.constants)
        leaf = {i: v for v, i in self.inputs.items()}
        n = len(walk.plan.traced.param_paths)
        for w, x in zip(self.weights, weights, strict=True):
            key = leaf[w.leaf]
            env[key if w.rows is None else StageRows(key, w.loop)] = walk.defined(x, self.names[key])
        for i, x in zip(self.batch, batch, strict=True):
            env[leaf[n + i]] = walk.defined(x, self.names[leaf[n + i]])
        for key, x in zip(self.enters, entered, strict=True):
            env[key] = walk.defined(x, self.names.get(key))
        copies: Copies = {}
        for segment in self.segments:
            segment.run(walk, env, copies)
        return [value_of(key, env) for key in self.leaves]


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
    listing = SegmentList(traced=traced, blocks=sum(cuts), recomputed=recomputed, chain=chain)
    return _Cut(listing=listing, leaf_names=leaf_names, cuts=tuple(cuts)).stages()


@dataclass(kw_only=True)
class _Cut:
    """Assigns segments to stages."""

    listing: SegmentList
    leaf_names: Sequence[str]
    cuts: tuple[int, ...]

    def stages(self) -> tuple[Stage, ...]:
        traced, listing = self.listing.traced, self.listing
        jaxpr = traced.jaxpr.jaxpr
        inputs = {v: i for i, v in enumerate(jaxpr.invars)}
        listing.names.update(zip(jaxpr.invars, self.leaf_names, strict=True))
        listing.avals.update({v: v.aval for v in jaxpr.invars})
        every = listing.segments()
        pinned = self._pinned(every, inputs)
        many = len(self.cuts)
        wanted: list[list[StageKey]] = [[] for _ in range(many)]
        for p, s in pinned.items():
            wanted[s] += p.reads
        wanted[-1] += variables(jaxpr.outvars)
        made_in = {key: s for p, s in pinned.items() for key in p.makes}
        cross = [self._crossing(wanted, made_in, s) for s in range(1, many)]
        enters = [(), *cross]
        leaves = [*cross, tuple(jaxpr.outvars)]
        whole: set[StageKey] = set()
        while True:
            plans = [
                self._of_stage(every, pinned, s, wanted[s], enters[s], inputs, whole) for s in range(many)
            ]
            more = {
                key for _, needs in plans for key in needs if key in inputs and not isinstance(key, StageRows)
            }
            by_loop: dict[StageKey, set[str]] = {}
            for key in (key for _, needs in plans for key in needs if isinstance(key, StageRows)):
                by_loop.setdefault(key.of, set()).add(key.loop)
            more |= {key for key, loops in by_loop.items() if len(loops) > 1}
            if more <= whole:
                break
            whole |= more
        out = []
        for s, (segments, needs) in enumerate(plans):
            layers = [range(*of) for of in listing.loops.values()] or [range(listing.blocks)]
            mine = [
                k
                for p, at in pinned.items()
                if at == s and any(p.block in of for of in layers)
                for k in p.reads
            ]
            _, of_blocks = self._of_stage(every, pinned, s, mine, enters[s], inputs, whole)
            made = self._stage(segments, needs, of_blocks, s, inputs, enters[s], leaves[s])
            first, stop = self._iterations_of(s)
            turns_alone = 0 < s < many - 1 and any(
                a <= first and stop <= b for a, b in listing.loops.values()
            )
            beside = tuple(p for p in segments if pinned.get(p) != s)
            same = (self.cuts[s], beside, *(self._counted(keys, s) for keys in (enters[s], leaves[s])))
            out.append(replace(made, alike=same) if turns_alone else made)
        return tuple(out)

    def _counted(self, keys: Sequence[StageKey], stage: int) -> tuple[Hashable, ...]:
        """Values as keys, with the loop iterations that make them counted from the stage's first iteration."""
        first = self._iterations_of(stage)[0]
        return tuple(
            (*k[:2], k[2] - first, k[3]) if isinstance(k, tuple) and len(k) == 4 else k for k in keys
        )

    def _iterations_of(self, stage: int) -> tuple[int, int]:
        first = sum(self.cuts[:stage])
        return first, first + self.cuts[stage]

    def _rows_of(self, stage: int, loop: str) -> tuple[int, int]:
        """(first, end) of the rows of a loop's stacks that the stage's iterations read."""
        begin, end = self.listing.loops[loop]
        first, stop = (min(max(at, begin), end) - begin for at in self._iterations_of(stage))
        n = end - begin
        return (n - stop, n - first) if self.listing.reverse[loop] else (first, stop)

    def _pinned(self, every: Sequence[Segment], inputs: Mapping[StageKey, int]) -> dict[Segment, int]:
        """Segment that works on activations -> its stage."""

        def whole(keys: Sequence[StageKey]) -> set[StageKey]:
            return {k.of if isinstance(k, StageRows) else k for k in keys}

        n = len(self.listing.traced.param_paths)
        segments = ((p, PinnedSegment(whole(p.reads), whole(p.makes), p.block)) for p in every)
        weights, batch = ([v for v, i in inputs.items() if (i < n) == first] for first in (True, False))
        out = pinned(segments, weights, batch, self.cuts)
        if any(isinstance(k, StageRows) for p in out for k in p.makes):
            raise PaseError(
                "it cannot be run in stages: its loop over layers slices a stack that is computed from the batch and "
                "parameters",
                where=f"'{self.listing.traced.graph.name}'",
                fix="pass the value on from layer to layer instead",
            )
        return out

    def _crossing(
        self, wanted: Sequence[Sequence[StageKey]], made_in: Mapping[StageKey, int], stage: int
    ) -> tuple[StageKey, ...]:
        """Values that are made before this stage and read in this stage or a later one."""
        later = dict.fromkeys(key for keys in wanted[stage:] for key in keys)
        return tuple(key for key in later if made_in.get(key, stage) < stage)

    def _of_stage(
        self,
        every: Sequence[Segment],
        pinned: Mapping[Segment, int],
        stage: int,
        wanted: Sequence[StageKey],
        enters: Sequence[StageKey],
        inputs: Mapping[StageKey, int],
        whole: set[StageKey],
    ) -> tuple[list[Segment], list[StageKey]]:
        """(the stage's segments in order, the leaves that they read, as a whole or by rows)."""
        producer = {key: p for p in every for key in p.makes}
        number = {p: i for i, p in enumerate(every)}
        have, needs = set(enters) | set(self.listing.constants), dict[StageKey, None]()
        placed = {p: i for p, i in number.items() if pinned.get(p) == stage}
        have |= {key for p in placed for key in p.makes}
        left = list(wanted)
        while left:
            key = left.pop()
            if key in have:
                continue
            have.add(key)
            maker = self._maker(key, stage, producer, pinned, inputs, whole)
            if maker is None:
                needs[key] = None
            elif maker not in placed:
                source = producer.get(key.of if isinstance(key, StageRows) else key)
                placed[maker] = number.get(maker, -1 if source is None else number[source])
                left += maker.reads
        # A segment that makes the rows of a value runs directly after the segment that makes the value.
        order = sorted(placed, key=lambda p: (placed[p], isinstance(p.makes[0], StageRows)))
        return order, list(needs)

    def _maker(
        self,
        key: StageKey,
        stage: int,
        producer: Mapping[StageKey, Segment],
        pinned: Mapping[Segment, int],
        inputs: Mapping[StageKey, int],
        whole: set[StageKey],
    ) -> Segment | None:
        """The segment that makes a value in a stage, or None for a leaf or the stage's rows of a parameter leaf."""
        if not isinstance(key, StageRows):
            return None if key in inputs else producer[key]
        found, source = producer.get(key), producer.get(key.of)
        if found is not None:
            return found
        if source is not None and source.by_rows is not None and source not in pinned:
            return source.by_rows(key.loop)
        n = len(self.listing.traced.param_paths)
        cut = inputs.get(key.of, n) < n and key.of not in whole
        return None if cut else self._sliced(key, stage)

    def _sliced(self, key: StageRows, stage: int) -> Segment:
        """A segment that slices the stage's rows from a stack of which the stage has all rows."""
        first, stop = self._rows_of(stage, key.loop)

        def run(walk: JaxprWalk, env: StageEnv, copies: Copies) -> None:
            env[key] = env[key.of][first:stop]

        return Segment(reads=(key.of,), makes=(key,), block=-1, run=run)

    def _stage(
        self,
        segments: Sequence[Segment],
        needs: Sequence[StageKey],
        of_blocks: Sequence[StageKey],
        stage: int,
        inputs: Mapping[StageKey, int],
        enters: tuple[StageKey, ...],
        leaves: tuple[StageKey, ...],
    ) -> Stage:
        n = len(self.listing.traced.param_paths)
        weights, batch = [], []
        for key in needs:
            i = inputs[key.of if isinstance(key, StageRows) else key]
            if i < n:
                rows = isinstance(key, StageRows)
                weights.append(
                    StageWeight(i, self._rows_of(stage, key.loop), key.loop) if rows else StageWeight(i)
                )
            else:
                batch.append(i - n)
        return Stage(
            segments=tuple(segments),
            weights=tuple(sorted(weights, key=lambda w: w.leaf)),
            batch=tuple(sorted(batch)),
            read_whole=frozenset(inputs[key] for key in of_blocks if not isinstance(key, StageRows)),
            alike=stage,
            enters=enters,
            leaves=leaves,
            inputs=inputs,
            names=self.listing.names,
            constants={**self.listing.constants, ITERATIONS: self._iterations_of(stage)},
            avals=self.listing.avals,
        )
