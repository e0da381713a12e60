"""Runs a function on arrays that stay on different ranks, such as an optimizer's update of a model in stages.

The function is traced once as a whole. Each equation runs on the ranks that have all of its operands. If no rank has
all of them, the missing ones must be scalars (such as the norm of all gradients), which are sent. So there is one
program per rank between any two rounds of sending scalars.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pase.backends.jax.pipeline.arrays import ArrayPlacement, joined, on_rank
from pase.backends.jax.pipeline.programs import flat
from pase.errors import PaseError
from pase.frontends.jax.rules import pointwise
from pase.frontends.jax.types import ClosedJaxpr, Eqn, Jaxpr, Var
from pase.frontends.jax.versions import (
    function_of,
    is_dropped,
    is_literal,
    jaxprs_inside,
    literal_array,
    opened,
    plain_array,
    source_line,
)

if TYPE_CHECKING:
    from jax import Array, ShapeDtypeStruct

__all__ = ["OnRanks", "numbers_in"]


@dataclass(frozen=True, kw_only=True, eq=False)
class OnRanks:
    """A function that runs on arrays of several ranks.

    fn: from flat arrays to flat arrays. given: the shapes of its arguments. placements, out_placements: where its
    arguments and results are stored. ranks: the number of ranks. parts: argument that is a part of a cut stack, or has
    a row for each row of one -> (the stack, the part). reshard_to: argument -> the layout to which it is resharded
    first. donate: whether the memory of the arguments may be reused.
    """

    fn: Callable[..., Sequence[Array]]
    given: tuple[ShapeDtypeStruct, ...]
    placements: tuple[ArrayPlacement, ...]
    out_placements: tuple[ArrayPlacement, ...]
    ranks: int
    parts: Mapping[int, tuple[str, int]]
    reshard_to: Mapping[int, ArrayPlacement]
    donate: bool

    def __call__(self, args: Sequence[Array]) -> list[Array]:
        jaxpr, consts = opened(self._closed)
        have: dict[tuple[Var, int], Array] = {
            (v, r): x for v, x in zip(jaxpr.constvars, consts, strict=True) for r in range(self.ranks)
        }
        for v, x, placement in zip(jaxpr.invars, args, self.placements, strict=True):
            for r in placement.ranks:
                have[v, r] = on_rank(x, placement, r)
        for (_, rank), (reads, makes, run, donated) in self._programs.items():
            values = [self._at(have, v, rank) for v in reads]
            kept = [x for x, d in zip(values, donated, strict=True) if not d]
            made = run([x for x, d in zip(values, donated, strict=True) if d], kept)
            have.update({(v, rank): x for v, x in zip(makes, made, strict=True)})
        return [
            joined([self._out(have, v, r, placement) for r in placement.ranks], placement)
            for v, placement in zip(jaxpr.outvars, self.out_placements, strict=True)
        ]

    def _out(
        self, have: Mapping[tuple[Var, int], Array], v: Var, rank: int, placement: ArrayPlacement
    ) -> Array:
        import jax

        x = literal_array(v) if is_literal(v) else self._at(have, v, rank)
        return jax.device_put(x, placement.on(rank))

    def _at(self, have: Mapping[tuple[Var, int], Array], v: Var, rank: int) -> Array:
        """The value on a rank: the rank's own, or a scalar copied from another rank."""
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        if (v, rank) in have:
            return have[v, rank]
        source = next(have[v, r] for r in range(self.ranks) if (v, r) in have)
        placement = self.placements[0]
        return jax.device_put(
            source, NamedSharding(Mesh(placement.grid[rank], placement.names), PartitionSpec())
        )

    @cached_property
    def _closed(self) -> ClosedJaxpr:
        import jax

        closed = flat(jax.make_jaxpr(self.fn)(*self.given))
        _check_rows(opened(closed)[0], self.parts)
        return closed

    @property
    def _traced(self) -> Jaxpr:
        return opened(self._closed)[0]

    @cached_property
    def _runs(self) -> tuple[dict[int, frozenset[int]], dict[int, int]]:
        """(equation -> the ranks that run it, equation -> the number of rounds of sent scalars before it)."""
        jaxpr = self._traced
        everywhere = frozenset(range(self.ranks))
        placement: dict[Var, frozenset[int]] = {
            v: frozenset(h.ranks) for v, h in zip(jaxpr.invars, self.placements, strict=True)
        }
        level: dict[Var, int] = {}
        can: dict[int, frozenset[int]] = {}
        late: dict[int, int] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            reads = [v for v in eqn.invars if not is_literal(v)]
            big = [v for v in reads if v.aval.size > 1]
            ranks = everywhere.intersection(*(placement.get(v, everywhere) for v in reads))
            if not ranks:
                ranks = everywhere.intersection(*(placement.get(v, everywhere) for v in big))
                if not big:
                    ranks = frozenset({min(min(placement.get(v, everywhere)) for v in reads)})
            if not ranks:
                raise PaseError(
                    f"the optimizer cannot be run in stages: its '{eqn.primitive.name}' works on parameters of several "
                    "stages at once, but only scalars, such as a norm, may depend on all of them",
                    where=str(source_line(eqn)),
                    fix="choose an optimizer that updates each parameter by itself, or compile with pipeline='none'",
                )
            can[i] = ranks
            late[i] = max(
                (level.get(v, 0) + (not ranks <= placement.get(v, everywhere)) for v in reads), default=0
            )
            for v in eqn.outvars:
                placement[v], level[v] = ranks, late[i]
        need: dict[Var, set[int]] = {}
        for v, h in zip(jaxpr.outvars, self.out_placements, strict=True):
            if not is_literal(v):
                need.setdefault(v, set()).update(h.ranks)
        out: dict[int, frozenset[int]] = {}
        for i in reversed(range(len(jaxpr.eqns))):
            eqn = jaxpr.eqns[i]
            want = set().union(*(need.get(v, set()) for v in eqn.outvars))
            if want:
                here = (want & can[i]) | ({min(can[i])} if want - can[i] else set())
                out[i] = frozenset(here)
                for v in eqn.invars:
                    if not is_literal(v):
                        need.setdefault(v, set()).update(here)
        return out, late

    @cached_property
    def _programs(
        self,
    ) -> dict[tuple[int, int], tuple[list[Var], list[Var], Callable[..., list[Array]], list[bool]]]:
        """(round of sent scalars, rank) -> (operands, results, jitted program, which operands it donates), in order."""
        jaxpr = self._traced
        runs, late = self._runs
        of: dict[tuple[int, int], list[int]] = {}
        for i, ranks in sorted(runs.items()):
            for r in ranks:
                of.setdefault((late[i], r), []).append(i)
        wanted: dict[Var, set[tuple[int, int] | None]] = {
            v: {None} for v in jaxpr.outvars if not is_literal(v)
        }
        for key, equations in of.items():
            for v in (v for i in equations for v in jaxpr.eqns[i].invars if not is_literal(v)):
                wanted.setdefault(v, set()).add(key)
        return {key: self._program(key, of[key], wanted) for key in sorted(of)}

    def _program(
        self,
        key: tuple[int, int],
        equations: Sequence[int],
        wanted: Mapping[Var, set[tuple[int, int] | None]],
    ) -> tuple[list[Var], list[Var], Callable[..., list[Array]], list[bool]]:
        import jax

        jaxpr = self._traced
        mine = [jaxpr.eqns[i] for i in equations]
        # In the order of the program: the order of a set of variables would differ between processes.
        made = dict.fromkeys(v for e in mine for v in e.outvars if not is_dropped(v))
        outside = set(jaxpr.constvars) | made.keys()
        reads = list(
            dict.fromkeys(v for e in mine for v in e.invars if not is_literal(v) and v not in outside)
        )
        makes = [v for v in made if wanted.get(v, set()) - {key}]
        number = {v: i for i, v in enumerate(jaxpr.invars)}
        donated = [
            self.donate
            and v in number
            and wanted[v] == {key}
            and self.placements[number[v]].ranks == (key[1],)
            and v.aval.size > 1
            for v in reads
        ]
        out_placement = {
            v: h for v, h in zip(jaxpr.outvars, self.out_placements, strict=True) if not is_literal(v)
        }
        fn = function_of(self._closed, mine, reads, makes)
        layouts = [self.reshard_to.get(number[v]) if v in number else None for v in reads]

        def run(given: Sequence[Array], kept: Sequence[Array]) -> list[Array]:
            some, others = iter(given), iter(kept)
            values = [next(some) if d else next(others) for d in donated]
            return fn(
                *(
                    x if h is None else jax.lax.with_sharding_constraint(x, h.on(key[1]))
                    for x, h in zip(values, layouts, strict=True)
                )
            )

        shardings = [
            out_placement[v].on(key[1]) if v in out_placement and key[1] in out_placement[v].ranks else None
            for v in makes
        ]
        return reads, makes, _unwarned(jax.jit(run, donate_argnums=0, out_shardings=shardings)), donated


