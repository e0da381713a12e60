"""Simulates all devices of a mesh in one process, in numpy: what a layout means and what a reshard step does.

This is an oracle for the backends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from pase.local.arrays import ArrayBranch, Arrays, check_combine
from pase.local.parts import held
from pase.local.types import Combine, Extents
from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout

__all__ = ["AllDevices", "part_of", "places", "whole_of"]


def places(mesh: Mesh) -> list[tuple[int, ...]]:
    """The places of all devices, row-major: the index along each axis."""
    return list(itertools.product(*map(range, mesh.sizes)))


def part_of(x: np.ndarray, layout: AxisLayout, place: tuple[int, ...], mesh: Mesh) -> np.ndarray:
    """The elements that a device holds."""
    return np.asarray(x[np.ix_(*held(x.shape, layout, place, mesh))])


def whole_of(parts: np.ndarray, shape: Extents, layout: AxisLayout, mesh: Mesh) -> np.ndarray:
    """The whole tensor, from the shards of all devices; partial sums are added up. Raises ValueError if replicas of a
    shard differ."""
    out = np.zeros(shape)
    filled = np.zeros(shape, bool)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    partial = list(layout.partial)
    for place in places(mesh):
        if any(place[i] for i in partial):
            continue
        along = itertools.product(
            *(range(mesh.sizes[i]) if i in partial else (place[i],) for i in range(len(place)))
        )
        total = sum(parts[p] for p in along)
        at = part_of(numbers, layout, place, mesh)
        if filled.flat[at].any() and not np.array_equal(out.flat[at], total):
            raise ValueError(f"device {place} and a replica of it hold different numbers")
        out.flat[at], filled.flat[at] = total, True
    return out


@dataclass(frozen=True, kw_only=True)
class AllDevices(Arrays[np.ndarray]):
    """The arrays of all devices as one: its first dims are the axes of the mesh, the others those of a device."""

    mesh: Mesh

    def together(self, parts: Iterable[np.ndarray]) -> np.ndarray:
        """What the devices hold, in the order of ``places``."""
        every = np.stack(list(parts))
        return every.reshape(*self.mesh.sizes, *every.shape[1:])

    def each(self, make: Callable[[tuple[int, ...]], np.ndarray]) -> np.ndarray:
        """What each device makes, from its place."""
        return self.together(map(make, places(self.mesh)))

    @property
    def _lead(self) -> int:
        return len(self.mesh.sizes)

    def shape(self, x: np.ndarray) -> Extents:
        return x.shape[self._lead :]

    def reshape(self, x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        return x.reshape(*self.mesh.sizes, *shape)

    def transpose(self, x: np.ndarray, order: Sequence[int]) -> np.ndarray:
        return x.transpose(*range(self._lead), *(self._lead + i for i in order))

    def concat(self, xs: Sequence[np.ndarray], dim: int) -> np.ndarray:
        return np.concatenate(xs, self._lead + dim)

    def narrow(self, x: np.ndarray, dim: int, start: int, count: int) -> np.ndarray:
        return x[(slice(None),) * (self._lead + dim) + (slice(start, start + count),)]

    def padded(self, x: np.ndarray, dim: int, before: int, behind: int) -> np.ndarray:
        return np.pad(x, [(before, behind) if i == self._lead + dim else (0, 0) for i in range(x.ndim)])

    def reduced(self, x: np.ndarray, combine: Combine) -> np.ndarray:
        return np.asarray(_UFUNCS[combine].reduce(x, axis=self._lead, dtype=x.dtype))

    @property
    def library(self) -> ModuleType:
        return np

    def number(self, axes: Sequence[str], rank: int = 0) -> np.ndarray:
        """The number of each device along these axes, [*mesh, 1, ...] with a 1 for each of ``rank`` dims."""
        out = np.zeros((*self.mesh.sizes, *(1,) * rank), np.int64)
        for axis in axes:
            i = self.mesh.names.index(axis)
            along = np.arange(self.mesh.sizes[i]).reshape(-1, *(1,) * (out.ndim - i - 1))
            out = out * self.mesh.sizes[i] + along
        return out

    def either(
        self, holds: np.ndarray | bool, one: ArrayBranch[np.ndarray], other: ArrayBranch[np.ndarray]
    ) -> Sequence[np.ndarray]:
        here = np.asarray(holds)
        return [
            np.where(here.reshape(*here.shape, *(1,) * (x.ndim - here.ndim)), x, y)
            for x, y in zip(one(), other(), strict=True)
        ]

    def index(self, axis: str, x: np.ndarray) -> np.ndarray:
        return self.number([axis], x.ndim - self._lead)

    def chosen(self, x: np.ndarray, dim: int, axis: str) -> np.ndarray:
        return np.take_along_axis(x, self.index(axis, x), self._lead + dim)

    def rows(self, x: np.ndarray, table: np.ndarray, axes: Sequence[str]) -> np.ndarray:
        mine = table[self.number(axes, 0)]
        return np.take_along_axis(x, mine.reshape(*mine.shape, *(1,) * (x.ndim - mine.ndim)), self._lead)

    def all_reduce(self, x: np.ndarray, axes: Sequence[str], combine: Combine = "sum") -> np.ndarray:
        check_combine(combine, axes)
        return self.reduced(self.all_gather(x, axes), combine)

    def all_gather(self, x: np.ndarray, axes: Sequence[str]) -> np.ndarray:
        among = [self.mesh.names.index(a) for a in axes]
        front = np.moveaxis(x, among, range(self._lead - len(among), self._lead))
        joined = front.reshape(*front.shape[: self._lead - len(among)], -1, *self.shape(x))
        joined = np.expand_dims(joined, tuple(among))
        return np.broadcast_to(joined, (*self.mesh.sizes, *joined.shape[self._lead :]))

    def reduce_scatter(self, x: np.ndarray, axes: Sequence[str]) -> np.ndarray:
        return self._own_row(self.all_reduce(x, axes), 0, axes)

    def all_to_all(self, x: np.ndarray, axes: Sequence[str]) -> np.ndarray:
        return self._own_row(self.all_gather(x, axes), 1, axes)

    def permute(self, x: np.ndarray, axes: Sequence[str], pairs: Sequence[tuple[int, int]]) -> np.ndarray:
        source = np.full((self.ways(axes), 1), self.ways(axes))
        for a, b in pairs:
            source[b] = a
        every = self.all_gather(x, axes)
        nothing = np.zeros_like(self.narrow(every, 0, 0, 1))
        return self.rows(self.concat([every, nothing], 0), source, axes).reshape(x.shape)

    def _own_row(self, x: np.ndarray, dim: int, axes: Sequence[str]) -> np.ndarray:
        """Of a dim with an element for each device along the axes, the device's own. The dim is gone then."""
        mine = np.take_along_axis(x, self.number(axes, x.ndim - self._lead), self._lead + dim)
        return mine.squeeze(self._lead + dim)


_UFUNCS: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum}
