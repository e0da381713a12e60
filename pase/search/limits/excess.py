"""Sums whose excess over zero costs as much: of the larger of two numbers, one plus the excess of the other.

    cost = base + sum over s of max(sum_s, 0)
         = maximum over weights in [0, 1] of base + sum over s of weight_s * sum_s

Tables at some weights, which hold base + weights * sums, bound this cost from below. An excess is a limit that may be
broken at a price of one for each unit, and its weight is its multiplier, like the price of a byte under a memory limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pase.search.elimination.priced import HeldAlong
from pase.search.limits.labels import Labels

__all__ = ["Excess"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Excess:
    """The sums, and the weights at which the tables to go with them hold them.

    weights: float64 [sums], in [0, 1]. held: per node float64 [K, sums]. along: what pairs of nodes add.
    """

    weights: np.ndarray
    held: tuple[np.ndarray, ...]
    along: tuple[HeldAlong, ...]

    def cost(self, mean: float, choice: np.ndarray) -> float:
        """The cost of a choice, int64 [nodes]. mean: what it costs in the tables."""
        sums = np.sum([h[k] for h, k in zip(self.held, choice, strict=True)], axis=0)
        for e in self.along:
            sums = sums + e.held[e.src_class[choice[e.src]], e.dst_class[choice[e.dst]]]
        return mean + float(np.maximum(sums, 0.0).sum() - self.weights @ sums)

    @property
    def most(self) -> float:
        """No choice costs more than this above what it costs in the tables."""
        arrays = [*self.held, *(e.held for e in self.along)]
        distinct = {id(a): float(np.abs(a).sum(axis=-1).max(initial=0.0)) for a in arrays}
        return sum(distinct[id(a)] for a in arrays)

    def joined(self, held: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """For each node the limited sums, and after them these: float64 [K, both]. What is equal stays one array."""
        made: dict[tuple[int, int], np.ndarray] = {}
        out = []
        for limited, mine in zip(held, self.held, strict=True):
            key = (id(limited), id(mine))
            if key not in made:
                made[key] = np.concatenate([limited, mine], axis=1)
            out.append(made[key])
        return tuple(out)

    def along_joined(self, limited: int) -> tuple[HeldAlong, ...]:
        """``along``, for sums of which the first, so many, are limited: pairs add nothing to those."""
        made: dict[int, np.ndarray] = {}
        for e in self.along:
            if id(e.held) not in made:
                nothing = np.zeros((*e.held.shape[:2], limited))
                made[id(e.held)] = np.concatenate([nothing, e.held], axis=2)
        return tuple(replace(e, held=made[id(e.held)]) for e in self.along)

    def costs(self, labels: Labels) -> np.ndarray:
        """The cost of each listed choice, float64 [choices]. These sums are the last ones of its sums."""
        mine = labels.used[:, labels.used.shape[1] - self.weights.size :]
        out: np.ndarray = labels.cost + np.maximum(mine, 0.0).sum(axis=1)
        return out
