"""A JAX program with some extents padded, so that devices divide them: the same numbers from larger arrays.

Every dim of one of these extents is padded behind its end, wherever it stands: in parameters, in the batch, inside. Two
things hold of every value: what lies in the padding is finite, and no gradient comes back into it. So the padding of
parameters, which begins as zeros, stays zero under every optimizer that leaves a zero with a zero gradient alone. What
reads across a padded dim (sums, maxima, products) gets neutral values there (``rules``); what cannot run on
padded dims runs on unpadded values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pase.errors import PaseError
from pase.frontends.jax import leaves as jax_leaves
from pase.frontends.jax.frontend import TracedJax, trace
from pase.frontends.jax.padding.walk import PaddedValue, PaddedWalk
from pase.frontends.jax.program import Mode, program_of
from pase.frontends.jax.types import Jaxpr
from pase.frontends.jax.versions import jaxprs_inside
from pase.pytree import Tree

__all__ = ["extents", "padded"]


def padded(traced: TracedJax, sizes: Mapping[int, int]) -> TracedJax:
    """The program with every dim of these extents padded: extent -> padded extent.

    Raises PaseError for a program that hands values to its next call.
    """
    import jax

    if traced.fn is None or traced.mode == "step" or traced.carried or traced.programs:
        raise PaseError(
            f"'{traced.graph.name}' hands values to its next call: dims are padded (uneven='padded') in losses and in "
            f"programs without mode='step' and carry"
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
    """The user's function on padded arguments. given: shapes of its leaves as the user has them."""

    fn: Callable[..., Tree]
    mode: Mode
    walk: PaddedWalk
    given: tuple[tuple[int, ...], ...]

    def __call__(self, *args: Tree) -> Tree:
        import jax

        leaves, tree = jax.tree.flatten(jax_leaves.arrays(args))
        structs = [
            jax.ShapeDtypeStruct(self._unpadded(x.shape, shape), x.dtype)
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

    def _unpadded(self, shape: Sequence[int], given: Sequence[int]) -> tuple[int, ...]:
        """A leaf's shape without padding. In a micro-batch its first dim is a part of the given one."""
        wide = [self.walk.sizes.get(n, n) for n in given]
        if any(n != w != r for n, w, r in zip(shape, wide, given, strict=True)):
            raise PaseError(
                f"a batch of {given[0]} examples, padded to {wide[0]}, cannot be divided into micro-batches"
            )
        return tuple(r if w != r else n for n, w, r in zip(shape, wide, given, strict=True))


def extents(traced: TracedJax, devices: int) -> dict[int, int]:
    """The extents of parameters and inputs that the devices do not divide, and what to pad them to: the least multiple
    of the most shards for which padding adds at most an eighth. Empty if all are divided as far as that."""
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
    """How often its loops turn: a stack of a loop's slices is not padded."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn.params["length"]
        for inner in jaxprs_inside(eqn):
            yield from _trip_counts(inner)
