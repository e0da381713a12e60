"""Folds repeated blocks: a run of n equal blocks in a row becomes one edge, a power in the (min, +) semiring.

If nodes s … s + nP - 1 repeat with period P (the same cost arrays, the same edges at the same distances) and each block
is connected to the next through one node only (its *speaker*), then a block is a matrix between the configs of its
predecessor's speaker and those of its own. The nth power takes 2 log n products, so a model with 1,000 layers costs
little more than one with two. Expanding a choice splits the power again, and reuses results for equal parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np

from pase.search.elimination.eliminate import back_substitute, run_plan
from pase.search.elimination.exact import KernelName, kernels_for
from pase.search.elimination.factors import ConfigPartition, Pool, load
from pase.search.elimination.plan import EliminationPlan, plan_elimination
from pase.tables.types import CostTables, EdgeTable

__all__ = ["Folded", "fold"]

_FEWEST_BLOCKS = 8
_MOST_WORK = 300_000_000  # min-plus operations for a block and its powers


@dataclass(frozen=True, kw_only=True, eq=False)
class Folded:
    """Smaller tables with the same optimum. nodes: original indices of their nodes. expand: maps a choice of the
    smaller tables to one of the original tables."""

    tables: CostTables
    nodes: np.ndarray
    work: int
    expand: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class _RepeatedBlocks:
    """Blocks 0 … count-1 of ``period`` nodes from node ``start``. speaker: offset in the block of the node whose edges
    lead to the next block."""

    start: int
    period: int
    count: int
    speaker: int


def fold(tables: CostTables, kernel: KernelName, threads: int = 1) -> Folded | None:
    """Fold the longest run of equal blocks. None if none is worth folding. Raises Infeasible if a block has no
    choice."""
    ends = np.array([(e.src, e.dst) for e in tables.edges], np.int64).reshape(-1, 2)
    run = _find_run(tables, ends)
    if run is not None:
        return _fold_run(tables, ends, run, kernel, threads)
    order = _by_first_use(len(tables.node_costs), ends)
    if (order == np.arange(order.size)).all():
        return None
    place = np.argsort(order)
    ends = place[ends]
    tables = _reordered(tables, order, ends)
    run = _find_run(tables, ends)
    folded = None if run is None else _fold_run(tables, ends, run, kernel, threads)
    if folded is None:
        return None
    return replace(folded, nodes=order[folded.nodes], expand=lambda choice: folded.expand(choice)[place])


def _by_first_use(n: int, ends: np.ndarray) -> np.ndarray:
    """An order of the nodes, int64 [n]: a node without incoming edges (a parameter) precedes its first reader.

    Traced programs list all parameters first, so without this no block would contain its own parameters.
    """
    key = np.arange(n, dtype=np.float64)
    source = np.ones(n, bool)
    source[ends[:, 1]] = False
    first = np.full(n, n)
    np.minimum.at(first, ends[:, 0], ends[:, 1])
    moved = source & (first < n)
    key[moved] = first[moved] - 0.5
    return np.argsort(key, kind="stable")


def _reordered(tables: CostTables, order: np.ndarray, ends: np.ndarray) -> CostTables:
    """The tables with their nodes in this order. ends: the new ends of their edges."""
    edges = tuple(e.between(a, b) for e, (a, b) in zip(tables.edges, ends.tolist(), strict=True))
    names = None if tables.names is None else tuple(tables.names[v] for v in order)
    return CostTables(node_costs=tuple(tables.node_costs[v] for v in order), edges=edges, names=names)


def _find_run(tables: CostTables, ends: np.ndarray) -> _RepeatedBlocks | None:
    """The longest run of equal blocks; None if there is none."""
    n = len(tables.node_costs)
    if n < 2 * _FEWEST_BLOCKS or not len(ends):
        return None
    number: dict[object, int] = {}
    node_key = np.array([number.setdefault(id(c), len(number)) for c in tables.node_costs], np.uint64)
    edge_key = np.array(
        [
            number.setdefault((id(e.cost), id(e.src_class), id(e.dst_class)), len(number))
            for e in tables.edges
        ],
        np.uint64,
    )
    # A node's mark combines its costs and the marks of its edges (which table, which side, how far away).
    mark = _mix(node_key)
    # Negative distances wrap around; equal distances stay equal.
    far = (ends[:, 1] - ends[:, 0]).astype(np.uint64)
    for side in (0, 1):
        np.add.at(mark, ends[:, side], _mix(_mix(edge_key * np.uint64(2) + np.uint64(side)) ^ far))
    last: dict[int, int] = {}
    gaps: Counter[int] = Counter()
    for v, m in enumerate(mark.tolist()):
        if m in last:
            gaps[v - last[m]] += 1
        last[m] = v
    best: _RepeatedBlocks | None = None
    for period, _ in gaps.most_common(6):
        same = np.concatenate([[False], mark[period:] == mark[:-period], [False]])
        flips = np.flatnonzero(same[1:] != same[:-1])
        starts, lengths = flips[0::2], flips[1::2] - flips[0::2]
        if not lengths.size or lengths.max() < (_FEWEST_BLOCKS - 1) * period:
            continue
        i = int(lengths.argmax())
        run = _cut(ends, int(starts[i]), period, int(lengths[i]) + period)
        if run is not None and (best is None or run.count * run.period > best.count * best.period):
            best = run
    return best


def _mix(x: np.ndarray) -> np.ndarray:
    """A hash of uint64 (splitmix64's finaliser)."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _cut(ends: np.ndarray, start: int, period: int, length: int) -> _RepeatedBlocks | None:
    """Cut the run into blocks so that only one node of a block has edges to the next block. None if impossible."""
    # The edges at a block well inside the run represent those of all blocks.
    middle = start + period * (length // period // 2)
    here = ends[((ends >= middle) & (ends < middle + period)).any(axis=1)]
    low, high = here.min(axis=1), here.max(axis=1)
    for shift in range(period):
        block_low, block_high = ((x - start - shift) // period for x in (low, high))
        crossing = block_low != block_high
        if (block_high - block_low > 1).any():
            continue
        speakers = np.unique((low[crossing] - start - shift) % period)
        count = (length - shift) // period
        if speakers.size == 1 and count >= _FEWEST_BLOCKS:
            return _RepeatedBlocks(start=start + shift, period=period, count=count, speaker=int(speakers[0]))
    return None


@dataclass(eq=False)
class _FoldedBlock:
    """One block, eliminated down to two speakers. Node 0 is the predecessor's speaker, and node 1 + j is the block's
    node j. table: float64 [classes of the predecessor's speaker, configs of the block's speaker]."""

    plan: EliminationPlan
    pool: Pool
    view: ConfigPartition
    table: np.ndarray
    size: int
    speaker: int

    def inside(self, before: int, own: int) -> np.ndarray:
        """The choice inside the block, int64 [period], given the configs of both speakers."""
        given = np.zeros(self.size, np.int64)
        given[0], given[self.speaker] = before, own
        return back_substitute(self.plan, self.pool, self.size, given)[1:]


def _block(
    tables: CostTables, ends: np.ndarray, run: _RepeatedBlocks, kernel: KernelName, threads: int
) -> _FoldedBlock | None:
    """Eliminate one block down to its two speakers. None if this takes too much work."""
    first = run.start + run.period  # block 1 represents all blocks that have a predecessor
    before = run.start + run.speaker
    inside = (ends >= first) & (ends < first + run.period)
    wanted = inside.all(axis=1) | (inside.any(axis=1) & (ends == before).any(axis=1))
    number = {before: 0} | {first + j: 1 + j for j in range(run.period)}
    edges = tuple(
        e.between(number[e.src], number[e.dst]) for e in (tables.edges[i] for i in np.flatnonzero(wanted))
    )
    free = np.zeros(tables.node_costs[before].size)
    costs = (free, *(tables.node_costs[first + j] for j in range(run.period)))
    block = CostTables(node_costs=costs, edges=edges)
    pool = Pool()
    speaker = 1 + run.speaker
    factors = load(block, pool, kernels_for(kernel, block.entries * 20))
    plan = plan_elimination(len(costs), factors, pool, keep=(0, speaker), stop_above=_MOST_WORK)
    if not plan.complete:
        return None
    # The cost of parts of the block that are not connected to a speaker.
    constant = run_plan(plan, pool, kernels_for(kernel, plan.work), threads)
    own = costs[speaker].size
    view = pool.view(np.zeros(free.size, np.int32))
    left = [f for f in plan.left if f.scope != (0,) or pool.arrays[f.sig].any()]
    for f in left:
        if 0 in f.scope:
            view = pool.joint(view, f.views[f.scope.index(0)])
    table = np.full((view.n, own), constant)
    for f in left:
        part = pool.arrays[f.sig]
        if f.scope == (speaker,):
            table = table + part[f.views[0].cls][None, :]
        elif f.scope == (0,):
            table = table + part[pool.sub(f.views[0], view)][:, None]
        else:
            part = part if f.scope[0] == 0 else part.T
            back, front = f.views if f.scope[0] == 0 else f.views[::-1]
            table = table + part[np.ix_(pool.sub(back, view), front.cls)]
    return _FoldedBlock(plan, pool, view, table, len(costs), speaker)


@dataclass(eq=False)
class _Powers:
    """Least costs of several blocks in a row, computed by halves. kernels: from ``kernels_for``."""

    block: _FoldedBlock
    kernels: ModuleType
    tables: dict[int, np.ndarray]

    def least(self, k: int) -> np.ndarray:
        """Least costs from each class of the first speaker to each config of the kth speaker after it."""
        if k not in self.tables:
            a, b = self.least(k // 2), self.least(k - k // 2)
            classes, own = self.block.table.shape
            # The second half sees the middle speaker through its classes.
            rows = [(np.arange(own, dtype=np.int32), np.ascontiguousarray(a.T))]
            middle = self.kernels.segment_min(np.zeros(own), self.block.view.cls, classes, rows)
            self.tables[k] = self.kernels.min_plus(middle[:, None, :], np.ascontiguousarray(b[:, None, :]))[0]
        return self.tables[k]

    def speakers(self, k: int, start: int, end: int) -> np.ndarray:
        """The configs of speakers 1 … k, from class ``start`` of the first speaker to config ``end`` of the kth."""
        seen: dict[tuple[int, int, int], np.ndarray] = {}
        cls = self.block.view.cls

        def between(k: int, start: int, end: int) -> np.ndarray:
            if k == 1:
                return np.array([end], np.int64)
            if (k, start, end) not in seen:
                half = k // 2
                total = self.least(half)[start] + self.least(k - half)[cls, end]
                middle = int(total.argmin())
                right = between(k - half, int(cls[middle]), end)
                seen[k, start, end] = np.concatenate([between(half, start, middle), right])
            return seen[k, start, end]

        return between(k, start, end)


def _fold_run(
    tables: CostTables, ends: np.ndarray, run: _RepeatedBlocks, kernel: KernelName, threads: int
) -> Folded | None:
    """Replace a run of blocks by one edge. None if this takes too much work."""
    block = _block(tables, ends, run, kernel, threads)
    if block is None:
        return None
    steps = run.count - 1
    classes, own = block.table.shape
    powers_work = classes * classes * own * 2 * steps.bit_length()
    work = block.plan.work + powers_work
    if work > _MOST_WORK:
        return None
    powers = _Powers(block, kernels_for(kernel, powers_work), {1: block.table})
    head, tail = run.start + run.speaker, run.start + steps * run.period + run.speaker
    first, last = run.start + run.period, run.start + run.count * run.period
    gone = np.zeros(len(tables.node_costs), bool)
    gone[first:last] = True
    gone[tail] = False
    nodes = np.flatnonzero(~gone)
    number = np.cumsum(~gone) - 1
    inner = ((ends >= first) & (ends < last)).all(axis=1) | gone[ends].any(axis=1)
    kept = (tables.edges[i] for i in np.flatnonzero(~inner))
    edges = [e.between(int(number[e.src]), int(number[e.dst])) for e in kept]
    edges.append(
        EdgeTable(
            src=int(number[head]),
            dst=int(number[tail]),
            cost=powers.least(steps),
            src_class=block.view.cls,
            dst_class=np.arange(own, dtype=np.int32),
        )
    )
    costs = [tables.node_costs[v] for v in nodes]
    costs[number[tail]] = np.zeros(own)  # already included in the power
    names = tuple(tables.names[v] for v in nodes) if tables.names else None
    smaller = CostTables(node_costs=tuple(costs), edges=tuple(edges), names=names)

    def expand(choice: np.ndarray) -> np.ndarray:
        out = np.zeros(len(tables.node_costs), np.int64)
        out[nodes] = choice
        speakers = powers.speakers(steps, int(block.view.cls[out[head]]), int(out[tail]))
        before = np.concatenate([[out[head]], speakers[:-1]])
        pairs, which = np.unique(np.stack([before, speakers], axis=1), axis=0, return_inverse=True)
        inside = np.stack([block.inside(int(a), int(b)) for a, b in pairs])
        out[first:last] = inside[which.reshape(-1)].reshape(-1)
        return out

    return Folded(tables=smaller, nodes=nodes, work=work, expand=expand)
