"""A traced model as a list of segments, from which the stages of a pipeline are built.

A segment reads and makes values. It is one equation, one written-out block, or the iterations of the loop over layers
that one stage runs. The program consists either of equal blocks (written out, or as one loop), or of a chain of units
between cut points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from pase.backends.jax.spmd.control import in_loop_layout, written_out
from pase.backends.jax.spmd.values import Cache, DeviceValue
from pase.errors import PaseError
from pase.frontends.jax.blocks import blocks_of, loops_of
from pase.frontends.jax.frontend import TracedJax, inlined, inner_jaxpr
from pase.frontends.jax.rules import row_by_row
from pase.frontends.jax.types import Aval, Eqn, Jaxpr, Var
from pase.frontends.jax.versions import is_dropped, is_literal, scan_groups
from pase.ir import Place
from pase.ir.blocks import Block
from pase.ir.cut_points import UnitChain
from pase.pytree import Tree

if TYPE_CHECKING:
    from pase.backends.jax.spmd.interpreter import ManualWalk

__all__ = ["Segment", "SegmentList", "StageEnv", "StageKey", "variables"]

StageKey: TypeAlias = Any
"""A value: a variable of a jaxpr, or an intermediate value of a loop, as a tuple such as (path, "carry", iteration,
index)."""
StageEnv = dict[StageKey, DeviceValue]


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """A segment of the program.

    run: reads the inputs from the environment and writes the results to it. Its arguments are the walk that runs
    equations on one device, the environment, and the state of the model's body. block: the index of the segment's block
    or unit; -1 before the blocks, and the number of blocks after them. row_by_row: whether each row of the result
    depends only on the same row of the operands, so that it can run on some rows of stacks alone. loop: the path of the
    loop over layers, if the segment is iterations of it. stacks: the stacks of which these read a row each; the
    environment has all rows of a stack, or only those of these iterations.
    """

    reads: tuple[StageKey, ...]
    makes: tuple[StageKey, ...]
    block: int
    run: Callable[[ManualWalk, StageEnv, Cache], None]
    row_by_row: bool = False
    loop: str = ""
    stacks: tuple[StageKey, ...] = ()


@dataclass(kw_only=True)
class SegmentList:
    """The program's segments, in order.

    cuts: the number of equal blocks of each stage, or of units of the chain. recomputed: the blocks that backward
    recomputes. chain: the units between cut points; None if the program has equal blocks.

    ``segments`` also fills names (value -> tensor of the graph), constants (value -> array) and avals (value -> shape
    and dtype).
    """

    traced: TracedJax
    cuts: Sequence[int]
    recomputed: Sequence[Block]
    chain: UnitChain | None = None
    names: dict[StageKey, str] = field(default_factory=dict)
    constants: dict[StageKey, Tree] = field(default_factory=dict)
    avals: dict[StageKey, Aval] = field(default_factory=dict)
    loops: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Path of a loop over layers -> the blocks, [first, end), that are its iterations. If it is empty, the blocks are
    ``runs``."""
    runs: dict[tuple[str, int], int] = field(default_factory=dict)
    """(prefix, first equation) of a written-out block -> the equation after its last one."""
    rows: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """(path of a loop over layers, stage) -> the rows of stacks, [first, end), that the stage's iterations read."""
    stacks: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Path of a loop over layers -> (tensor, tensor) for each stack that it slices: outside, and inside the loop."""
    _current: int = -1
    """The block or unit of the segments that are being made; -1 before the first."""
    _begun: int = 0
    """How many blocks have been begun."""

    def __post_init__(self) -> None:
        if self.chain is not None:
            self.loops = dict(self.chain.loops)
            return
        loops = loops_of(self.traced, self.blocks)
        if len(loops) == 1:
            self.loops = {loops[0]: (0, self.blocks)}
            return
        found = blocks_of(self.traced)
        if loops or len(found) != self.blocks or len({b.prefix for b in found}) != 1:
            raise PaseError(
                f"it cannot be run in stages: it must have {self.blocks} equal blocks in a row, but it has "
                f"{len(loops)} loops with {self.blocks} iterations and {len(found)} written-out blocks",
                where=f"'{self.traced.graph.name}'",
                fix="write the layers as one loop (scan), or compile with pipeline='none'",
            )
        self.runs = {(b.prefix, b.start): b.stop for b in found}

    @property
    def blocks(self) -> int:
        return sum(self.cuts)

    def segments(self) -> list[Segment]:
        """The segments of the whole program, in order."""
        closed = self.traced.jaxpr
        self.constants.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        return list(self._of(closed.jaxpr, ""))

    def _holds_blocks(self, path: str) -> bool:
        """Whether the call at this path contains blocks, or several units."""
        within = f"{path}."
        if any(p.startswith(within) for p in (*self.loops, *(p for p, _ in self.runs))):
            return True
        at = {} if self.chain is None else self.chain.at
        return len({unit for p, unit in at.items() if p.startswith(within)}) > 1

    def _of(self, jaxpr: Jaxpr, prefix: str) -> Iterator[Segment]:
        """The segments of a jaxpr. Calls that contain blocks or several units are inlined. prefix: of its paths."""
        i = 0
        while i < len(jaxpr.eqns):
            eqn, path, stop = jaxpr.eqns[i], f"{prefix}{i}", i + 1
            if self.chain is not None:
                self._current = self._unit(path)
            if path in self.loops:
                yield from self._layers_loop(eqn, Place(path))
            elif inlined(eqn) and self._holds_blocks(path):
                inner, consts = inner_jaxpr(eqn)
                self.constants.update(zip(inner.constvars, consts, strict=True))
                yield from map(self._alias, eqn.invars, inner.invars)
                yield from self._of(inner, f"{path}.")
                yield from map(self._alias, inner.outvars, eqn.outvars)
            else:
                is_block = (prefix, i) in self.runs
                if is_block:
                    stop, self._current = self.runs[prefix, i], self._current + 1
                    self._begun += 1
                else:
                    stop = max(
                        (b.stop for b in self.recomputed if (b.prefix, b.start) == (prefix, i)), default=i + 1
                    )
                yield self._span(jaxpr, prefix, i, stop, is_block)
            i = stop

    def _unit(self, path: str) -> int:
        """The unit of an equation: its own or the last of those inside it, or -1 if it has none."""
        assert self.chain is not None
        within = (unit for p, unit in self.chain.at.items() if p.startswith(f"{path}."))
        return self.chain.at.get(path, max(within, default=-1))

    def _here(self) -> int:
        """The block index of a segment that is not a block itself: the latest block, or the number of blocks (which
        means after all of them) once all have begun."""
        if self.chain is not None:
            return self._current
        return self.blocks if self._begun == self.blocks else self._current

    def _alias(self, source: StageKey, target: StageKey) -> Segment:
        """A segment that passes a value into or out of an inlined call, whose jaxpr has other variables."""

        def run(walk: ManualWalk, env: StageEnv, cache: Cache) -> None:
            env[target] = walk.value(source, env)

        self.avals[target] = target.aval
        if not is_literal(source) and source in self.names:
            self.names[target] = self.names[source]
        return Segment(
            reads=variables([source]), makes=variables([target]), block=self._here(), run=run, row_by_row=True
        )

    def _span(self, jaxpr: Jaxpr, prefix: str, start: int, stop: int, is_block: bool) -> Segment:
        """The equations [start, stop) of a jaxpr as one segment."""
        eqns = jaxpr.eqns[start:stop]
        makes = tuple(v for e in eqns for v in e.outvars if not is_dropped(v))
        reads = tuple(
            dict.fromkeys(v for v in variables([v for e in eqns for v in e.invars]) if v not in makes)
        )
        for i, e in enumerate(eqns, start):
            for v, name in zip(e.outvars, self.traced.results[Place(f"{prefix}{i}")], strict=True):
                self.names[v], self.avals[v] = name, v.aval

        def run(walk: ManualWalk, env: StageEnv, cache: Cache) -> None:
            walk.span(jaxpr, env, start, stop, prefix, cache)

        alone = not is_block and stop == start + 1
        return Segment(
            reads=reads,
            makes=makes,
            block=self._current if is_block else self._here(),
            run=run,
            row_by_row=alone and bool(makes) and row_by_row(eqns[0]),
        )

    def _layers_loop(self, eqn: Eqn, at: Place) -> Iterator[Segment]:
        """The segments of a loop over layers: the first carry in its layout, each stage's iterations, the results."""
        nc, nk = scan_groups(eqn)
        path, (begin, end), reverse = at.path, self.loops[at.path], bool(eqn.params["reverse"])
        if self.chain is not None:
            self._current = begin
        body_results = [v.aval for v in eqn.params["jaxpr"].jaxpr.outvars]

        def carry(t: int) -> list[StageKey]:
            """The carry before iteration t."""
            keys: list[StageKey] = [(path, "carry", t, k) for k in range(nk)]
            for k, key in enumerate(keys):
                self.avals[key] = body_results[k]
                self.names[key] = self.traced.results[at.its("carry", k)][0]
            return keys

        for k, key in enumerate(carry(0)):
            yield self._into_carry(at.its("carry", k), eqn.invars[nc + k], key)
        outside = enumerate(self.traced.operands[at][nc + nk :])
        inside = ((name, self.traced.results.get(at.its("xs", k))) for k, name in outside)
        self.stacks[path] = [(name, made[0]) for name, made in inside if name and made]
        ys: list[list[StageKey]] = []
        for stage, (a, b) in enumerate(pairwise(accumulate(self.cuts, initial=0))):
            first, stop = (min(max(x, begin), end) - begin for x in (a, b))
            rows = (end - begin - stop, end - begin - first) if reverse else (first, stop)
            self.rows[path, stage] = rows
            if first == stop:
                continue
            ys.append([(path, "y", first, k) for k in range(len(body_results) - nk)])
            names = self.traced.results[at][nk:]
            for key, aval, name in zip(ys[-1], body_results[nk:], names, strict=True):
                self.avals[key], self.names[key] = aval.update(shape=(stop - first, *aval.shape)), name
            self._current = begin + first
            yield self._iterations(eqn, at, rows, carry(first), (*carry(stop), *ys[-1]))
            self._current = begin + stop - 1
        self._begun = self.blocks
        for k, (var, name) in enumerate(zip(eqn.outvars, self.traced.results[at], strict=True)):
            if not is_dropped(var):
                of_stages = ys[::-1] if reverse else ys
                yield self._result(
                    var, [carry(end - begin)[k]] if k < nk else [y[k - nk] for y in of_stages], name
                )

    def _into_carry(self, at: Place, var: Var, key: StageKey) -> Segment:
        """A segment that brings an operand of the loop over layers into the layout of the body's carry.

        at: the place of the operand in the loop. key: the operand inside the loop.
        """

        def run(walk: ManualWalk, env: StageEnv, cache: Cache) -> None:
            env[key] = in_loop_layout(walk, at, walk.value(var, env), cache)

        return Segment(reads=variables([var]), makes=(key,), block=self._here(), run=run)

    def _iterations(
        self, eqn: Eqn, at: Place, rows: tuple[int, int], carry: Sequence[StageKey], makes: Sequence[StageKey]
    ) -> Segment:
        """The iterations of the loop over layers that one stage runs, written out.

        rows: [first, end) of the stacks. carry: what they begin with. makes: the last carry, then the rows of stacked
        results.
        """
        nc, nk = scan_groups(eqn)
        besides = (*eqn.invars[:nc], *eqn.invars[nc + nk :])

        def run(walk: ManualWalk, env: StageEnv, cache: Cache) -> None:
            ins, carried = [walk.value(v, env) for v in besides], [env[key] for key in carry]
            made = written_out(walk, eqn, at, ins, carried, range(*rows), cache)
            env.update(zip(makes, made, strict=True))

        stacks = variables(eqn.invars[nc + nk :])
        return Segment(
            reads=(*variables(eqn.invars[:nc]), *carry, *stacks),
            makes=tuple(makes),
            block=self._current,
            run=run,
            loop=at.path,
            stacks=stacks,
        )

    def _result(self, var: Var, reads: Sequence[StageKey], name: str) -> Segment:
        """A result of the loop over layers. reads: the last carry, or the rows that each stage's iterations return."""

        def run(walk: ManualWalk, env: StageEnv, cache: Cache) -> None:
            import jax.numpy as jnp

            parts = [env[key] for key in reads]
            array = jnp.concatenate([h.array for h in parts]) if len(parts) > 1 else parts[0].array
            env[var] = walk.known(replace(parts[0], array=array, tensor=name))

        self.names[var], self.avals[var] = name, var.aval
        block = self.blocks if self.chain is None else self._current
        return Segment(reads=tuple(reads), makes=(var,), block=block, run=run)


def variables(values: Sequence[StageKey]) -> tuple[StageKey, ...]:
    """The values without literals."""
    return tuple(v for v in values if not is_literal(v))
