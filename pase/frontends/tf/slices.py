"""Reads the masks of a StridedSlice: which positions it takes of each dim, for values as well as for shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pase.frontends.tf.graph import TfNode

__all__ = ["Pick", "positions"]


@dataclass(frozen=True, kw_only=True)
class Pick:
    """What a slice takes of a dim.

    picked: the positions. shrink: the dim is removed. fresh: it is a new dim of one element.
    """

    picked: range = range(1)
    shrink: bool = False
    fresh: bool = False
    dynamic: bool = False
    """The start is known only at run time. Of ``picked``, only the number of positions is then meaningful."""


def positions(
    node: TfNode,
    shape: Sequence[int],
    begin: Sequence[int] | np.ndarray | None,
    end: Sequence[int] | np.ndarray | None,
    strides: Sequence[int] | np.ndarray,
) -> list[Pick | None]:
    """One entry per dim of the result, including dims that are removed. None means all of the dim.

    begin, end, strides: one number per entry of the slice. begin or end is None if it is known only at run time. Raises
    ValueError if the slice does not fit the shape or its extent is not known.
    """

    def mask(key: str) -> int:
        return int(node.attr[key].i) if key in node.attr else 0

    begins, ends, ellipsis = mask("begin_mask"), mask("end_mask"), mask("ellipsis_mask")
    new, shrink = mask("new_axis_mask"), mask("shrink_axis_mask")
    n = len(strides)
    if (begin is not None and len(begin) != n) or (end is not None and len(end) != n):
        raise ValueError("begin, end and strides differ in length")
    spent = sum(1 for k in range(n) if not (new >> k & 1) and not (ellipsis >> k & 1))
    if spent > len(shape):
        raise ValueError(f"it has {spent} indices for {len(shape)} dims")
    out: list[Pick | None] = []
    at = 0
    for k in range(n):
        if ellipsis >> k & 1:
            wide = len(shape) - spent
            out += [None] * wide
            at += wide
            spent = len(shape)  # makes a second ellipsis empty
        elif new >> k & 1:
            out.append(Pick(fresh=True))
        elif shrink >> k & 1:
            if begin is None:
                out.append(Pick(shrink=True, dynamic=True))
            else:
                i = int(begin[k])
                if not -shape[at] <= i < shape[at]:
                    raise ValueError(f"index {i} is out of range for a dim of {shape[at]}")
                out.append(Pick(picked=range(i % shape[at], i % shape[at] + 1), shrink=True))
            at += 1
        else:
            whole = bool(begins >> k & 1), bool(ends >> k & 1)
            if (begin is None and not whole[0]) or (end is None and not whole[1]):
                raise ValueError("its extent depends on data")
            low = None if whole[0] else int(begin[k])  # type: ignore[index]
            high = None if whole[1] else int(end[k])  # type: ignore[index]
            step = int(strides[k])
            if step == 0:
                raise ValueError("its stride is 0")
            picked = range(*slice(low, high, step).indices(shape[at]))
            out.append(None if picked == range(shape[at]) else Pick(picked=picked))
            at += 1
    out += [None] * (len(shape) - at)
    return out
