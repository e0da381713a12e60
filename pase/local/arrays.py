"""What a framework gives to run a local program: the arrays of a device, and the collectives between devices.

The parts of a local program that are the same in every framework are written once over ``Arrays``: reshard steps
(``pase.local.reshard``), halos (``halo``), rings (``ring``) and messages (``messages``). There is one ``Arrays`` for
JAX inside of ``shard_map``, one for a rank of PyTorch, and one in numpy for all devices in one process. A framework
overrides an operation that it does better in another way.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from pase.errors import PaseError
from pase.local.exchange import UnitExchange
from pase.local.parts import WireView
from pase.local.types import Combine, Extents
from pase.machine import Mesh
from pase.pytree import Tree

__all__ = ["ArrayBranch", "Arrays", "RoundVisit", "check_combine"]

A = TypeVar("A")
"""The arrays of a framework."""

ArrayBranch: TypeAlias = Callable[[], Sequence[A]]

RoundVisit: TypeAlias = Callable[["A | int", Sequence[A], Sequence[A]], Sequence[A]]
"""(round, arrays that have come from another device, state) -> the next state, and summands"""


class Arrays(ABC, Generic[A]):
    """The operations on what each device of a mesh holds. All devices hold arrays of the same shape.

    Shapes and dims are those of one device. axes: names of mesh axes; the devices along several axes are numbered
    row-major, the last axis innermost.
    """

    mesh: Mesh

    def wide(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The axes of size greater than 1."""
        return tuple(a for a in axes if self.ways([a]) > 1)

    def ways(self, axes: Sequence[str]) -> int:
        """The number of devices along these axes together."""
        return math.prod(self.mesh.sizes[self.mesh.names.index(a)] for a in axes)

    # The array of a device.

    @abstractmethod
    def shape(self, x: A) -> Extents: ...

    @abstractmethod
    def reshape(self, x: A, shape: Sequence[int]) -> A: ...

    @abstractmethod
    def transpose(self, x: A, order: Sequence[int]) -> A: ...

    @abstractmethod
    def concat(self, xs: Sequence[A], dim: int) -> A: ...

    @abstractmethod
    def narrow(self, x: A, dim: int, start: int, count: int) -> A:
        """``count`` elements of a dim, from ``start`` on."""

    @abstractmethod
    def padded(self, x: A, dim: int, before: int, behind: int) -> A:
        """The array with zeros before and after the elements of a dim."""

    @abstractmethod
    def reduced(self, x: A, combine: Combine) -> A:
        """The sum, maximum or minimum over the first dim."""

    @property
    @abstractmethod
    def library(self) -> ModuleType:
        """The framework's functions of elements, which have numpy's names."""

    def cast(self, x: A, like: A) -> A:
        """The array in the dtype of another array."""
        given: Tree = x
        other: Tree = like
        made: A = given.astype(other.dtype)
        return made

    def rearranged(self, x: A, seen: Sequence[int], order: Sequence[int], shape: Sequence[int]) -> A:
        """The array, seen in a shape, with its dims in an order, in another shape."""
        if tuple(order) == tuple(range(len(seen))):
            return self.reshape(x, shape)
        return self.reshape(self.transpose(self.reshape(x, seen), order), shape)

    # What depends on the place of the device.

    @abstractmethod
    def index(self, axis: str, x: A) -> A | int:
        """The device's index along an axis, as it compares with the elements of ``x``."""

    @abstractmethod
    def number(self, axes: Sequence[str]) -> A | int:
        """The device's number along these axes."""

    @abstractmethod
    def either(self, holds: A | bool, one: ArrayBranch[A], other: ArrayBranch[A]) -> Sequence[A]:
        """The arrays that ``one`` makes if a condition holds for the device, otherwise those that ``other`` makes."""

    def selected(self, holds: A | bool, one: Callable[[], A], other: Callable[[], A]) -> A:
        """``either`` of arrays that are there, or made in one op."""
        return self.either(holds, lambda: [one()], lambda: [other()])[0]

    @abstractmethod
    def chosen(self, x: A, dim: int, axis: str) -> A:
        """Of a dim, the element at the device's index along an axis. The dim has one element then."""

    @abstractmethod
    def rows(self, x: A, table: np.ndarray, axes: Sequence[str]) -> A:
        """Rows of the first dim. table: int64 [devices along the axes, rows]."""

    def on_first(self, x: A, axes: Sequence[str]) -> A:
        """The array on the first device along all of these axes, zeros on the others."""
        number: Tree = self.number(axes)
        return self.selected(number == 0, lambda: x, lambda: self.library.zeros_like(x))

    def at_end(self, x: A, axes: Sequence[str], last: bool, value: Tree) -> A:
        """``value`` on the first or the last device along these axes, the array on the others."""
        number: Tree = self.number(axes)
        end = self.ways(axes) - 1 if last else 0
        return self.selected(number == end, lambda: self.library.full_like(x, value), lambda: x)

    # Collectives. A device without a source receives zeros.

    @abstractmethod
    def all_reduce(self, x: A, axes: Sequence[str], combine: Combine = "sum") -> A:
        """The sum, maximum or minimum over the devices along these axes."""

    @abstractmethod
    def all_gather(self, x: A, axes: Sequence[str]) -> A:
        """[...] on each device -> [ways, ...]."""

    @abstractmethod
    def reduce_scatter(self, x: A, axes: Sequence[str]) -> A:
        """[ways, ...] is summed over the devices, and each gets its row -> [...]."""

    @abstractmethod
    def all_to_all(self, x: A, axes: Sequence[str]) -> A:
        """[ways, ...]: row i goes to device i, and row i of the result comes from device i."""

    @abstractmethod
    def permute(self, x: A, axes: Sequence[str], pairs: Sequence[tuple[int, int]]) -> A:
        """Send each device's array to one other device. pairs: (source, target)."""

    def permute_all(
        self, xs: Sequence[A], axes: Sequence[str], pairs: Sequence[tuple[int, int]]
    ) -> Sequence[A]:
        """``permute`` of several arrays."""
        return [self.permute(x, axes, pairs) for x in xs]

    def around(
        self, axes: Sequence[str], passed: Sequence[A], count: int, visit: RoundVisit[A]
    ) -> tuple[Sequence[A], Sequence[A]]:
        """Pass arrays around the n devices along these axes, which form a ring.

        In round t of 0 … n-1, device i visits what device i-t has passed on. A visit returns the state, ``count``
        arrays (none before the first round), and summands. The sums travel with the arrays that are passed on, and
        return to their device at the end. Returns (the last state, the sums).
        """
        n = self.ways(axes)
        onwards = [(i, (i + 1) % n) for i in range(n)]
        made = visit(0, passed, ())
        for t in range(1, n):
            state, sums = made[:count], made[count:]
            arrived = self.permute_all([*sums, *passed], axes, onwards)
            sums, passed = arrived[: len(sums)], arrived[len(sums) :]
            del made, arrived  # they would stay in memory while the visit computes
            made = visit(t, passed, state)
            made = [*made[:count], *self._added(sums, made[count:])]
        state, sums = made[:count], made[count:]
        return state, self.permute_all(sums, axes, onwards) if sums else sums

    def _added(self, xs: Sequence[Tree], ys: Sequence[A]) -> list[A]:
        return [x + y for x, y in zip(xs, ys, strict=True)]

    def neighbours(self, x: A, axes: Sequence[str], dim: int, first: int, last: int) -> tuple[A, A]:
        """Send the first rows of a dim to the previous device, and the last rows to the next device.

        first, last: how many. Returns (the last rows of the previous device, the first rows of the next device).
        """
        n, rows = self.ways(axes), self.shape(x)[dim]
        low, high = self.narrow(x, dim, 0, first), self.narrow(x, dim, rows - last, last)
        return (
            self.permute(high, axes, [(i, i + 1) for i in range(n - 1)]) if last else high,
            self.permute(low, axes, [(i + 1, i) for i in range(n - 1)]) if first else low,
        )

    # Reshard steps of whole digits (``pase.local.parts.WireView``).

    def to_front(self, x: A, v: WireView) -> A:
        """Bring the leaving digits to the front, as one dim. The order of the other digits is unchanged."""
        rest = [n for i, n in enumerate(v.seen) if i not in v.leaving]
        return self.rearranged(x, v.seen, v.to_front, (math.prod(v.ways), *rest))

    def from_front(self, x: A, v: WireView) -> A:
        """Split the first dim into the arriving digits, and put each in its place."""
        assert v.arriving is not None
        return self.rearranged(x, (*v.ways, *self.shape(x)[1:]), v.arriving, v.shape)

    def scattered(self, x: A, v: WireView, axes: Sequence[str], combine: Combine) -> A:
        """A reduce-scatter. Maxima and minima have none: an all-to-all, which sends the same number of bytes, brings
        each device all candidates for its part."""
        front = self.to_front(x, v)
        if combine == "sum":
            return self.reshape(self.reduce_scatter(front, axes), v.shape)
        check_combine(combine, axes)
        return self.reshape(self.reduced(self.all_to_all(front, axes), combine), v.shape)

    def gathered(self, x: A, v: WireView, axes: Sequence[str]) -> A:
        """An all-gather."""
        return self.from_front(self.all_gather(self.reshape(x, v.seen), axes), v)

    def exchanged(self, x: A, v: WireView, axes: Sequence[str]) -> A:
        """An all-to-all."""
        return self.from_front(self.all_to_all(self.to_front(x, v), axes), v)

    def sliced(self, x: A, v: WireView, axes: Sequence[str]) -> A:
        """The device's own part. Nothing is sent."""
        x = self.reshape(x, v.seen)
        for axis, dim in zip(self.wide(axes), v.leaving, strict=True):
            x = self.chosen(x, dim, axis)
        return self.reshape(x, v.shape)

    # Reshard steps in units, because parts do not nest (``pase.local.exchange``).

    def units_exchanged(self, x: A, how: UnitExchange, axes: Sequence[str]) -> A:
        """Bring the units to the front, send them, and put each in its place."""
        shape = self.shape(x)
        rank, blocks = len(shape), [n // cut for n, cut in zip(shape, how.before, strict=True)]
        apart = [k for pair in zip(how.before, blocks, strict=True) for k in pair]
        order = (*range(0, 2 * rank, 2), *range(1, 2 * rank, 2))
        front = self.rearranged(x, apart, order, (math.prod(how.before), *blocks))
        placed = self.rows(self.units_sent(front, how, axes), how.order, axes)
        order = tuple(i for d in range(rank) for i in (d, rank + d))
        shape = tuple(cut * n for cut, n in zip(how.after, blocks, strict=True))
        return self.rearranged(placed, (*how.after, *blocks), order, shape)

    def units_sent(self, front: A, how: UnitExchange, axes: Sequence[str]) -> A:
        """[units, ...] -> the units that a device receives, in the order of the rounds: permute by permute."""
        received = []
        for r in how.rounds:
            some = self.rows(front, r.units, axes)
            received.append(some if r.stays else self.permute(some, axes, r.pairs))
        return self.concat(received, 0)


def check_combine(combine: Combine, axes: Sequence[str]) -> None:
    """PaseError if no collective reduces partial results in this way."""
    if combine == "other":
        raise PaseError(
            "no collective reduces these partial results: only sums, maxima and minima can be reduced",
            where=f"the reduction over {', '.join(axes)}",
            fix="compile with another mesh or strategy",
        )
