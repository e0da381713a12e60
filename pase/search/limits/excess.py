"""Sums whose excess over zero is charged. The larger of two numbers is one number plus the excess of the other over it.

    cost = base + sum over s of max(sum_s, 0)
         = maximum over weights in [0, 1] of base + sum over s of weight_s * sum_s

Tables at some weights hold base + weights * sums, and bound this cost from below. An excess is like a limit that may be
exceeded at a price of one per unit. Its weight is its multiplier, like the price of a byte under a memory limit.
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
    """The sums, and the weights with which the cost tables include them.

    weights: float64 [sums], in [0, 1]. held: per node, float64 [K, sums]. along: what pairs of nodes add.
    """

    weights: np.ndarray
    held: tuple[np.ndarray, ...]
    along: tuple[HeldAlong, ...]

    def cost(self, mean: float, choice: np.ndarray) -> float:
        """The cost of a choice, int64 [nodes]. mean: its cost in the tables."""
        sums = np.sum([h[k] for h, k in zip(self.held, choice, strict=True)], axis=0)
        for e in self.along:
            sums = sums + e.held[e.src_class[choice[e.src]], e.dst_class[choice[e.dst]]]
        return mean + float(np.maximum(sums, 0.0).sum() - self.weights @ sums)

    @property
    def most(self) -> float:
        """An upper bound on how much more any choice costs than in the tables."""
        arrays = [*self.held, *(e.held for e in self.along)]
        distinct = {id(a): float(np.abs(a).sum(axis=-1).max(initial=0.0)) for a in arrays}
        return sum(distinct[id(a)] for a in arrays)

    def joined(self, held: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """For each node, its limited sums followed by these sums: float64 [K, both]. Equal arrays stay one array."""
        made: dict[tuple[int, int], np.ndarray] = {}
        out = []
        for limited, mine in zip(held, self.held, strict=True):
            key = (id(limited), id(mine))
            if key not in made:
                made[key] = np.concatenate([limited, mine], axis=1)
            out.append(made[key])
        return tuple(out)

    def along_joined(self, limited: int) -> tuple[HeldAlong, ...]:
        """``along`` for sums of which the first ``limited`` are limited; pairs add nothing to those."""
        made: dict[int, np.ndarray] = {}
        for e in self.along:
            if id(e.held) not in made:
                nothing = np.zeros((*e.held.shape[:2], limited))
                made[id(e.held)] = np.concatenate([nothing, e.held], axis=2)
        return tuple(replace(e, held=made[id(e.held)]) for e in self.along)

    def costs(self, labels: Labels) -> np.ndarray:
        """The cost of each listed choice, float64 [choices]. The excess sums are the last ones of the labels' sums."""
        mine = labels.used[:, labels.used.shape[1] - self.weights.size :]
        out: np.ndarray = labels.cost + np.maximum(mine, 0.0).sum(axis=1)
        return out
