"""Depth-first branch and bound where no order is affordable but what is left is small.

A node's config is decided or excluded; tree-reweighted messages over what is left bound each state, and configs of
which they prove that no cheaper choice has them go. Costs that are whole numbers round the bound up. The node of the
last failure is decided first, then one of few configs and many failures (Boussemart et al., ECAI 2004; Lecoutre et
al., AIJ 2009). It may stop at any time and goes on where it was.
"""

from __future__ import annotations

import numpy as np

from pase.search.bounded.residual import Residual

__all__ = ["DepthFirst", "depth_first_fits"]

_MOST_SAVED = 10_000_000  # messages that the decisions of a branch keep, 8 bytes each
_WORK = 50_000_000  # pairs of configs read at a time, some 0.2 s
_ROUNDING = 1e-3  # of a bound on whole numbers
_WHOLE_BELOW = 1e9  # costs up to which a bound is that exact


def depth_first_fits(now: Residual) -> bool:
    """Whether the problem is small enough, and without a limit."""
    return not now.rows.points and (now.flat.n + 1) * now.flat.messages <= _MOST_SAVED


class DepthFirst:
    """A search for what is cheaper than the best known. whole: all costs are whole numbers."""

    def __init__(self, now: Residual, whole: bool) -> None:
        from pase.search.bounded.kernels_depth import new_tree

        self.of = now
        self.tree = new_tree(now.flat.slot, now.message)
        finite = np.isfinite(now.flat.entries)
        dearest = max(np.abs(a).max(initial=0.0) for a in (now.flat.cost, now.flat.entries[finite]))
        self.whole = whole and dearest < _WHOLE_BELOW

    def run(self, cost: float, work: float = _WORK) -> tuple[np.ndarray | None, float, bool]:
        """(a choice cheaper than ``cost`` if one was found, a bound, whether none is cheaper than the best of both).

        cost: of the best choice known, over all nodes, or inf.
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
