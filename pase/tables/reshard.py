"""Reshards for many pairs of layouts at once: which collectives, over which axes, on how many bytes.

The steps from one layout to another are called the *plan* of this pair. The plan depends only on the size of each axis
and on which digit of which tensor dim the axis selects before and after; which tensor dims they are does not matter.
``pase.tables.reshard_path`` defines plans. They are computed once for each distinct (*canonical*) case, and reused
across edges, tensors and meshes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pase.errors import PaseError
from pase.machine import COLLECTIVES, CollectiveKind, Mesh
from pase.tables.axis_layout import REPLICATED, AxisLayout, blocks_of, digit_state, tensor_dim
from pase.tables.distinct import distinct
from pase.tables.reshard_path import canonical, reshard_steps
from pase.tables.walks import walked

__all__ = ["KNOWN_PLANS", "PairedStep", "Plans", "compare", "reshard"]


@dataclass(frozen=True)
class PairedStep:
    """One collective per pair of layouts.

    axes: bit sets, 0 for no collective. fraction: bytes as in CostModel.collective, as a fraction of the whole tensor.
    """

    kind: CollectiveKind
    axes: np.ndarray
    fraction: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Plans:
    """The plan of every pair of layouts.

    index: int32 [S, D], the number of a pair's plan. codes: int32 [plans, most steps], the steps of a plan, padded with
    0. The code of a step is
    1 + kind (as in COLLECTIVES) << 2 * axes | bit set of the step's axes << axes | bit set that splits its larger
    buffer.
    """

    index: np.ndarray
    codes: np.ndarray

    def cost(self, price: np.ndarray) -> np.ndarray:
        """The cost of each pair, [S, D], given the price of each code."""
        return price[self.codes].sum(axis=1)[self.index]

    def cost_of_single(self, price: np.ndarray) -> np.ndarray:
        """The cost of each pair whose plan is a single step, [S, D]; 0 for other pairs."""
        single = (self.codes > 0).sum(axis=1) == 1
        return np.where(single, price[self.codes].sum(axis=1), 0.0)[self.index]


def reshard(src: np.ndarray, dst: np.ndarray, mesh: Mesh) -> list[PairedStep]:
    """Steps from each src layout to each dst layout: int64 [S, axes], [D, axes] -> arrays [S, D].

    A dst state of PARTIAL lets the tensor stay (or become) partial over that axis.
    """
    # A single pair comes from the edge of a strategy. Equal layers have equal pairs, so results are cached.
    if len(src) == len(dst) == 1:
        return list(_reshard_one(tuple(src[0].tolist()), tuple(dst[0].tolist()), mesh))
    return _reshard(src, dst, mesh)


@lru_cache(maxsize=1 << 14)
def _reshard_one(src: tuple[int, ...], dst: tuple[int, ...], mesh: Mesh) -> tuple[PairedStep, ...]:
    """``reshard`` for one pair of layouts, cached."""
    return tuple(
        PairedStep(m.kind, np.array([[m.axes]]), np.array([[1.0 / mesh.ways(m.split)]]))
        for m in reshard_steps(AxisLayout.of(src), AxisLayout.of(dst), mesh.sizes)
        if m.kind != "slice"
    )


def _reshard(src: np.ndarray, dst: np.ndarray, mesh: Mesh) -> list[PairedStep]:
    """``reshard`` for many pairs of layouts."""
    n, steps = len(mesh.sizes), []
    (plans,) = compare([(src, dst)], mesh)
    ways = np.array([mesh.ways(s) for s in range(1 << n)], dtype=float)
    for column in plans.codes.T:
        code = column[plans.index] - 1
        for k, kind in enumerate(COLLECTIVES):
            on = (code >= 0) & (code >> 2 * n == k)
            if on.any():
                axes = np.where(on, code >> n & (1 << n) - 1, 0)
                steps.append(PairedStep(kind, axes, 1.0 / ways[code & (1 << n) - 1]))
    return steps


def compare(pairs: Sequence[tuple[np.ndarray, np.ndarray]], mesh: Mesh) -> list[Plans]:
    """The plans of all pairs of layouts, for each (src [S, axes], dst [D, axes]).

    Each pair of layouts is packed into one integer key. The plans of distinct keys are then computed together.
    """
    n = len(mesh.sizes)
    values = np.unique(
        np.concatenate([REPLICATED, *(rows.ravel() for pair in pairs for rows in pair)], axis=None)
    )
    ranked, vocabulary = _ranked(values)
    base = len(vocabulary)
    if base ** (2 * n) >= 1 << 63:
        raise PaseError(
            "too many layouts to compare", where=f"mesh {mesh.sizes}", fix="use fewer, larger mesh axes"
        )
    weights = base ** np.arange(2 * n, dtype=np.int64)
    found = []
    for src, dst in pairs:
        s, d = np.searchsorted(values, src), np.searchsorted(values, dst)
        used_dims = _dims(src)[:, None] | _dims(dst)[None, :]
        src_keys = np.einsum("san,a->sn", ranked[s], weights[:n])
        dst_keys = np.einsum("dan,a->dn", ranked[d], weights[n:])
        keys = (
            src_keys[np.arange(len(src))[:, None], used_dims]
            + dst_keys[np.arange(len(dst))[None, :], used_dims]
        )
        first, index = distinct(keys.ravel())
        found.append((keys.ravel()[first], index.reshape(keys.shape)))
    all_keys = np.concatenate([keys for keys, _ in found])
    first, which = distinct(all_keys)
    digits = vocabulary[all_keys[first][:, None] // weights % base]
    table = _codes(digits[:, :n], digits[:, n:], np.array(mesh.sizes))
    ends = np.cumsum([len(keys) for keys, _ in found])[:-1]
    plan_numbers = np.split(which, ends)
    return [
        Plans(index=index, codes=table[rows]) for (_, index), rows in zip(found, plan_numbers, strict=True)
    ]


def _dims(rows: np.ndarray) -> np.ndarray:
    """The tensor dims that each layout splits, as bit sets [rows]."""
    return np.bitwise_or.reduce(np.where(rows >= 0, 1 << tensor_dim(np.maximum(rows, 0)), 0), axis=1)


def _ranked(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Renumber the tensor dims of states among the dims that a pair of layouts uses, because plans do not depend on
    which dims they are.

    values: the distinct states. Returns (indices into the vocabulary, [values, sets of used dims], the vocabulary of
    renumbered states).
    """
    dims = np.where(values >= 0, tensor_dim(values), -1)
    out = np.repeat(values[:, None], 1 << int(dims.max()) + 1, axis=1)
    for used in range(out.shape[1]):
        for t in range(int(dims.max()) + 1):
            rank = (used & (1 << t) - 1).bit_count()
            out[dims == t, used] = digit_state(rank, blocks_of(values[dims == t]))
    vocabulary, places = np.unique(out, return_inverse=True)
    return places.reshape(out.shape), vocabulary


