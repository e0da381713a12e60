"""One memory sum and its limit: the best price per byte, by elimination.

The Lagrangian dual of one limit is a line search: each price's cheapest choice is a point (bytes, cost), and the lower
hull of all points is walked from a choice that does not fit and one that does to the edge between them that crosses the
limit. Its height there bounds every choice that fits from below; its lower end fits. Elimination makes each step exact.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pase.search.check import cost_of
from pase.search.clock import Clock
from pase.search.rows import memory_rows
from pase.search.types import MemoryProfile
from pase.tables.types import CostTables

__all__ = ["hull"]

_STEPS = 20


def hull(
    tables: CostTables,
    memory: MemoryProfile,
    over: np.ndarray,
    best: Callable[[CostTables], tuple[np.ndarray, float]],
    clock: Clock,
) -> tuple[np.ndarray, float] | None:
    """(a choice that fits, int64 [nodes]; a lower bound on the cost of all that do).

    over: the cheapest choice of all, which does not fit. best: tables -> (cheapest choice, lower bound on its cost).
    None where more than one point of the profile can bind, or no choice that fits is met.
    """
    sizes = [c.size for c in tables.node_costs]
    rows = memory_rows(memory, sizes, [[(v, np.arange(k))] for v, k in enumerate(sizes)], [])
    if rows.points != 1:
        return None
    room = float(rows.capacity[0])
    held = np.split(rows.dense(np.zeros(1, np.int64))[:, 0], rows.slot[1:-1])
    priced: dict[tuple[int, bytes, float], np.ndarray] = {}

    def bytes_of(choice: np.ndarray) -> float:
        return float(sum(h[k] for h, k in zip(held, choice, strict=True)))

    def at(price: float) -> tuple[np.ndarray, float]:
        costs = []
        for c, h in zip(tables.node_costs, held, strict=True):
            key = (id(c), h.tobytes(), price)
            if key not in priced:
                priced[key] = c + price * h
            costs.append(priced[key])
        return best(CostTables(node_costs=tuple(costs), edges=tables.edges, names=tables.names))

    high = (bytes_of(over), cost_of(tables, over))
    if high[0] <= room:
        return None
    price = max(abs(high[1]), 1.0) / (high[0] - room) / 16
    bound = -np.inf
    choice: np.ndarray | None = None
    low = (0.0, np.inf)
    for _ in range(_STEPS):
        if not clock.allows("price"):
            break
        found, least = clock.run("price", at, price)
        bound = max(bound, least - price * room)
        point = (bytes_of(found), cost_of(tables, found))
        fits = point[0] <= room
        if choice is not None and point in (low, high):
            break
        if fits:
            if point[1] < low[1]:
                choice, low = found, point
        else:
            high = point
        if choice is None:
            price *= 8.0
        elif low[0] < high[0]:
            price = (low[1] - high[1]) / (high[0] - low[0])
    if choice is None or not memory_fits(memory, choice):
        return None
    # Sums of costs times prices are rounded.
    return choice, bound - 1e-12 * abs(bound)


def memory_fits(memory: MemoryProfile, choice: np.ndarray) -> bool:
    return not (memory.usage(choice) > memory.limit_bytes).any()