def _unwarned(jitted: Callable[..., list[Array]]) -> Callable[..., list[Array]]:
    """The function without JAX's warning that no result takes the memory of some donated arrays.

    Gradients are donated to be freed: a step has no result to which their memory could go.
    """

    def run(*args: Sequence[Array]) -> list[Array]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return jitted(*args)

    return run


def numbers_in(program: ClosedJaxpr | Jaxpr) -> Iterator[str]:
    """The numbers in a program, as texts: literals, and constants of one element."""
    jaxpr, constants = opened(program)
    literals = [literal_array(v) for eqn in jaxpr.eqns for v in eqn.invars if is_literal(v)]
    yield from (repr(x.item()) for x in map(plain_array, (*constants, *literals)) if x.size == 1)
    for eqn in jaxpr.eqns:
        for inner in jaxprs_inside(eqn):
            yield from numbers_in(inner)


_RANDOM = ("random_", "threefry", "rng_")
_REDUCTIONS = frozenset(f"reduce_{how}" for how in ("sum", "max", "min", "prod", "and", "or", "xor"))


def _check_rows(jaxpr: Jaxpr, parts: Mapping[int, tuple[str, int]]) -> None:
    """Raise PaseError if updating each stage's own layers would not give the same numbers as updating the whole stack.

    The update of a layer may depend on other layers of its stack only by a sum over all of them, and not on the layer's
    number in its part. It must not draw random numbers, because these depend on the number of parts and their shapes.
    parts: argument that is a part of a stack, or has a row for each row of one -> (the stack, the part).
    """
    if parts and any(e.primitive.name.startswith(_RANDOM) for e in jaxpr.eqns):
        raise PaseError(
            "the optimizer cannot be run in stages: it draws random numbers, which would differ for parameters that "
            "are cut into stages",
            where="optimizer",
            fix="make each layer a leaf of its own, or choose an optimizer without noise",
        )
    rows: dict[Var, frozenset[tuple[str, int]]] = {jaxpr.invars[i]: frozenset({p}) for i, p in parts.items()}
    partly: dict[Var, frozenset[tuple[str, int]]] = {}
    every = frozenset(parts.values())
    uniform = set[Var]()
    """Values of no stack whose rows are all equal."""

    def same_rows(v: Var) -> bool:
        return is_literal(v) or not v.aval.shape or v in uniform

    def left(found: frozenset[tuple[str, int]]) -> frozenset[tuple[str, int]]:
        """The parts whose stacks are not summed over all parts yet."""
        whole = {stack for stack, _ in found if all(p in found for p in every if p[0] == stack)}
        return frozenset(p for p in found if p[0] not in whole)

    for eqn in jaxpr.eqns:
        name, out = eqn.primitive.name, eqn.outvars[0]
        reads = [v for v in eqn.invars if not is_literal(v)]
        sums = frozenset[tuple[str, int]]().union(*(partly.get(v, frozenset()) for v in reads))
        stacks = [v for v in reads if v in rows]
        of = frozenset[tuple[str, int]]().union(*(rows[v] for v in stacks))
        if sums:
            if name not in ("add", "add_any", "convert_element_type") or stacks:
                raise _mixes(eqn, sums)
            if rest := left(sums):
                partly[out] = rest
        elif stacks:
            axes = eqn.params.get("axes", ())
            if name in _REDUCTIONS and 0 in axes:
                if name != "reduce_sum" or len(axes) < stacks[0].aval.ndim:
                    raise _mixes(eqn, of)
                if left(of):
                    partly[out] = of
            elif _by_rows(eqn) and all(v in rows or same_rows(v) for v in reads):
                rows.update(dict.fromkeys(eqn.outvars, of))
            else:
                raise _mixes(eqn, of)
        elif _moved(eqn) or (_by_rows(eqn) and all(map(same_rows, reads))):
            uniform.add(out)
    for eqn in jaxpr.eqns:
        for v in set(eqn.outvars) & partly.keys() & {v for v in jaxpr.outvars if not is_literal(v)}:
            raise _mixes(eqn, partly[v])


def _moved(eqn: Eqn) -> bool:
    """Whether an equation copies a value to all rows of its result."""
    return eqn.primitive.name == "broadcast_in_dim" and 0 not in eqn.params["broadcast_dimensions"]


def _by_rows(eqn: Eqn) -> bool:
    """Whether each row of the result is known to depend only on the same row of each operand, and on scalars."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval.shape
    if name in _REDUCTIONS:
        return 0 not in eqn.params["axes"]
    if name == "broadcast_in_dim" and eqn.params["broadcast_dimensions"][:1] != (0,):
        return False
    known = pointwise(eqn) or name in ("squeeze", "reshape", "broadcast_in_dim")
    return known and all(v.aval.shape[:1] in ((), out[:1]) for v in eqn.invars)


def _mixes(eqn: Eqn, parts: frozenset[tuple[str, int]]) -> PaseError:
    stack = min(stack for stack, _ in parts)
    return PaseError(
        f"the optimizer cannot be run in stages: its '{eqn.primitive.name}' makes the update of each layer of "
        f"'{stack}' depend on the other layers, which are in other stages",
        where=str(source_line(eqn)),
        fix="make each layer a leaf of its own, or choose an optimizer that updates elements independently",
    )
