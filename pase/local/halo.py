"""Halos: the rows of neighbouring devices that a window along a split dim reads, in any framework
(``pase.local.arrays``).

A window that moves along a split dim reads past the border of a device's part. The neighbours send the rows past the
border. Past the ends of the whole tensor, the op's padding applies. The gradients of these rows return the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from pase.ir import Op
from pase.local.arrays import Arrays
from pase.pytree import Tree
from pase.tables.axis_layout import AxisLayout

__all__ = ["borders_of", "widened", "widened_back"]

A = TypeVar("A")


def borders_of(op: Op, dims: Iterable[int], rank: int) -> dict[int, tuple[int, int]]:
    """Dim -> (rows read before a part, rows read after it), for those of the operand's dims under a window of the op.

    rank: of the operand. Its dims are the last ones of what the op reads, which may have a dim for examples besides.
    """
    walks = op.reads[0].map.walks
    return {dim: window.border for dim in dims if (window := walks[dim - rank].window) is not None}


def widened(
    x: A, borders: Mapping[int, tuple[int, int]], layout: AxisLayout, edge: Tree, arrays: Arrays[A]
) -> A:
    """The operand of a window with the rows before and after it that its windows read.

    borders: dim -> (rows read before the part, rows read after it). If a number is negative, so many rows of the part
    are left out. layout: of the operand. edge: the value past the ends of the whole tensor; None for zeros. Dims are
    extended one after the other, so that corners are included.
    """
    for dim, (before, behind) in borders.items():
        axes, out, back = layout.axes_along(dim, arrays.mesh), max(before, 0), max(behind, 0)
        rows = arrays.shape(x)[dim] + min(before, 0) + min(behind, 0)
        parts = [arrays.narrow(x, dim, max(-before, 0), rows)]
        if out or back:
            first, last = arrays.neighbours(x, axes, dim, back, out)
            if out:
                parts.insert(0, first if edge is None else arrays.at_end(first, axes, False, edge))
            if back:
                parts.append(last if edge is None else arrays.at_end(last, axes, True, edge))
        x = arrays.concat(parts, dim) if len(parts) > 1 else parts[0]
    return x


def widened_back(g: A, borders: Mapping[int, tuple[int, int]], layout: AxisLayout, arrays: Arrays[A]) -> A:
    """The transpose of ``widened``: gradients of rows return to the devices that the rows came from, and are added to
    the gradients of these devices' own rows."""
    for dim, (before, behind) in reversed(list(borders.items())):
        axes, out, back = layout.axes_along(dim, arrays.mesh), max(before, 0), max(behind, 0)
        n = arrays.shape(g)[dim] - out - back
        rows = n - min(before, 0) - min(behind, 0)
        made: Tree = arrays.padded(arrays.narrow(g, dim, out, n), dim, max(-before, 0), max(-behind, 0))
        if out or back:
            first, last = arrays.neighbours(g, axes, dim, out, back)
            made = made + arrays.padded(first, dim, 0, rows - back) if back else made
            made = made + arrays.padded(last, dim, rows - out, 0) if out else made
        g = made
    return g
