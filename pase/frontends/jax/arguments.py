"""A function's example arguments: their shapes, checked, and the layouts that the user already gave them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.jax import leaves as jax_leaves
from pase.frontends.jax.types import Aval
from pase.frontends.registry import DimSizes, check_dims
from pase.ir import FixedLayout, FixedMesh, Size, parse_size
from pase.ir.fixed import FREE_LAYOUTS
from pase.ir.sizes import bind_size, free_symbols
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Device as JaxDevice
    from jax import ShapeDtypeStruct
    from jax.sharding import Sharding
    from numpy.random import Generator

__all__ = ["arguments", "filled", "fixed_devices", "fixed_layouts", "shape_of", "shardings"]


def arguments(
    args: tuple[Tree, ...], dims: DimSizes | None, called: str
) -> tuple[Tree, dict[str, int], set[str]]:
    """Returns the array arguments as shapes, the entries of ``dims`` that are not among their sizes, and the symbolic
    sizes of the arguments."""
    import jax

    given = jax_leaves.arrays(args)
    _check_leaves(given[0], "params")
    _check_leaves(given[1:], "batch")
    as_shapes = jax.tree.map(_shape_struct, given)
    symbols = set(free_symbols(s for t in jax.tree.leaves(as_shapes) for s in shape_of(t)))
    trip_counts = {k: v for k, v in (dims or {}).items() if k not in symbols}
    if bound := {k: v for k, v in (dims or {}).items() if k in symbols}:
        check_dims(bound, symbols, called)
        as_shapes = jax.tree.map(lambda t: _bound(t, bound), as_shapes)
    return as_shapes, trip_counts, symbols


def _check_leaves(tree: Tree, what: str) -> None:
    import jax
    import numpy as np

    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        where = f"{what}{jax.tree_util.keystr(keys)}"
        if isinstance(leaf, (bool, int, float)):
            continue
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape is None or dtype is None:
            raise PaseError(
                f"it is {type(leaf).__name__}",
                where=where,
                fix="pass an array or jax.ShapeDtypeStruct(shape, dtype)",
            )
        for s in shape:
            if isinstance(s, (float, np.floating)):
                raise PaseError(
                    f"it has shape {tuple(shape)}, but {s} is not a whole number",
                    where=where,
                    fix="use whole numbers as sizes",
                )
            if isinstance(s, (int, np.integer)) and s < 1:
                raise PaseError(
                    f"it has shape {tuple(shape)}, and a dim of {s} elements cannot be parallelized",
                    where=where,
                    fix="give every dim at least one element",
                )


def _shape_struct(leaf: Tree) -> ShapeDtypeStruct:
    import jax
    import numpy as np

    if isinstance(leaf, (bool, int, float)):
        leaf = np.asarray(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    return jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)


def _bound(leaf: ShapeDtypeStruct, dims: DimSizes) -> ShapeDtypeStruct:
    """The leaf with integers for the symbolic sizes that ``dims`` gives."""
    import jax

    sizes = [bind_size(s, dims) for s in shape_of(leaf)]
    shape = tuple(s if isinstance(s, int) else was for s, was in zip(sizes, leaf.shape, strict=True))
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def shape_of(aval: Aval) -> tuple[Size, ...]:
    return tuple(int(s) if isinstance(s, int) else parse_size(str(s)) for s in aval.shape)


def shardings(tree: Tree) -> tuple[Sharding | None, ...]:
    """The sharding of each leaf of the arguments, or None. The sharding of a traced value is that of its type."""
    import jax

    leaves = jax.tree.leaves(jax_leaves.arrays(tree))
    typed = [jax.typeof(x) if isinstance(x, jax.core.Tracer) else x for x in leaves]
    return tuple(getattr(x, "sharding", None) for x in typed)


def fixed_layouts(
    paths: Sequence[str], ranks: Sequence[int], given: Sequence[Sharding | None]
) -> list[FixedLayout | None]:
    """The layout that each leaf's sharding fixes. None for a leaf on one device, or without a sharding.

    paths, ranks: the name and the number of dims of each leaf.
    given: the sharding of each leaf.

    Raises PaseError for a sharding that names no axes, or if two leaves are on different meshes.
    """
    out = [_fixed(*leaf) for leaf in zip(paths, ranks, given, strict=True)]
    first = next((i for i, x in enumerate(out) if x is not None), None)
    for i, x in enumerate(out):
        if x is None or first is None:
            continue
        a, b = out[first], x
        orders = [fixed_devices(given[k : k + 1]) for k in (first, i)]
        if a is not None and (a.mesh != b.mesh or (None not in orders and orders[0] != orders[1])):
            unlike = (
                "the same axes over devices in another order" if a.mesh == b.mesh else f"the mesh {b.mesh}"
            )
            raise PaseError(
                f"'{a.path}' is on the mesh {a.mesh} and '{b.path}' on {unlike}, but a plan has one mesh",
                where=f"argument '{b.path}'",
                fix=f"put both on one mesh with jax.device_put, or {FREE_LAYOUTS}",
            )
    return out


def _fixed(path: str, rank: int, given: Sharding | None) -> FixedLayout | None:
    from jax.sharding import NamedSharding, PartitionSpec

    if given is None or (not isinstance(given, NamedSharding) and given.num_devices == 1):
        return None
    if not isinstance(given, NamedSharding):
        raise PaseError(
            f"it is on {given.num_devices} devices as {type(given).__name__}, which names no axes of a mesh",
            where=f"argument '{path}'",
            fix=f"jax.device_put it to a NamedSharding, or {FREE_LAYOUTS}",
        )
    ways = {name: int(size) for name, size in given.mesh.shape.items() if size > 1}
    if not ways:
        return None
    spec = given.spec
    if getattr(spec, "unreduced", None):
        raise PaseError(
            f"its sharding is {spec}, a partial sum",
            where=f"argument '{path}'",
            fix="reduce it before you compile a plan",
        )
    if len(spec) > rank:
        raise PaseError(
            f"it has {rank} dims, but its sharding {spec} names {len(spec)}",
            where=f"argument '{path}'",
            fix="give its sharding at most one entry per dim",
        )
    dims: list[tuple[str, ...] | None] = []
    for entry in (*spec, *[None] * (rank - len(spec))):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        dims.append(None if entry is PartitionSpec.UNCONSTRAINED else tuple(a for a in axes if a in ways))
    mesh = FixedMesh(names=tuple(map(str, ways)), sizes=tuple(ways.values()))
    return FixedLayout(path=path, mesh=mesh, dims=tuple(dims))


def fixed_devices(given: Sequence[Sharding | None]) -> tuple[JaxDevice, ...] | None:
    """The devices of the first mesh of devices among the shardings, in the mesh's order; None if there is none."""
    from jax.sharding import Mesh, NamedSharding

    for s in given:
        if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh) and s.mesh.size > 1:
            return tuple(s.mesh.devices.flat)
    return None


def filled(args: Sequence[Tree], seed: int) -> tuple[Tree, ...]:
    """(params, *batch) with random arrays where they have shapes alone.

    Matrices are normal by fan-in, vectors are near 1 (a scale, a bias or a variance may be any of them), and integers
    are 0 or 1, because any table of the model has such a row.
    """
    import jax
    import numpy as np

    rng = np.random.default_rng(seed)
    params, *batch = args
    return (
        jax.tree.map(lambda x: _drawn(x, rng, weight=True), params),
        *(jax.tree.map(lambda x: _drawn(x, rng, weight=False), b) for b in batch),
    )


def _drawn(leaf: Tree, rng: Generator, *, weight: bool) -> Tree:
    import jax
    import jax.numpy as jnp

    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        key = jax.random.key(int(rng.integers(1 << 31)))
        return jax.random.split(key, leaf.shape) if leaf.shape else key
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.asarray(rng.integers(0, 2, leaf.shape), dtype)
    drawn = rng.standard_normal(leaf.shape)
    if weight and len(leaf.shape) < 2:
        drawn = 1 + 0.1 * drawn
    elif weight:
        drawn *= math.prod(leaf.shape[:-1]) ** -0.5
    return jnp.asarray(drawn, dtype)
