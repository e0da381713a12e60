"""Arrays of a model in stages: which ranks hold them, and in which layout. Stacks of layers are cut into parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, TypeGuard

from pase.errors import PaseError
from pase.pytree import Tree

if TYPE_CHECKING:
    import numpy as np
    from jax import Array
    from jax.sharding import Mesh as JaxMesh
    from jax.sharding import NamedSharding, PartitionSpec

__all__ = ["ArrayPlacement", "StackCut", "is_cut", "joined", "merged", "on_rank", "registered", "rows_of"]


@dataclass(frozen=True, eq=False)
class StackCut:
    """A leaf with a leading dim of layers, cut into one part per stage, in the order of the layers.

    The rows of each stage are on the devices of that stage's rank. It is a pytree node. ``plan.jax.gathered`` joins the
    parts.
    """

    parts: tuple[Array, ...]


def is_cut(x: object) -> TypeGuard[StackCut]:
    return isinstance(x, StackCut)


@cache
def registered(node: type) -> None:
    """Register a class with a field ``parts`` as a pytree node of JAX, once JAX is imported."""
    import jax

    jax.tree_util.register_dataclass(node, ["parts"], [])


@dataclass(frozen=True, eq=False)
class ArrayPlacement:
    """Where an array is stored: the ranks that each hold all of it, and its layout on one of them.

    grid: the devices of all ranks, [ranks, *axes]. names: the names of the axes. spec: the layout on one rank.
    """

    ranks: tuple[int, ...]
    grid: np.ndarray
    names: tuple[str, ...]
    spec: PartitionSpec

    @cached_property
    def sharding(self) -> NamedSharding:
        """The sharding on all its ranks."""
        from jax.sharding import Mesh, NamedSharding

        if len(self.ranks) == 1:
            return self.on(self.ranks[0])
        return NamedSharding(Mesh(self.grid[list(self.ranks)], ("stage", *self.names)), self.spec)

    def on(self, rank: int) -> NamedSharding:
        """The sharding on one of its ranks."""
        from jax.sharding import NamedSharding

        return NamedSharding(self.mesh_of(rank), self.spec)

    def mesh_of(self, rank: int) -> JaxMesh:
        """The mesh of one rank."""
        from jax.sharding import Mesh

        return Mesh(self.grid[rank], self.names)

    def put(self, x: Tree) -> Array:
        """The array moved to this placement. It is not copied if it is already there."""
        import jax

        there = isinstance(x, jax.Array) and x.sharding.is_equivalent_to(self.sharding, x.ndim)
        return x if there else jax.device_put(x, self.sharding)


def on_rank(x: Array, placement: ArrayPlacement, rank: int) -> Array:
    """The part of an array that one rank holds, without a copy."""
    import jax

    if len(placement.ranks) == 1:
        return x
    sharding = placement.on(rank)
    shard = {s.device: s.data for s in x.addressable_shards}
    order = sharding.addressable_devices_indices_map(x.shape)
    return jax.make_array_from_single_device_arrays(x.shape, sharding, [shard[d] for d in order])


def joined(parts: Sequence[Array], placement: ArrayPlacement) -> Array:
    """The array on all its ranks, from the arrays that the ranks hold, without a copy."""
    import jax

    if len(placement.ranks) == 1:
        return parts[0]
    shard = {s.device: s.data for x in parts for s in x.addressable_shards}
    order = placement.sharding.addressable_devices_indices_map(parts[0].shape)
    return jax.make_array_from_single_device_arrays(
        parts[0].shape, placement.sharding, [shard[d] for d in order]
    )


def merged(*trees: Tree) -> Tree:
    """Merge trees of the same structure. Each leaf, which may be a cut stack, is that of the first tree that has it."""
    import jax

    def there(x: object) -> bool:
        return x is not None and not (is_cut(x) and any(p is None for p in x.parts))

    def first(*leaves: Tree) -> Tree:
        return next(filter(there, leaves), None)

    return jax.tree.map(first, *trees, is_leaf=lambda x: x is None or is_cut(x))


def rows_of(x: Tree, rows: Sequence[tuple[int, int]], path: str) -> Iterator[Array]:
    """The parts of a stack, which may already be cut. path: the stack's path, for messages."""
    if is_cut(x):
        sizes = [part.shape[0] for part in x.parts]
        if sizes != [b - a for a, b in rows]:
            raise PaseError(
                f"it is cut into {sizes} layers, but the plan's stages have {[b - a for a, b in rows]}",
                where=f"'{path}'",
                fix="join the parameters with plan.jax.gathered of the plan that cut them",
            )
        yield from x.parts
    else:
        yield from (x[a:b] for a, b in rows)
