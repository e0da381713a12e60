"""How one tensor lies on the axes of a mesh, and the integers that stand for it where many layouts are compared.

A mesh axis that splits a tensor selects a *digit* of the index of one tensor dim. Two layouts place elements alike
exactly if their axes select the same digits, however dims were merged or split. The number of shards alone cannot tell
this.

``AxisLayout`` is the layout of one tensor. Cost tables hold the layouts of all configs at once, and compiled kernels
walk from one to another. There, the state of an axis is one integer: a digit's tensor dim in the upper bits and its
blocks in the lower ones, or a negative number. Only this file makes and reads these integers. A tensor as its op writes
it has two states more: ``PENDING`` (a copy whose gradient may stay partial), and a parameter's *state digit*, which
means that the parameter is whole over the axis, but its gradient and optimizer state are split there.
``forward_states`` and ``gradient_states`` make layouts of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, TypeAlias, TypeVar, overload

import numpy as np

from pase.machine import Mesh

__all__ = [
    "DIM_BITS",
    "PARTIAL",
    "PENDING",
    "REPLICATED",
    "AccessLayout",
    "AxisLayout",
    "AxisState",
    "Digit",
    "Placement",
    "blocks_of",
    "contiguous_axes",
    "digit_state",
    "forward_states",
    "gradient_states",
    "state_digit",
    "summed_states",
    "tensor_dim",
]

REPLICATED, PARTIAL, PENDING = -1, -2, -3
DIM_BITS = 44
"""The bits of a state below its tensor dim; they hold the blocks."""
_BLOCKS = (1 << DIM_BITS) - 1
_STATE = -8  # a state digit d is stored as _STATE - d
_OneOrMany = TypeVar("_OneOrMany", int, np.ndarray)

Placement: TypeAlias = tuple[tuple[str, ...], ...]
"""Per tensor dim, the mesh axes that split it, major to minor (as in JAX's PartitionSpec)."""


class Digit(NamedTuple):
    """What a mesh axis selects of a tensor: index * blocks // extent % (the axis's size), along one tensor dim.

    blocks: the number of blocks into which this axis and the more major ones cut the dim.
    """

    dim: int
    blocks: int

    def reshaped(self, ways: int, shape: Sequence[int], new: Sequence[int]) -> Digit | None:
        """The digit of a reshaped tensor that selects the same elements; None if no dim of the new shape has it.

        ways: the size of the digit's mesh axis. A digit is a range of the row-major index of elements, which a reshape
        does not change.

        >>> tuple(Digit(0, 2).reshaped(2, (4, 6), (24,))), tuple(Digit(1, 2).reshaped(2, (4, 6), (24,)))
        ((0, 2), (0, 8))
        >>> Digit(0, 36).reshaped(2, (72,), (12, 6))
        """
        low = shape[self.dim] // self.blocks * math.prod(shape[self.dim + 1 :])
        for i, extent in enumerate(new):
            inner = math.prod(new[i + 1 :])
            if low % inner == 0 and inner * extent % (low * ways) == 0:
                return Digit(i, inner * extent // low)
        return None


AxisState: TypeAlias = Digit | Literal["partial"] | None
"""What a mesh axis does with a tensor. ``"partial"``: the devices along the axis hold summands (or, for a maximum,
candidates); None: they all hold the same."""


class AxisLayout(tuple[AxisState, ...]):
    """The state of each axis of the mesh. A digit may be given as a pair."""

    __slots__ = ()

    def __new__(cls, states: Iterable[AxisState | tuple[int, int]] = ()) -> Self:
        return super().__new__(cls, (Digit(*s) if isinstance(s, tuple) else s for s in states))

    @classmethod
    def whole(cls, mesh: Mesh) -> Self:
        """Replicated on all devices."""
        return cls((None,) * len(mesh.sizes))

    @classmethod
    def of(cls, states: Iterable[int]) -> Self:
        """The layout of a row of integer states."""
        return cls(
            Digit(tensor_dim(s), blocks_of(s)) if s >= 0 else "partial" if s == PARTIAL else None
            for s in map(int, states)
        )

    @property
    def states(self) -> tuple[int, ...]:
        """The integer states."""
        return tuple(
            PARTIAL if s == "partial" else REPLICATED if s is None else digit_state(*s) for s in self
        )

    @property
    def digits(self) -> Iterator[tuple[int, Digit]]:
        """(axis, digit) of the axes that split the tensor."""
        return ((axis, s) for axis, s in enumerate(self) if isinstance(s, Digit))

    @property
    def partial(self) -> tuple[int, ...]:
        """The axes along which devices hold summands."""
        return tuple(axis for axis, s in enumerate(self) if s == "partial")

    def partial_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The names of the axes along which devices hold summands."""
        return tuple(mesh.names[axis] for axis in self.partial)

    @property
    def summed(self) -> AxisLayout:
        """The layout once partial sums are reduced."""
        return AxisLayout(None if s == "partial" else s for s in self)

    def renumbered(self, place: Callable[[int], int | None]) -> AxisLayout:
        """The same splits of a tensor with other dims. place: dim -> its new number; None: it is not split."""
        out = list(self)
        for axis, digit in self.digits:
            dim = place(digit.dim)
            out[axis] = None if dim is None else Digit(dim, digit.blocks)
        return AxisLayout(out)

    def within(self, dims: Callable[[int], bool]) -> AxisLayout:
        """The splits of these dims alone; no others, and nothing partial."""
        return self.summed.renumbered(lambda dim: dim if dims(dim) else None)

    def reshaped(self, shape: Sequence[int], new: Sequence[int], mesh: Mesh) -> AxisLayout | None:
        """The layout of a reshaped tensor in which each device keeps its elements. None if an axis would have to split
        several dims of the new shape.

        >>> mesh = Mesh(names=("a", "b"), sizes=(2, 4))
        >>> AxisLayout([(0, 2), (2, 4)]).reshaped((6, 5, 8), (30, 4, 2), mesh) == ((0, 2), (1, 4))
        True
        """
        out = list(self)
        for axis, digit in self.digits:
            out[axis] = after = digit.reshaped(mesh.sizes[axis], shape, new)
            if after is None:
                return None
        return AxisLayout(out)

    def along(self, dim: int) -> list[tuple[int, int]]:
        """(blocks, axis) of the axes that split a tensor dim, major to minor."""
        return sorted((digit.blocks, axis) for axis, digit in self.digits if digit.dim == dim)

    def axes_along(self, dim: int, mesh: Mesh) -> tuple[str, ...]:
        """The names of the axes that split a tensor dim, major to minor.

        >>> mesh = Mesh(names=("a", "b", "c"), sizes=(4, 4, 2))
        >>> AxisLayout([(0, 8), (1, 4), (0, 2)]).axes_along(0, mesh)
        ('c', 'a')
        """
        return tuple(mesh.names[axis] for _, axis in self.along(dim))

    def placement(self, rank: int, mesh: Mesh) -> Placement | None:
        """The names of the axes that split each tensor dim. None if the tensor is partial, or if a device's part is not
        contiguous.

        >>> mesh = Mesh(names=("a", "b"), sizes=(2, 4))
        >>> AxisLayout([(0, 2), (0, 8)]).placement(2, mesh), AxisLayout([(0, 4), None]).placement(1, mesh)
        ((('a', 'b'), ()), None)
        """
        dims = [contiguous_axes(self.along(dim), mesh.sizes) for dim in range(rank)]
        if self.partial or None in dims:
            return None
        return tuple(tuple(mesh.names[a] for a in axes or ()) for axes in dims)

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """The shape of one device's part of a tensor.

        >>> mesh = Mesh(names=("a", "b", "c"), sizes=(4, 2, 3))
        >>> AxisLayout([(0, 4), None, (1, 6)]).local_shape((8, 6), mesh)
        (2, 2)
        """
        out = list(shape)
        for axis, digit in self.digits:
            out[digit.dim] //= mesh.sizes[axis]
        return tuple(out)


@dataclass(frozen=True, kw_only=True)
class AccessLayout:
    """How an op has a tensor that it reads or writes, and the tensor's gradient there.

    A read tensor is never partial; its gradient may be. What an op writes may be partial, and its gradient arrives as
    a whole value, or as sums that a copy passes on.
    """

    layout: AxisLayout
    gradient: AxisLayout


def contiguous_axes(digits: Iterable[tuple[int, int]], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """The mesh axes that split a tensor dim, major to minor. None if the shard of a device is not contiguous, because
    a minor factor of the dim is split.

    digits: (blocks, axis) of each axis that splits the dim. sizes: of the mesh's axes.

    >>> contiguous_axes([(8, 0), (2, 1)], (4, 2)), contiguous_axes([(8, 0)], (4, 2))
    ((1, 0), None)
    """
    cut, ordered = 1, sorted(digits)
    for blocks, axis in ordered:
        cut *= sizes[axis]
        if blocks != cut:
            return None
    return tuple(axis for _, axis in ordered)


# Integer states, one or an array of them.


@overload
def digit_state(dim: int, blocks: int) -> int: ...


@overload
def digit_state(dim: int | np.ndarray, blocks: np.ndarray) -> np.ndarray: ...


def digit_state(dim: int | np.ndarray, blocks: int | np.ndarray) -> int | np.ndarray:
    """The state of a digit.

    >>> tensor_dim(digit_state(3, 8)), blocks_of(digit_state(3, 8))
    (3, 8)
    """
    return (dim << DIM_BITS) + blocks


def tensor_dim(state: _OneOrMany) -> _OneOrMany:
    """The tensor dim of a digit."""
    return state >> DIM_BITS


def blocks_of(state: _OneOrMany) -> _OneOrMany:
    """The number of blocks into which a digit and all more major digits cut their tensor dim."""
    return state & _BLOCKS


def state_digit(digit: np.ndarray) -> np.ndarray:
    """The state of axes that split only a parameter's gradient and optimizer state. digit: which digit they select."""
    return _STATE - digit


def forward_states(written: np.ndarray) -> np.ndarray:
    """The layout of a tensor as it is written, from the states of its ``write_rule``."""
    return np.where(written <= PENDING, REPLICATED, written)


def gradient_states(written: np.ndarray) -> np.ndarray:
    """The layout to which a tensor's gradient is resharded, from the states of its ``write_rule``."""
    out = np.where(written == PENDING, PARTIAL, np.where(written == PARTIAL, REPLICATED, written))
    return np.where(written <= _STATE, _STATE - written, out)


def summed_states(read: np.ndarray) -> np.ndarray:
    """The layout in which a tensor is read, from the states of its ``read_rule``: it is replicated along the axes over
    which its gradient will be partial."""
    return np.where(read == PARTIAL, REPLICATED, read)
