"""Finds an early choice without forbidden pairs. The node with the fewest configs left takes its cheapest config next.

If a node is left without a config, it comes first in the next attempt, together with those that failed before (Brélaz,
CACM 1979; the weights of Boussemart et al., ECAI 2004). This proves nothing, not even that such a choice exists.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from pase.clock import never

__all__ = ["greedy_choice"]

_ATTEMPTS = 30
_SHORT = 10_000_000  # configs' costs that are added, about 0.5 s


def greedy_choice(
    costs: Sequence[np.ndarray],
    pairs: Sequence[tuple[int, int]],
    matrices: Sequence[np.ndarray],
    stop: Callable[[], bool] = never,
) -> np.ndarray | None:
    """A choice, int64 [n]; None if no attempt finds one.

    costs: per node, float64 [K]. matrices: per pair, float64 [K, K]; inf forbids a pair of configs. stop: called
    between attempts once they have taken a while.

    >>> different = np.array([[np.inf, 0.0], [0.0, np.inf]])
    >>> greedy_choice([np.array([0.0, 1.0]), np.array([0.0, 1.0])], [(0, 1)], [different])
    array([0, 1])
    """
    near: list[list[tuple[int, np.ndarray]]] = [[] for _ in costs]
    for (a, b), matrix in zip(pairs, matrices, strict=True):
        near[a].append((b, matrix))
        near[b].append((a, matrix.T))
    failed = np.zeros(len(costs), np.int64)
    entries = sum(sum(m.shape) for m in matrices)
    for attempt in range(_ATTEMPTS):
        if attempt * entries > _SHORT and stop():
            break
        choice, stuck = _attempt(costs, near, failed)
        if stuck is None:
            return choice
        failed[stuck] += 1
    return None


def _attempt(
    costs: Sequence[np.ndarray], near: Sequence[Sequence[tuple[int, np.ndarray]]], failed: np.ndarray
) -> tuple[np.ndarray, int | None]:
    """(The choice, the node that was left without a config; None if the choice is complete)."""
    total = list(costs)
    choice = np.full(len(costs), -1, np.int64)
    heap = [_rank(v, c, failed) for v, c in enumerate(total)]
    heapq.heapify(heap)
    while heap:
        rank = heapq.heappop(heap)
        v = rank[-1]
        if choice[v] >= 0 or rank != _rank(v, total[v], failed):
            continue
        choice[v] = k = int(total[v].argmin())
        if not np.isfinite(total[v][k]):
            return choice, v
        for u, matrix in near[v]:
            if choice[u] < 0:
                total[u] = total[u] + matrix[k]
                if not np.isfinite(total[u].min()):
                    return choice, u
                heapq.heappush(heap, _rank(u, total[u], failed))
    return choice, None


def _rank(v: int, costs: np.ndarray, failed: np.ndarray) -> tuple[float, int, int]:
    """Sort key: nodes with few configs and many failures first."""
    left = int(np.isfinite(costs).sum())
    return left / (1.0 + float(failed[v])), -int(failed[v]), v
