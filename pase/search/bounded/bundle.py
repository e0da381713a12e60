"""A cutting-plane step on the prices per byte, which converges fast if few points bind, as is usual.

Every choice x gives a plane above the Lagrangian dual: cost(x) + price · (bytes(x) - limit). The next prices to try are
those at which the lowest known plane is highest, within a trust region around the best prices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

__all__ = ["Bundle", "next_prices"]

_MOST_PLANES = 80


@dataclass(eq=False)
class Bundle:
    """Planes over the prices of all points. Each has a value at price zero and a slope, float64 [points].

    reach: the radius of the trust region, which is how far a price may change in one step; 0 before the first step.
    """

    values: list[float] = field(default_factory=list)
    slopes: list[np.ndarray] = field(default_factory=list)
    reach: float = 0.0

    def add(self, value: float, slope: np.ndarray) -> None:
        """Add a plane. If there are too many, the oldest one is dropped."""
        self.values.append(value)
        self.slopes.append(slope)
        if len(self.values) > _MOST_PLANES:
            del self.values[0], self.slopes[0]


def next_prices(bundle: Bundle, best: np.ndarray, active: np.ndarray) -> tuple[np.ndarray, float] | None:
    """(Prices float64 [points], the bound that the planes promise there). None if the linear program fails.

    best: the best prices so far. active: the points that may have a price.
    """
    from scipy.optimize import linprog

    values = np.array(bundle.values)
    slopes = np.array([s[active] for s in bundle.slopes])
    scale = max(1e-300, float(np.abs(values).max()))
    # The unknowns are the promised bound over scale, and each price over reach.
    planes = np.hstack([np.ones((values.size, 1)), -slopes * (bundle.reach / scale)])
    centre = best[active] / bundle.reach
    box = [(None, None), *((max(0.0, c - 1.0), c + 1.0) for c in centre)]
    objective = np.zeros(active.size + 1)
    objective[0] = -1.0
    answer = linprog(objective, A_ub=planes, b_ub=values / scale, bounds=box)
    if answer.status != 0 or answer.x is None:
        return None
    price = np.zeros(best.size)
    price[active] = np.maximum(0.0, answer.x[1:] * bundle.reach)
    return price, float(answer.x[0]) * scale
