"""How a tensor's shards lie on the devices: the digits of its dims, and a reshard step as reshape, collective, reshape.

The index along a split tensor dim is a number in mixed radix, major to minor: each mesh axis holds one digit, and the
digits that no axis holds are local to a device. A reshard step changes which axis holds which digit. So every backend
does the same: it reshapes the local array to its digits, brings the leaving digits to the front, sends, and puts the
arriving digits in their places.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from pase.errors import PaseError
from pase.local.types import LocalReshardStep
from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout, Digit

__all__ = [
    "NotNested",
    "RadixDigit",
    "WireView",
    "digits",
    "held",
    "iteration_dim",
    "pairs",
    "to_whole",
    "view",
]


class NotNested(PaseError):
    """Two layouts cannot be compared digit by digit. ``held`` compares them element by element."""


@dataclass(frozen=True)
class RadixDigit:
    """A digit of a tensor dim: its size, and the numbers of the axes that hold it before and after a reshard step.

    None: no axis holds the digit, so it is local to a device.
    """

    dim: int
    size: int
    stride: int
    before: int | None
    after: int | None


@lru_cache(maxsize=1 << 14)
def digits(
    shape: tuple[int, ...], before: AxisLayout, after: AxisLayout, mesh: Mesh
) -> tuple[RadixDigit, ...]:
    """The digits of all dims, major to minor, that distinguish two layouts. NotNested if they do not nest."""
    out: list[RadixDigit] = []
    for dim, extent in enumerate(shape):
        spans = [_spans(extent, dim, layout, mesh) for layout in (before, after)]
        cuts = sorted({1, extent, *(edge for held in spans for span in held for edge in span)}, reverse=True)
        for high, low in itertools.pairwise(cuts):
            if high % low:
                raise NotNested(
                    f"a dim of {extent} elements is cut into parts of {low} and of {high} elements, which do not nest"
                )
            holders = [_holder(held, low, high, extent) for held in spans]
            out.append(RadixDigit(dim, high // low, low, holders[0], holders[1]))
    return tuple(out)


@lru_cache(maxsize=1 << 14)
def held(
    shape: tuple[int, ...], layout: AxisLayout, place: tuple[int, ...], mesh: Mesh
) -> tuple[np.ndarray, ...]:
    """For each dim, the indices of the elements that a device holds, int64 [elements], in order.

    place: the device's index along each mesh axis.

    >>> held((8,), AxisLayout([(0, 2), (0, 4)]), (1, 0), Mesh(names=("a", "b"), sizes=(2, 2)))
    (array([4, 5]),)
    """

    def along(dim: int, extent: int) -> np.ndarray:
        every = np.arange(extent)
        mine = np.ones(extent, dtype=bool)
        for blocks, axis in layout.along(dim):
            mine &= every // (extent // blocks) % mesh.sizes[axis] == place[axis]
        return every[mine]

    return tuple(along(dim, extent) for dim, extent in enumerate(shape))


def _spans(extent: int, dim: int, layout: AxisLayout, mesh: Mesh) -> dict[tuple[int, int], int]:
    """(stride, stride times ways) of each digit that an axis holds -> the axis. Axes of size 1 are left out."""
    return {
        (extent // blocks, extent // blocks * mesh.sizes[axis]): axis
        for blocks, axis in layout.along(dim)
        if mesh.sizes[axis] > 1
    }


def _holder(held: dict[tuple[int, int], int], low: int, high: int, extent: int) -> int | None:
    for (bottom, top), axis in held.items():
        if bottom <= low and high <= top:
            if (bottom, top) != (low, high):
                raise NotNested(
                    f"only some of what one mesh axis holds of a dim of {extent} elements goes to another axis"
                )
            return axis
    return None


@dataclass(frozen=True, kw_only=True)
class WireView:
    """How a reshard step sends the local array of one device.

    seen: the local array's shape with one dim for each digit. leaving: the positions in ``seen`` of the digits that are
    sent, in the order of the axes. They are brought to the front and form the first dim. ways: the sizes of the axes.
    arriving: the permutation for received digits. The first dim of the received array is reshaped to ``ways``, then the
    permutation puts all dims in their places. None: no digits arrive. shape: of the local array afterwards.
    along: (dim whose digits leave, dim whose digits arrive) of the local array, if these digits are the outermost ones
    of one dim each. A backend can then skip the permutations. None otherwise.
    """

    seen: tuple[int, ...]
    leaving: tuple[int, ...]
    ways: tuple[int, ...]
    arriving: tuple[int, ...] | None
    shape: tuple[int, ...]
    along: tuple[int | None, int | None] | None

    @property
    def to_front(self) -> tuple[int, ...]:
        """The permutation of ``seen`` that brings the leaving digits to the front and leaves the rest unchanged."""
        return (*self.leaving, *(i for i in range(len(self.seen)) if i not in self.leaving))

    @property
    def before(self) -> tuple[int, ...]:
        """The shape of the local array beforehand, if ``along`` says which dims change."""
        assert self.along is not None
        shape, n = list(self.shape), math.prod(self.ways)
        gone, come = self.along
        if come is not None:
            shape[come] //= n
        if gone is not None:
            shape[gone] *= n
        return tuple(shape)


@lru_cache(maxsize=1 << 14)
def view(step: LocalReshardStep, shape: tuple[int, ...], mesh: Mesh) -> WireView:
    """How one device sends its part in a reshard step. shape: of the whole tensor.

    A permute has no digits that leave or arrive, because it does not change the local shape.
    """
    every = digits(shape, step.before, step.after, mesh)
    axes = [a for name in step.axes if mesh.sizes[a := mesh.names.index(name)] > 1]
    had = [d for d in every if d.before is None]
    has = [d for d in every if d.after is None]
    leaving = [next((d for d in had if d.after == a), None) for a in axes]
    coming = [next((d for d in has if d.before == a), None) for a in axes]
    gone, received = [d for d in leaving if d is not None], [d for d in coming if d is not None]
    if {len(gone), len(received)} - {0, len(axes)}:
        raise PaseError("it does not move whole digits", where=f"{step.kind} over {', '.join(step.axes)}")
    on_wire = [*received, *(d for d in had if d not in gone)]
    return WireView(
        seen=tuple(d.size for d in had),
        leaving=tuple(had.index(d) for d in gone),
        ways=tuple(mesh.sizes[a] for a in axes),
        arriving=tuple(on_wire.index(d) for d in has) if received else None,
        shape=_merged(len(shape), has),
        along=_along(had, gone, has, received),
    )


def _merged(rank: int, kept: Sequence[RadixDigit]) -> tuple[int, ...]:
    return tuple(math.prod(d.size for d in kept if d.dim == dim) for dim in range(rank))


def _along(
    had: Sequence[RadixDigit],
    gone: Sequence[RadixDigit],
    has: Sequence[RadixDigit],
    received: Sequence[RadixDigit],
) -> tuple[int | None, int | None] | None:
    """(dim whose outermost digits leave, dim whose outermost digits arrive); None if there are no such two dims."""
    out: list[int | None] = []
    for moved, held in ((gone, had), (received, has)):
        if not moved:
            out.append(None)
            continue
        dim = moved[0].dim
        if [d for d in held if d.dim == dim][: len(moved)] != list(moved):
            return None
        out.append(dim)
    return out[0], out[1]


def pairs(step: LocalReshardStep, shape: tuple[int, ...], mesh: Mesh) -> list[tuple[int, int]]:
    """The (source, target) pairs of a permute after which each device has its shard.

    Devices are numbered along the step's axes, row-major.
    """
    axes = [mesh.names.index(name) for name in step.axes]
    places = list(itertools.product(*(range(mesh.sizes[a]) for a in axes)))

    def held(layout: AxisLayout) -> Iterator[tuple[tuple[int, int, int], ...]]:
        """For each device, the parts of digits that it holds."""
        for place in places:
            found: list[tuple[int, int, int]] = []
            for a, index in zip(axes, place, strict=True):
                state = layout[a]
                if isinstance(state, Digit):
                    found += _parts(shape[state.dim], state, mesh.sizes[a], index, edges[state.dim])
            yield tuple(sorted(found))

    edges: dict[int, list[int]] = {}
    for layout in (step.before, step.after):
        for a in axes:
            state = layout[a]
            if isinstance(state, Digit):
                stride = shape[state.dim] // state.blocks
                edges.setdefault(state.dim, []).extend((stride, stride * mesh.sizes[a]))
    have, want = list(held(step.before)), list(held(step.after))
    left: dict[object, list[int]] = {}
    for i, part in enumerate(have):
        left.setdefault(part, []).append(i)
    if sorted(have) != sorted(want):
        raise NotNested("it does not pass on whole parts", where=f"permute over {', '.join(step.axes)}")
    return [(left[part].pop(0), i) for i, part in enumerate(want)]


def _parts(
    extent: int, digit: Digit, ways: int, index: int, edges: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """A digit's index as indices of finer digits, each as (dim, stride, index). ``edges`` cuts the digit into these."""
    bottom = extent // digit.blocks
    cuts = sorted({bottom, bottom * ways, *(e for e in edges if bottom < e < bottom * ways)}, reverse=True)
    for high, low in itertools.pairwise(cuts):
        yield digit.dim, low, index * bottom // low % (high // low)