def _codes(src: np.ndarray, dst: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Plans of pairs of rows [U, axes], as in ``Plans.codes``. Equivalent to ``reshard_steps`` of each pair, but for
    many pairs at once."""
    cases, order = canonical(src, dst, sizes)
    n = len(sizes)
    first, which = _distinct(cases)
    kind, moved, split = KNOWN_PLANS.of(cases[first])[:, which]

    def named(bits: np.ndarray) -> np.ndarray:
        """Convert bit sets of positions in the case to bit sets of axes."""
        return sum((bits >> i & 1) << order[:, i : i + 1] for i in range(n)).astype(np.int32)

    return np.where(kind < 0, 0, 1 + (kind << 2 * n | named(moved) << n | named(split)))


class _KnownPlans:
    """Cache of the plans of canonical cases. Meshes, tensors and models share it.

    number: case, as bytes -> the row of its plan. parts: int32 [3, rows, steps], the kind, axes and split of each step.
    """

    def __init__(self) -> None:
        self.number: dict[bytes, int] = {}
        self.parts = np.full((3, 256, 1), -1, dtype=np.int32)

    def of(self, cases: np.ndarray) -> np.ndarray:
        """Kind, axes and split of each step of distinct cases [U, 3, axes]: int32 [3, U, most steps], padded with
        -1."""
        if len(self.number) > _MOST_PLANS:
            self.number.clear()
        packed, size = np.ascontiguousarray(cases).tobytes(), cases[0].nbytes if len(cases) else 1
        keys = [packed[i : i + size] for i in range(0, len(packed), size)]
        rows = np.array([self.number.get(key, -1) for key in keys], np.intp)
        new = np.flatnonzero(rows < 0)
        if len(new):
            first = len(self.number)
            rows[new] = np.arange(first, first + len(new))
            self._keep(first, walked(cases[new]))
            self.number.update((keys[i], int(rows[i])) for i in new)
        found = self.parts[:, rows]
        most = int((found[0] >= 0).any(axis=0).sum())
        return np.ascontiguousarray(found[:, :, :most])

    def _keep(self, first: int, plans: np.ndarray) -> None:
        """Store plans [3, new, steps] from row ``first`` on."""
        _, new, steps = plans.shape
        _, rows, most = self.parts.shape
        if first + new > rows or steps > most:
            grown = np.full((3, max(rows, 2 * (first + new)), max(most, steps)), -1, dtype=np.int32)
            grown[:, :first, :most] = self.parts[:, :first]
            self.parts = grown
        self.parts[:, first : first + new] = -1
        self.parts[:, first : first + new, :steps] = plans


_MOST_PLANS = 1 << 18
KNOWN_PLANS = _KnownPlans()


def _distinct(cases: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The index of the first occurrence of each distinct case [U, 3, axes], and the number of each case.

    Each case is packed into one integer, axis by axis, because sorting rows takes ten times as long.
    """
    states = np.zeros(cases[:, 0].shape, dtype=np.int64)
    for k in range(3):
        values = cases[:, k].ravel()
        first, column = distinct(values - values.min(initial=0))
        states = states * len(first) + column.reshape(states.shape)
    distinct_states, column = distinct(states.ravel())
    packed = np.zeros(len(cases), dtype=np.int64)
    for place in column.reshape(states.shape).T:
        if int(packed.max(initial=0)) + 1 > (1 << 62) // len(distinct_states):
            packed = distinct(packed)[1].astype(np.int64)
        packed = packed * len(distinct_states) + place
    return distinct(packed)
