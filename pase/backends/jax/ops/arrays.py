"""The arrays of one device in JAX, inside ``shard_map``, and the collectives between devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from pase.local.arrays import ArrayBranch, Arrays, RoundVisit, check_combine
from pase.local.parts import WireView
from pase.local.types import Combine, Extents
from pase.machine import Mesh
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array

__all__ = ["JaxArrays", "summed"]


def summed(x: Array, axes: tuple[str, ...], combine: Combine = "sum") -> Array:
    """All-reduce over these axes."""
    import jax

    check_combine(combine, axes)
    how = _of_booleans(x, combine)
    return {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}[how](x, axes)


def _of_booleans(x: Array, combine: Combine) -> Combine:
    """How JAX reduces these partial results. It does not add booleans: their sum is true where one of them is, as where
    one device has the element that is looked up."""
    return "max" if combine == "sum" and x.dtype == bool else combine


@dataclass(frozen=True)
class JaxArrays(Arrays["Array"]):
    """The arrays of one device inside of ``shard_map``.

    XLA shows collectives along a dim in its texts and reports, so reshard steps of the outermost digits of a dim
    (``WireView.along``) are collectives along that dim.
    """

    mesh: Mesh

    @property
    def _jax(self) -> ModuleType:
        import jax

        return jax

    def shape(self, x: Array) -> Extents:
        return x.shape

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        return x.reshape(tuple(shape))

    def transpose(self, x: Array, order: Sequence[int]) -> Array:
        return x.transpose(*order)

    def concat(self, xs: Sequence[Array], dim: int) -> Array:
        return self._jax.numpy.concatenate(xs, axis=dim)

    def narrow(self, x: Array, dim: int, start: int, count: int) -> Array:
        return self._jax.lax.slice_in_dim(x, start, start + count, axis=dim)

    def padded(self, x: Array, dim: int, before: int, behind: int) -> Array:
        return self._jax.numpy.pad(x, [(before, behind) if i == dim else (0, 0) for i in range(x.ndim)])

    def reduced(self, x: Array, combine: Combine) -> Array:
        return x.sum(0) if combine == "sum" else x.max(0) if combine == "max" else x.min(0)

    @property
    def library(self) -> ModuleType:
        return self._jax.numpy

    def number(self, axes: Sequence[str]) -> Array:
        return self._jax.lax.axis_index(tuple(axes))

    def either(
        self, holds: Array | bool, one: ArrayBranch[Array], other: ArrayBranch[Array]
    ) -> Sequence[Array]:
        return self._jax.lax.cond(holds, lambda: tuple(one()), lambda: tuple(other()))

    def selected(self, holds: Array | bool, one: Callable[[], Array], other: Callable[[], Array]) -> Array:
        return self._jax.numpy.where(holds, one(), other())

    def index(self, axis: str, x: Array) -> Array:
        return self._jax.lax.axis_index(axis).astype(x.dtype)

    def chosen(self, x: Array, dim: int, axis: str) -> Array:
        return self._jax.lax.dynamic_slice_in_dim(x, self._jax.lax.axis_index(axis), 1, dim)

    def rows(self, x: Array, table: np.ndarray, axes: Sequence[str]) -> Array:
        return x[self._jax.numpy.asarray(table)[self._jax.lax.axis_index(tuple(axes))]]

    def all_reduce(self, x: Array, axes: Sequence[str], combine: Combine = "sum") -> Array:
        return summed(x, tuple(axes), combine)

    def all_gather(self, x: Array, axes: Sequence[str]) -> Array:
        return self._jax.lax.all_gather(x, tuple(axes), axis=0, tiled=False)

    def reduce_scatter(self, x: Array, axes: Sequence[str]) -> Array:
        # Along a dim that exists only for it: XLA for TPU stores arrays in tiles, and compiles a reduce-scatter along a
        # tiled dim to an all-reduce unless the parts are whole tiles.
        return self._jax.lax.psum_scatter(x, tuple(axes), scatter_dimension=0, tiled=False)

    def all_to_all(self, x: Array, axes: Sequence[str]) -> Array:
        # Dims of one element are merged: XLA for CPU gives slices along them different layouts, and refuses them.
        rows = x.reshape(x.shape[0], -1)
        return self._jax.lax.all_to_all(rows, tuple(axes), 0, 0, tiled=True).reshape(x.shape)

    def permute(self, x: Array, axes: Sequence[str], pairs: Sequence[tuple[int, int]]) -> Array:
        return self._jax.lax.ppermute(x, tuple(axes), pairs)

    def around(
        self, axes: Sequence[str], passed: Sequence[Array], count: int, visit: RoundVisit[Array]
    ) -> tuple[Sequence[Array], Sequence[Array]]:
        """All rounds but the first and the last are one loop. What is passed on is sent while a round computes."""
        n = self.ways(axes)
        pairs = [(i, (i + 1) % n) for i in range(n)]

        def onwards(xs: Sequence[Array]) -> tuple[Array, ...]:
            return tuple(self.permute_all(xs, axes, pairs))

        def visited(carry: tuple[tuple[Array, ...], ...], t: Array | int) -> tuple[tuple[Array, ...], ...]:
            passed, state, sums = carry
            made = visit(t, passed, state)
            return passed, tuple(made[:count]), tuple(self._added(onwards(sums), made[count:]))

        def iteration(carry: tuple[tuple[Array, ...], ...], t: Array) -> Tree:
            passed, *others = visited(carry, t)
            return (onwards(passed), *others), None

        made = tuple(visit(0, passed, ()))
        first = onwards(passed), made[:count], made[count:]
        last, _ = self._jax.lax.scan(iteration, first, self._jax.numpy.arange(1, n - 1))
        _, state, sums = visited(last, n - 1)
        return state, onwards(sums)

    def scattered(self, x: Array, v: WireView, axes: Sequence[str], combine: Combine) -> Array:
        combine = _of_booleans(x, combine)
        if combine != "sum" or v.along is None or v.along[0] is None:
            return super().scattered(x, v, axes, combine)
        at, ways = v.along[0], math.prod(v.ways)
        apart = x.reshape(*x.shape[:at], ways, x.shape[at] // ways, *x.shape[at + 1 :])
        return self._jax.lax.psum_scatter(apart, tuple(axes), scatter_dimension=at, tiled=False)

    def gathered(self, x: Array, v: WireView, axes: Sequence[str]) -> Array:
        if v.along is None or v.along[1] is None:
            return super().gathered(x, v, axes)
        return self._jax.lax.all_gather(x, tuple(axes), axis=v.along[1], tiled=True)

    def exchanged(self, x: Array, v: WireView, axes: Sequence[str]) -> Array:
        leaving, arriving = v.along or (None, None)
        if leaving is None or arriving is None or 1 in (x.shape[arriving], v.shape[leaving]):
            return super().exchanged(x, v, axes)
        return self._jax.lax.all_to_all(x, tuple(axes), leaving, arriving, tiled=True)