def iteration_dim(dims: Sequence[str], sizes: Mapping[str, int], blocks: int, ways: int) -> str | None:
    """The iteration dim that an axis splits, of those that walk a tensor dim. None if it is no single one.

    dims: the iteration dims, major to minor. blocks: the number of blocks into which this axis and the more major ones
    cut the tensor dim. ways: the size of the axis.

    >>> [iteration_dim(("h", "k"), {"h": 4, "k": 8}, blocks, 4) for blocks in (4, 16, 8)]
    ['h', 'k', None]
    """
    major = 1
    for d in dims:
        if major <= blocks // ways and blocks <= major * sizes[d]:
            return d
        major *= sizes[d]
    return None


def to_whole(layout: AxisLayout, mesh: Mesh) -> list[LocalReshardStep]:
    """The reshard steps that replicate a tensor on every device."""
    out: list[LocalReshardStep] = []
    now = layout

    def add(kind: Literal["all_reduce", "all_gather"], axes: Sequence[int]) -> None:
        nonlocal now
        after = AxisLayout(None if i in axes else s for i, s in enumerate(now))
        if axes:
            out.append(
                LocalReshardStep(kind=kind, axes=tuple(mesh.names[i] for i in axes), before=now, after=after)
            )
        now = after

    add("all_reduce", now.partial)
    for dim in sorted({digit.dim for _, digit in now.digits}):
        add("all_gather", sorted(axis for _, axis in now.along(dim)))
    return out
