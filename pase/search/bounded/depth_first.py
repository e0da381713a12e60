"""Depth-first branch and bound, for small remaining problems for which no elimination order is affordable.

Each step decides or excludes a config of a node. Tree-reweighted messages over the remaining configs bound each state,
and configs that they prove to be in no cheaper choice are pruned. If all costs are integers, the bound is rounded up.
The node of the last failure is decided first, then a node with few configs and many failures (Boussemart et al., ECAI
2004; Lecoutre et al., AIJ 2009). The search can be stopped at any time and resumed.
"""

from __future__ import annotations

import numpy as np

from pase.search.bounded.residual import Residual

__all__ = ["DepthFirst", "depth_first_fits"]

_MOST_SAVED = 10_000_000  # messages that are saved for the decisions of a branch, 8 bytes each
_WORK = 5e7  # a float, as compiled ahead: pairs of configs read per call, about 0.2 s
_ROUNDING = 1e-3  # the rounding error allowed in a bound on integers
_WHOLE_BELOW = 1e9  # the largest costs for which a bound is that exact


def depth_first_fits(now: Residual) -> bool:
    """Whether the problem is small enough and has no memory limit."""
    return not now.rows.points and (now.flat.n + 1) * now.flat.messages <= _MOST_SAVED


class DepthFirst:
    """A search for a choice that is cheaper than the best known one. whole: whether all costs are integers."""

    def __init__(self, now: Residual, whole: bool) -> None:
        from pase.search.bounded.kernels_depth import new_tree

        self.of = now
        self.tree = new_tree(now.flat.slot, now.message)
        finite = np.isfinite(now.flat.entries)
        dearest = max(np.abs(a).max(initial=0.0) for a in (now.flat.cost, now.flat.entries[finite]))
        self.whole = whole and dearest < _WHOLE_BELOW

    def run(self, cost: float, work: float = _WORK) -> tuple[np.ndarray | None, float, bool]:
        """(A choice cheaper than ``cost`` if one was found, a bound, whether it is proven that none is cheaper still).

        cost: of the best known choice, over all nodes; inf if there is none.
        """
        from pase.search.bounded.kernels_depth import BOUND, TOP, descend

        now, flat = self.tree.now, self.of.flat
        top = min(cost - self.of.left.constant, float(now[TOP]))
        least = 1e-9 * abs(cost) if np.isfinite(cost) else 0.0
        if self.whole and abs(cost) < _WHOLE_BELOW:
            least = 1.0 - _ROUNDING
        ended = bool(descend(flat.graph, flat.cost, self.tree, top, least, work))
        found = self.of.left.expand(self.tree.best) if now[TOP] < top else None
        return found, float(now[BOUND]) + self.of.left.constant, ended
