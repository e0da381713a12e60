"""A JAX program in which some extents are padded so that devices divide them. It computes the same numbers from larger
arrays.

Every dim with one of these extents is padded at its end, wherever it occurs: in parameters, in the batch, and inside.
Two invariants hold for every value: its padding is finite, and no gradient flows back into the padding. The padding of
parameters begins as zeros, and therefore stays zero under every optimizer that does not change a zero whose gradient is
zero. Ops that read across a padded dim (sums, maxima, products) get neutral values there (``rules``). Ops that cannot
run on padded dims run on unpadded values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.jax import leaves as jax_leaves
from pase.frontends.jax.frontend import TracedJax, trace
from pase.frontends.jax.padding.walk import PaddedValue, PaddedWalk
from pase.frontends.jax.program import Mode, program_of
from pase.frontends.jax.types import Jaxpr
from pase.frontends.jax.versions import jaxprs_inside
from pase.frontends.signature import argument_names
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array

__all__ = ["extents", "padded"]


def padded(traced: TracedJax, sizes: Mapping[int, int]) -> TracedJax:
    """Returns the program with every dim of these extents padded. sizes: extent -> padded extent.

    Raises PaseError for a program that passes values to its next call.
    """
    import jax

    if traced.fn is None or traced.mode == "step" or traced.carried or traced.programs:
        raise PaseError(
            f"'{traced.graph.name}' passes values to its next call, and such programs cannot be padded",
            where="uneven='padded'",
            fix="use it for losses and for programs without mode='step' and carry",
        )
    avals = traced.jaxpr.in_avals
    given = tuple(tuple(a.shape) for a in avals)
    walk = PaddedWalk(sizes=dict(sizes))
    fn = _PaddedFunction(fn=traced.fn, mode=traced.mode, walk=walk, given=given)
    shapes = [jax.ShapeDtypeStruct(walk.wide(a), a.dtype) for a in avals]
    params, *batch = jax_leaves.combine(jax.tree.unflatten(traced.in_tree, shapes), traced.kept)
    made = trace(
        fn,
        params,
        *batch,
        name=traced.graph.name,
        unknown=traced.unknown,
        mode=traced.mode,
        dims=traced.trip_counts,
        chances=traced.chances,
    )
    paths = (*traced.param_paths, *traced.input_paths)
    changed = {p: g for p, g, s in zip(paths, given, shapes, strict=True) if g != s.shape}
    return replace(made, padding=dict(sizes), unpadded=changed, written=traced, modules=traced.modules)


@dataclass(frozen=True, kw_only=True)
class _PaddedFunction:
    """The user's function on padded arguments. given: the shapes of its leaves without padding."""

    fn: Callable[..., Tree]
    mode: Mode
    walk: PaddedWalk
    given: tuple[tuple[int, ...], ...]

    def argument_names(self, count: int) -> tuple[str, ...]:
        return argument_names(self.fn, count)

    def __call__(self, *args: Tree) -> Tree:
        import jax

        leaves, tree = jax.tree.flatten(jax_leaves.arrays(args))
        structs = [
            jax.ShapeDtypeStruct(self._unpadded(x, shape), x.dtype)
            for x, shape in zip(leaves, self.given, strict=True)
        ]
        shapes = jax.tree.unflatten(tree, structs)
        whole = jax_leaves.combine(shapes, jax_leaves.static(args))
        program = program_of(self.fn, whole, shapes, self.mode, None)
        jaxpr = program.jaxpr.jaxpr
        values = [
            PaddedValue(x, self.walk.padded_dims(PaddedValue(x), s))  # type: ignore[arg-type]
            for x, s in zip(leaves, structs, strict=True)
        ]
        outs = self.walk.run(jaxpr, program.jaxpr.consts, values)
        cut = [
            self.walk.cut(x, v.aval, range(v.aval.ndim)).array
            for x, v in zip(outs, jaxpr.outvars, strict=True)
        ]
        return jax_leaves.combine(jax.tree.unflatten(program.out_tree, cut), program.kept_out)

    def _unpadded(self, leaf: Array, given: Sequence[int]) -> tuple[int, ...]:
        """A leaf's shape without padding. In a micro-batch, its first dim is a part of the given one."""
        import jax

        shape, wide = leaf.shape, self.walk.wide(jax.ShapeDtypeStruct(tuple(given), leaf.dtype))
        if any(n != w != r for n, w, r in zip(shape, wide, given, strict=True)):
            raise PaseError(
                f"a batch of {given[0]} examples, padded to {wide[0]}, cannot be divided into micro-batches",
                fix="choose a batch that needs no padding, or no micro-batches",
            )
        return tuple(r if w != r else n for n, w, r in zip(shape, wide, given, strict=True))


def extents(traced: TracedJax, devices: int) -> dict[int, int]:
    """The extents of parameters and inputs that the devices do not divide -> what to pad them to.

    An extent is padded to a multiple of the largest number of shards for which padding adds at most one eighth. The
    result is empty if every extent is already such a multiple.
    """
    avals = traced.jaxpr.in_avals
    sizes = {n for a in avals for n in a.shape if isinstance(n, int)} - set(_trip_counts(traced.jaxpr.jaxpr))
    ways = [w for w in range(devices, 0, -1) if devices % w == 0]
    found = {}
    for n in sorted(sizes):
        wide = next(up for w in ways if 8 * (up := -(-n // w) * w) <= 9 * n)
        if wide != n:
            found[n] = wide
    return found


def _trip_counts(jaxpr: Jaxpr) -> Iterator[int]:
    """The trip counts of loops. They are excluded, because a loop's stack of slices is not padded along them."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn.params["length"]
        for inner in jaxprs_inside(eqn):
            yield from _trip_counts(inner)
