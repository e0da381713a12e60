"""Finds the best price per byte for limits on sums of bytes, by elimination.

The Lagrangian dual of a single limit is a line search. The cheapest choice at each price is a point (bytes, cost). The
search starts from one choice that does not fit and one that fits, and follows the lower envelope of all points to the
edge that crosses the limit. The edge's height at the limit is a lower bound on every choice that fits, and its lower
end fits. Elimination makes each step exact. With several limits, the search first follows one ray of prices. Cutting
planes then change each price separately.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pase.search.bounded.bundle import Bundle, next_prices

__all__ = ["Dual", "best_prices"]

_STEPS = 24
_CUTS = 16

LagrangianPoint = tuple[np.ndarray, float]


@dataclass(eq=False)
class Dual:
    """The best prices found, and what they prove.

    bound: no choice within the room costs less. choices: (choice int64 [nodes], cost) of every step, including those
    that fit.
    """

    prices: np.ndarray
    bound: float
    choices: list[LagrangianPoint] = field(default_factory=list)


def best_prices(
    at: Callable[[np.ndarray], tuple[np.ndarray, float, float]],
    used: Callable[[np.ndarray], np.ndarray],
    room: np.ndarray,
    over: LagrangianPoint,
    *,
    below: float = np.inf,
    start: np.ndarray | None = None,
    ceiling: float = np.inf,
    stop: Callable[[], bool] = lambda: False,
) -> Dual:
    """The best prices of the sums, and every choice found on the way.

    at: prices float64 [sums] -> (cheapest choice, its cost without prices, lower bound on its cost with prices).
    used: choice -> bytes in each sum, float64 [sums]. over: the cheapest choice of all, and its cost. below: the search
    ends once no cheaper choice can be within the room. ceiling: the same, for a cost that no choice can exceed. start:
    the initial prices. stop: called before each step except the first.
    """
    out = Dual(prices=np.zeros(room.size), bound=over[1] - 1e-12 * abs(over[1]))
    bundle = Bundle()

    def priced(prices: np.ndarray) -> tuple[np.ndarray, float]:
        choice, cost, least = at(prices)
        bytes_ = used(choice)
        bundle.add(cost, bytes_ - room)
        out.choices.append((choice, cost))
        bound = least - float(prices @ room)
        bound -= 1e-12 * abs(bound)  # products of costs and prices are rounded
        if bound > out.bound:
            out.bound, out.prices = bound, prices
        return bytes_, cost

    over_bytes = used(over[0])
    bundle.add(over[1], over_bytes - room)
    ray = np.maximum(over_bytes - room, 0.0) if start is None or not start.any() else start
    ray = ray / ray.max(initial=1e-300)
    if not ray.any():
        ray = np.ones(room.size)
    have = float(ray @ room)
    high = (float(ray @ over_bytes), over[1])
    low: tuple[float, float] | None = None
    scale = 1.0 if start is None or not start.any() else float(start.max())
    if start is None or not start.any():
        scale = max(abs(high[1]), 1.0) / max(high[0] - have, 1.0) / 16
    for _ in range(_STEPS):
        bytes_, cost = priced(scale * ray)
        if out.bound >= min(below, ceiling) or stop():
            return out
        point = (float(ray @ bytes_), cost)
        if low is not None and point in (low, high):
            break
        if point[0] <= have:
            if low is None or point[1] < low[1]:
                low = point
        else:
            high = point
        if low is None:
            scale *= 8.0
        elif low[0] < high[0] and low[1] > high[1]:
            scale = (low[1] - high[1]) / (high[0] - low[0])
        else:
            break
    for _ in range(_CUTS if room.size > 1 else 0):
        bundle.reach = max(4.0 * float(out.prices.max()), 1e-300)
        got = next_prices(bundle, out.prices, np.arange(room.size))
        if got is None or got[1] <= out.bound + 1e-6 * abs(out.bound):
            break
        priced(got[0])
        if out.bound >= min(below, ceiling) or stop():
            return out
    return out
