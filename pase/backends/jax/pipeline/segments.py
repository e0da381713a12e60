"""A traced model as a list of segments, from which the stages of a pipeline are built.

A segment reads and makes values. It is one equation, one written-out block, or one iteration of the loop over layers.
The program consists either of equal blocks (written out, or as one loop), or of a chain of units between cut points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from pase.errors import PaseError
from pase.frontends.jax.blocks import blocks_of, loops_of
from pase.frontends.jax.frontend import TracedJax, inlined, inner_jaxpr
from pase.frontends.jax.types import Aval, Eqn, Jaxpr, Var
from pase.frontends.jax.versions import is_dropped, is_literal, literal_array, scan_groups, value_of
from pase.ir import Place, PlacePart
from pase.ir.blocks import Block
from pase.ir.cut_points import UnitChain
from pase.pytree import Tree

if TYPE_CHECKING:
    from pase.backends.jax.gspmd import Copies, JaxprWalk

__all__ = ["ITERATIONS", "Segment", "SegmentList", "StageEnv", "StageKey", "StageRows", "variables"]

StageKey: TypeAlias = Any
"""A value: a variable of a jaxpr, ``StageRows``, or an operand or intermediate value of a loop, as a tuple such as
(path, "const", index) or (path, "carry", iteration, index)."""
StageEnv = dict[StageKey, Tree]


@dataclass(frozen=True)
class StageRows:
    """The rows of a stack that the iterations of one stage read. loop: the path of the loop over layers."""

    of: StageKey
    loop: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """A segment of the program.

    run: reads the inputs from the environment and writes the results to it. Its arguments are the walk that lowers
    equations, the environment, and the copies of tensors that the walk has already made. block: the index of the
    segment's block or unit; -1 before the blocks, and the number of blocks after them. by_rows: path of a loop -> a
    segment that does the same on only those rows of stacks that a stage's iterations of the loop read; None if that is
    not possible.
    """

    reads: tuple[StageKey, ...]
    makes: tuple[StageKey, ...]
    block: int
    run: Callable[[JaxprWalk, StageEnv, Copies], None]
    by_rows: Callable[[str], Segment] | None = None


@dataclass(kw_only=True)
class SegmentList:
    """The program's segments, in order.

    blocks: the number of equal blocks, or of units of the chain. recomputed: the blocks that backward recomputes.
    chain: the units between cut points; None if the program has equal blocks.

    ``segments`` also fills names (value -> tensor of the graph), constants (value -> array) and avals (value -> shape
    and dtype).
    """

    traced: TracedJax
    blocks: int
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
    reverse: dict[str, bool] = field(default_factory=dict)
    """Path of a loop over layers -> whether it runs in reverse: its first iteration reads the last rows."""
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

        def run(walk: JaxprWalk, env: StageEnv, copies: Copies) -> None:
            env[target] = value_of(source, env)

        self.avals[target] = target.aval
        if not is_literal(source) and source in self.names:
            self.names[target] = self.names[source]
        return Segment(reads=variables([source]), makes=variables([target]), block=self._here(), run=run)

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

        def run(walk: JaxprWalk, env: StageEnv, copies: Copies) -> None:
            walk.span(jaxpr, env, start, stop, prefix, copies)

        here = self._here()

        @cache
        def on_rows(loop: str) -> Segment:
            def run_on_rows(walk: JaxprWalk, env: StageEnv, copies: Copies) -> None:
                inner: StageEnv = {v: env[StageRows(v, loop) if v.aval.shape else v] for v in reads}
                walk.span(jaxpr, inner, start, stop, prefix, {})
                env.update({StageRows(v, loop): inner[v] for v in makes})

            return Segment(
                reads=tuple(StageRows(v, loop) if v.aval.shape else v for v in reads),
                makes=tuple(StageRows(v, loop) for v in makes),
                block=here,
                run=run_on_rows,
            )

        by_rows = on_rows if not is_block and stop == start + 1 and _elementwise(eqns[0]) else None
        block = self._current if is_block else self._here()
        return Segment(reads=reads, makes=makes, block=block, run=run, by_rows=by_rows)

    def _layers_loop(self, eqn: Eqn, at: Place) -> Iterator[Segment]:
        """The segments of a loop over layers: its operands in the body's layouts, its iterations, its results."""
        nc, nk = scan_groups(eqn)
        path, (begin, end) = at.path, self.loops[at.path]
        trip_count, reverse = end - begin, bool(eqn.params["reverse"])
        self.reverse[path] = reverse
        if self.chain is not None:
            self._current = begin
        operands, names = list(eqn.invars), self.traced.operands[at]
        consts: list[StageKey] = [(at.path, "const", k) for k in range(nc)]
        stacks = [(at.path, "xs", k) for k in range(len(operands) - nc - nk)]
        carry: list[list[StageKey]] = [
            [(at.path, "carry", t, k) for k in range(nk)] for t in range(trip_count + 1)
        ]
        body_results = eqn.params["jaxpr"].jaxpr.outvars
        for keys in carry:
            for k, key in enumerate(keys):
                self.avals[key] = body_results[k].aval
                self.names[key] = self.traced.results[at.its("carry", k)][0]
        parts: list[tuple[PlacePart, int, StageKey]] = [("const", k, key) for k, key in enumerate(consts)]
        parts += [("carry", k, key) for k, key in enumerate(carry[0])]
        # The operands are the constants, the carry and then the stacks, which follow below.
        for (part, k, key), var, name in zip(parts, operands, names, strict=False):
            yield self._layout_segment(at.its(part, k), var, var, key, key, name)
        for k, (key, var, name) in enumerate(zip(stacks, operands[nc + nk :], names[nc + nk :], strict=True)):
            rows = StageRows(var, path), StageRows(key, path)
            yield self._layout_segment(at.its("xs", k), var, rows[0], key, rows[1], name)
        ys = [[(at.path, "y", t, k) for k in range(len(body_results) - nk)] for t in range(trip_count)]
        for t in range(trip_count):
            self._current = begin + t
            for k, key in enumerate(ys[t]):
                self.avals[key] = body_results[nk + k].aval
            yield self._iteration(eqn, at, t, (consts, carry[t], stacks), (carry[t + 1], ys[t]))
        self._begun = self.blocks
        results = self.traced.results[at]
        for k, var in enumerate(eqn.outvars):
            if not is_dropped(var):
                iterations = ys[::-1] if reverse else ys
                sources = [carry[-1][k]] if k < nk else [y[k - nk] for y in iterations]
                yield self._result(var, sources, results[k], k >= nk)

    def _layout_segment(
        self, at: Place, var: Var, reads: StageKey, key: StageKey, makes: StageKey, name: str | None
    ) -> Segment:
        """A segment that brings an operand of the loop over layers into the layout in which the body reads it.

        at: the place of the operand in the loop. reads, makes: the operand before and after, whole or as rows. key: the
        whole operand inside the loop. name: its tensor in the graph.
        """

        def run(walk: JaxprWalk, env: StageEnv, copies: Copies) -> None:
            env[makes] = walk.in_loop_layout(
                at, literal_array(var) if is_literal(var) else env[reads], name, copies
            )

        self.avals[key] = var.aval
        return Segment(reads=() if is_literal(var) else (reads,), makes=(makes,), block=self._here(), run=run)

    def _iteration(
        self,
        eqn: Eqn,
        at: Place,
        t: int,
        reads: tuple[Sequence[StageKey], Sequence[StageKey], Sequence[StageKey]],
        makes: tuple[Sequence[StageKey], Sequence[StageKey]],
    ) -> Segment:
        """Iteration t of the loop over layers. reads: (constants, carry, stacks). makes: (next carry, stacked results).

        The environment has only those rows of stacks that the stage's iterations read (``ITERATIONS``).
        """
        consts, carry, stacks = reads
        path, (begin, end) = at.path, self.loops[at.path]

        def run(walk: JaxprWalk, env: StageEnv, copies: Copies) -> None:
            first, stop = env[ITERATIONS]
            row = min(stop, end) - begin - 1 - t if self.reverse[path] else begin + t - max(first, begin)
            x = [env[StageRows(key, path)][row] for key in stacks]
            carried, ys = walk.iteration(eqn, at, [env[k] for k in consts], [env[k] for k in carry], x)
            env.update(zip((*makes[0], *makes[1]), (*carried, *ys), strict=True))

        return Segment(
            reads=(*consts, *carry, *(StageRows(key, path) for key in stacks)),
            makes=(*makes[0], *makes[1]),
            block=begin + t,
            run=run,
        )

    def _result(self, var: Var, reads: Sequence[StageKey], name: str, stacked: bool) -> Segment:
        """A result of the loop over layers. reads: the last carry or, if ``stacked``, a row from each iteration."""

        def run(walk: JaxprWalk, env: StageEnv, copies: Copies) -> None:
            import jax.numpy as jnp

            values = [env[key] for key in reads]
            env[var] = walk.defined(jnp.stack(values) if stacked else values[0], name)

        self.names[var], self.avals[var] = name, var.aval
        block = self.blocks if self.chain is None else self._current
        return Segment(reads=tuple(reads), makes=(var,), block=block, run=run)


ITERATIONS = ("iterations",)
"""The environment's key for the (first, end) of a stage's iterations, counted in blocks of the whole program."""
_ELEMENTWISE = frozenset({"convert_element_type", "mul", "add", "sub", "div", "neg", "tanh", "exp", "copy"})


def _elementwise(eqn: Eqn) -> bool:
    """Whether an equation is known to compute each row of its result only from the same row of the operands."""
    shapes = {v.aval.shape for v in (*eqn.invars, *eqn.outvars)} - {()}
    return eqn.primitive.name in _ELEMENTWISE and len(shapes) == 1


def variables(values: Sequence[StageKey]) -> tuple[StageKey, ...]:
    """The values without literals."""
    return tuple(v for v in values if not is_literal(v))
