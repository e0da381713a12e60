"""An oracle for layouts and collectives: what every device holds, element by element, for small tensors.

It uses only sets, without strides or spans. A *holding* says which elements a device has and, for each of them, which
summands (a tensor that is partial over an axis is a sum, and each device along the axis has its own summand): bool
[devices, summands, elements].
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np

from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout


def coordinates(mesh: Mesh) -> np.ndarray:
    """int64 [devices, axes], devices numbered row-major."""
    return np.array(list(itertools.product(*map(range, mesh.sizes))), dtype=np.int64)


def held(layout: AxisLayout, shape: tuple[int, ...], mesh: Mesh, sums: tuple[int, ...] = ()) -> np.ndarray:
    """The holding of a layout. sums: the axes over which the tensor was partial at first; each combination of their
    coordinates is one summand."""
    index = np.indices(shape).reshape(len(shape), -1)
    out = []
    summands = list(itertools.product(*(range(mesh.sizes[a]) for a in sums)))
    for coord in coordinates(mesh):
        mine = np.ones(index.shape[1], dtype=bool)
        for a, (t, blocks) in layout.digits:
            mine &= index[t] * blocks // shape[t] % mesh.sizes[a] == coord[a]
        parts = [
            all(a not in layout.partial or k == coord[a] for a, k in zip(sums, summand, strict=True))
            for summand in summands
        ]
        out.append(np.outer(parts, mine))
    return np.array(out)


def groups(mesh: Mesh, axes: int) -> list[list[int]]:
    """The groups of devices that take part in each collective over these axes."""
    found: dict[tuple[int, ...], list[int]] = {}
    for i, coord in enumerate(coordinates(mesh)):
        rest = tuple(c for a, c in enumerate(coord) if not axes >> a & 1)
        found.setdefault(rest, []).append(i)
    return list(found.values())


def check(kind: str, mesh: Mesh, axes: int, before: np.ndarray, after: np.ndarray, even: bool = True) -> None:
    """Assert that this collective, over these axes, can turn one holding into the other, by the collective's
    definition.

    even: whether all shards have one size. They do not if digits of 2 and of 3 ways cut across each other.
    """
    for members in groups(mesh, axes):
        b, a = before[members], after[members]
        n = len(members)
        if kind == "slice":
            assert (a <= b).all(), "a slice keeps a part of what is there"
        elif kind == "permute":
            assert Counter(x.tobytes() for x in b) == Counter(x.tobytes() for x in a), (
                "whole buffers, as they are"
            )
        elif kind == "all_gather":
            assert (b.sum(axis=0) <= 1).all(), "nobody sends what another has"
            assert (a == b.any(axis=0)).all()
        elif kind == "all_to_all":
            assert (b.sum(axis=0) <= 1).all()
            assert (a <= b.any(axis=0)).all()
            sent = np.einsum("ike,jke->ij", b.astype(int), a.astype(int))
            assert not even or (sent * n == b[0].sum()).all(), "every device sends 1/n of its buffer to each"
            assert not even or (a.sum(axis=(1, 2)) == b[0].sum()).all()
        elif kind in ("all_reduce", "reduce_scatter"):
            assert (b.any(axis=1) == b[0].any(axis=0)).all(), "the same elements on all"
            assert (b.sum(axis=0) <= 1).all(), "other summands on each"
            total = b.any(axis=0)
            if kind == "all_reduce":
                assert (a == total).all()
            else:
                assert (a.sum(axis=0) == total).all(), "each sum on one device"
                assert not even or (a.sum(axis=(1, 2)) * n == total.sum()).all()
        else:
            raise AssertionError(kind)


def larger(kind: str, before: np.ndarray, after: np.ndarray) -> float:
    """Elements of the larger local buffer, as CostModel.collective counts its bytes."""
    buffers = after if kind == "all_gather" else before
    return float(buffers.any(axis=1).sum(axis=1).max())
