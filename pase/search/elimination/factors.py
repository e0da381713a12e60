"""Factors over classes of configs, interned so that equal factors are the same.

A factor is a table over some nodes. Along each of its axes, it distinguishes only the classes of a *view* of the node's
configs. Views, tables and eliminations are interned, so the second of two identical blocks costs only a dictionary
look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType

import numpy as np

from pase.errors import Infeasible
from pase.tables.types import CostTables

__all__ = ["ConfigPartition", "Factor", "Pool", "load"]


class ConfigPartition:
    """A partition of a node's K configs. cls: int32 [K], into ``n`` classes. rep: one config of each class."""

    __slots__ = ("cls", "key", "n", "rep")

    def __init__(self, key: int, cls: np.ndarray, n: int, rep: np.ndarray) -> None:
        self.key, self.cls, self.n, self.rep = key, cls, n, rep


class Factor:
    """A table over ``scope`` (nodes). Axis i is indexed by classes of ``views[i]``. sig: the key of its array."""

    __slots__ = ("scope", "sig", "views")

    def __init__(self, scope: tuple[int, ...], views: tuple[ConfigPartition, ...], sig: int) -> None:
        self.scope, self.views, self.sig = scope, views, sig


@dataclass(kw_only=True, eq=False)
class Pool:
    """The interned views and signatures of one search. ``arrays`` maps a signature to its table."""

    arrays: dict[int, np.ndarray] = field(default_factory=dict)
    _sigs: dict[Hashable, int] = field(default_factory=dict)
    _views: dict[Hashable, ConfigPartition] = field(default_factory=dict)
    _joints: dict[tuple[int, int], ConfigPartition] = field(default_factory=dict)
    _subs: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def sig(self, key: Hashable) -> int:
        """The number of a key; equal keys have equal numbers."""
        return self._sigs.setdefault(key, len(self._sigs))

    def view(self, cls: np.ndarray) -> ConfigPartition:
        """The view with these classes, renumbered so that every class occurs."""
        # Renumber by first config, so that equal partitions are one view however they are numbered.
        canonical, rep = _by_first(cls)
        key = canonical.tobytes()
        view = self._views.get(key)
        if view is None:
            view = ConfigPartition(len(self._views), canonical, rep.size, rep)
            self._views[key] = view
        return view

    def joint(self, a: ConfigPartition, b: ConfigPartition) -> ConfigPartition:
        """The coarsest view that refines both views."""
        if a is b or b.n == 1:
            return a
        if a.n == 1:
            return b
        key = (a.key, b.key) if a.key < b.key else (b.key, a.key)
        view = self._joints.get(key)
        if view is None:
            view = self.view(a.cls.astype(np.int64) * b.n + b.cls)
            self._joints[key] = view
        return view

    def sub(self, coarse: ConfigPartition, fine: ConfigPartition) -> np.ndarray:
        """int32 [fine.n]: the class of ``coarse`` that contains each class of ``fine``."""
        key = (coarse.key, fine.key)
        got = self._subs.get(key)
        if got is None:
            got = self._subs[key] = np.ascontiguousarray(coarse.cls[fine.rep])
        return got


