"""Many pairs of layouts at once: which collectives, over which axes, on how many bytes.

What has to move depends on little: per axis, which digit of which tensor dim it selects before and after. Pairs
that agree in that share a *plan*, made once by ``pase.tables.reshard_path.moves`` and kept across edges,
tensors and meshes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pase.errors import PaseError
from pase.machine import COLLECTIVES, CollectiveKind, Mesh
from pase.tables.layouts import _DIM, REPLICATED
from pase.tables.reshard_path import moves

__all__ = ["Plans", "Step", "compare", "reshard"]


@dataclass(frozen=True)
class Step:
    """One collective per pair of layouts: axes as bit sets (0: none), and bytes as CostModel.collective has
    them, in units of the whole tensor."""

    kind: CollectiveKind
    axes: np.ndarray
    fraction: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Plans:
    """The plan of every pair of layouts.

    index: int32 [S, D], which plan; codes: int32 [plans, most moves], a plan's moves, 0 where there are fewer:
    1 + kind (as in COLLECTIVES) << 2 * axes | bit set moved << axes | bit set that splits the larger buffer.
    """

    index: np.ndarray
    codes: np.ndarray

    def cost(self, price: np.ndarray) -> np.ndarray:
        """[S, D], given the price of each code."""
        return price[self.codes].sum(axis=1)[self.index]


def reshard(src: np.ndarray, dst: np.ndarray, mesh: Mesh) -> list[Step]:
    """Steps from each src layout to each dst layout: int64 [S, axes], [D, axes] -> arrays [S, D].

    A dst state of PARTIAL lets the tensor stay (or become) partial over that axis.
    """
    n, steps = len(mesh.sizes), []
    (plans,) = compare([(src, dst)], mesh)
    ways = np.array([mesh.ways(s) for s in range(1 << n)], dtype=float)
    for column in plans.codes.T:
        code = column[plans.index] - 1
        for k, kind in enumerate(COLLECTIVES):
            on = (code >= 0) & (code >> 2 * n == k)
            if on.any():
                axes = np.where(on, code >> n & (1 << n) - 1, 0)
                steps.append(Step(kind, axes, 1.0 / ways[code & (1 << n) - 1]))
    return steps


def compare(pairs: Sequence[tuple[np.ndarray, np.ndarray]], mesh: Mesh) -> list[Plans]:
    """For each (src [S, axes], dst [D, axes]), the plans of all their pairs of layouts."""
    sizes, n = mesh.sizes, len(mesh.sizes)
    values = np.unique(
        np.concatenate([REPLICATED, *(rows.ravel() for pair in pairs for rows in pair)], axis=None)
    )
    ranked, vocabulary = _ranked(values)
    base = len(vocabulary)
    if base ** (2 * n) >= 1 << 63:
        raise PaseError(f"mesh {sizes} has too many layouts to compare: use fewer, larger mesh axes")
    weights = base ** np.arange(2 * n, dtype=np.int64)
    found = []
    for src, dst in pairs:
        s, d = np.searchsorted(values, src), np.searchsorted(values, dst)
        used = _dims(src)[:, None] | _dims(dst)[None, :]
        left = np.einsum("san,a->sn", ranked[s], weights[:n])
        right = np.einsum("dan,a->dn", ranked[d], weights[n:])
        keys = left[np.arange(len(src))[:, None], used] + right[np.arange(len(dst))[None, :], used]
        found.append(np.unique(keys, return_inverse=True))
    every = np.unique(np.concatenate([keys for keys, _ in found]))
    digits = vocabulary[every[:, None] // weights % base]
    codes = [_plan(sizes, tuple(row[:n]), tuple(row[n:])) for row in digits.tolist()]
    table = np.zeros((len(every), max(map(len, codes), default=0)), dtype=np.int32)
    for row, plan in zip(table, codes, strict=True):
        row[: len(plan)] = plan
    out = []
    for (src, dst), (keys, inverse) in zip(pairs, found, strict=True):
        mine = table[np.searchsorted(every, keys)]
        out.append(Plans(index=inverse.reshape(len(src), len(dst)).astype(np.int32), codes=mine))
    return out


def _dims(rows: np.ndarray) -> np.ndarray:
    """The tensor dims that each layout splits, as bit sets [rows]."""
    return np.bitwise_or.reduce(np.where(rows >= 0, 1 << np.maximum(rows, 0) // _DIM, 0), axis=1)


def _ranked(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tensor dims renumbered among those that a pair uses: which ones they are does not matter.

    -> places in the vocabulary [values, sets of dims], and the vocabulary.
    """
    dims = np.where(values >= 0, values // _DIM, -1)
    out = np.repeat(values[:, None], 1 << int(dims.max()) + 1, axis=1)
    for used in range(out.shape[1]):
        for t in range(int(dims.max()) + 1):
            out[dims == t, used] -= (t - (used & (1 << t) - 1).bit_count()) * _DIM
    vocabulary, places = np.unique(out, return_inverse=True)
    return places.reshape(out.shape), vocabulary


def _plan(sizes: tuple[int, ...], src: tuple[int, ...], dst: tuple[int, ...]) -> list[int]:
    """The codes of one pair. Axes that stay replicated are left out, the others sorted, as ``moves`` does: meshes
    whose axes come in another order share plans."""
    axes = sorted(
        (a for a in range(len(sizes)) if not src[a] == dst[a] == REPLICATED),
        key=lambda a: (sizes[a], src[a], dst[a]),
    )
    key = tuple((sizes[a], src[a], dst[a]) for a in axes)

    def here(bits: int) -> int:
        return sum(1 << a for i, a in enumerate(axes) if bits >> i & 1)

    n = len(sizes)
    return [1 + (k << 2 * n | here(moved) << n | here(split)) for k, moved, split in _moves(key)]


@lru_cache(maxsize=1 << 18)
def _moves(key: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    sizes, src, dst = zip(*key, strict=True) if key else ((), (), ())
    return tuple(
        (COLLECTIVES.index(m.kind), m.axes, m.split) for m in moves(src, dst, sizes) if m.kind != "slice"
    )