def _by_first(cls: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``_numbered_by_first``. Searches over the same graph with other costs renumber the same few thousand classes
    again and again, so small ones are remembered."""
    if cls.nbytes > _REMEMBERED_BYTES:
        return _numbered_by_first(cls)
    return _remembered(cls.tobytes(), cls.dtype)


_REMEMBERED_BYTES = 1 << 12


@lru_cache(maxsize=1 << 12)
def _remembered(cls: bytes, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    return _numbered_by_first(np.frombuffer(cls, dtype))


def _numbered_by_first(cls: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(The classes renumbered by their first config, int32 [K]; the first config of each class, int64 [classes]).

    cls: not negative. Small numbers need no sort.
    """
    most = int(cls.max(initial=0)) + 1
    if most > _SPREAD * cls.size:
        cls = np.unique(cls, return_inverse=True)[1].reshape(-1)
        most = int(cls.max(initial=0)) + 1
    first = np.zeros(most, np.intp)
    # Reversed, because the last assignment to an index wins.
    first[cls[::-1]] = np.arange(cls.size - 1, -1, -1)
    begins = np.zeros(cls.size, bool)
    begins[first[cls]] = True
    return (np.cumsum(begins, dtype=np.int32) - 1)[first[cls]].astype(np.int32, copy=False), np.flatnonzero(
        begins
    )


_SPREAD = 16
"""The largest class number per config for which an array over all numbers is faster than a sort."""


def _occurring(cls: np.ndarray, count: int, known: dict[int, np.ndarray]) -> np.ndarray:
    """The classes, of ``count``, that contain at least one config."""
    if id(cls) not in known:
        seen = np.zeros(count, bool)
        seen[cls] = True
        known[id(cls)] = np.flatnonzero(seen)
    return known[id(cls)]


def _shrunk(
    matrix: np.ndarray,
    some_rows: np.ndarray,
    some_cols: np.ndarray,
    row_classes: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(Compressed matrix, class of each row, class of each column). Equal rows and equal columns are merged. Rows and
    columns that do not occur are left out (-1)."""
    if (len(some_rows), len(some_cols)) != matrix.shape:
        matrix = matrix[np.ix_(some_rows, some_cols)]
    rows, cols = (np.full(some[-1] + 1 if some.size else 0, -1, np.int32) for some in (some_rows, some_cols))
    rows[some_rows], first = row_classes(np.ascontiguousarray(matrix, dtype=np.float64))
    matrix = matrix[first]
    cols[some_cols], first = row_classes(np.ascontiguousarray(matrix.T, dtype=np.float64))
    return np.ascontiguousarray(matrix[:, first], dtype=np.float64), rows, cols


def load(
    tables: CostTables, pool: Pool, kernels: ModuleType, marks: Sequence[Hashable] | None = None
) -> list[Factor]:
    """The factors of ``tables``: one per node cost vector, in the order of the nodes, followed by those of the edges.

    marks: per node; nodes of equal costs share a table only if their marks are equal as well.
    An edge whose matrix is an exact sum of a row part and a column part becomes two node factors.
    Raises Infeasible if a node has no config of finite cost.
    """
    factors: list[Factor] = []
    by_id: dict[Hashable, tuple[ConfigPartition, int]] = {}
    shrunk: dict[Hashable, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    occur: dict[int, np.ndarray] = {}
    for v, costs in enumerate(tables.node_costs):
        mark = None if marks is None else marks[v]
        got = by_id.get((id(costs), mark))
        if got is None:
            if not costs.size or not np.isfinite(costs.min()):
                raise Infeasible("no config has a finite cost", where=f"node {tables.name(v)}")
            array = np.ascontiguousarray(costs, dtype=np.float64)
            key: Hashable = (
                ("array", array.shape, array.tobytes()) if mark is None else (mark, array.tobytes())
            )
            got = (pool.view(np.arange(costs.size)), pool.sig(key))
            pool.arrays[got[1]] = array
            by_id[id(costs), mark] = got
        factors.append(Factor((v,), (got[0],), got[1]))
    parts_by_id: dict[Hashable, list[tuple[tuple[int, ...], tuple[ConfigPartition, ...], int]]] = {}
    for e in tables.edges:
        which = (id(e.cost), id(e.src_class), id(e.dst_class))
        parts = parts_by_id.get(which)
        if parts is None:
            some = [
                _occurring(c, e.cost.shape[axis], occur) for axis, c in enumerate((e.src_class, e.dst_class))
            ]
            whole = all(len(s) == k for s, k in zip(some, e.cost.shape, strict=True))
            wanted = id(e.cost) if whole else (id(e.cost), some[0].tobytes(), some[1].tobytes())
            if wanted not in shrunk:
                shrunk[wanted] = _shrunk(e.cost, some[0], some[1], kernels.row_classes)
            small, rows, cols = shrunk[wanted]
            src, dst = pool.view(rows[e.src_class]), pool.view(cols[e.dst_class])
            # Reorder to the numbering of the views, which has only classes that occur.
            table = np.ascontiguousarray(
                small[np.ix_(rows[e.src_class][src.rep], cols[e.dst_class][dst.rep])]
            )
            parts = [(axes, views, _store(pool, a)) for axes, views, a in _split(table, src, dst)]
            parts_by_id[which] = parts
        ends = (e.src, e.dst)
        factors.extend(Factor(tuple(ends[i] for i in axes), views, sig) for axes, views, sig in parts)
    return factors


def _store(pool: Pool, array: np.ndarray) -> int:
    """Store an array and return its signature."""
    sig = pool.sig(("array", array.shape, array.tobytes()))
    pool.arrays.setdefault(sig, array)
    return sig


def _split(
    table: np.ndarray, src: ConfigPartition, dst: ConfigPartition
) -> list[tuple[tuple[int, ...], tuple[ConfigPartition, ...], np.ndarray]]:
    """The table itself, or the one or two vectors of which it is the exact sum."""
    if src.n == 1 and dst.n == 1 and table[0, 0] == 0.0:
        return []
    if dst.n == 1:
        return [((0,), (src,), np.ascontiguousarray(table[:, 0]))]
    if src.n == 1:
        return [((1,), (dst,), np.ascontiguousarray(table[0]))]
    if np.isfinite(table[0]).all() and np.isfinite(table[:, 0]).all():
        col = table[0] - table[0, 0]
        row = np.ascontiguousarray(table[:, 0])
        if np.array_equal(row[:, None] + col, table):
            return [((0,), (src,), row), ((1,), (dst,), np.ascontiguousarray(col))]
    return [((0, 1), (src, dst), table)]
