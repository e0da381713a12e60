"""Branch and bound that closes the gap between a Lagrangian bound and the best choice: one node's configs are split,
and each part gets its own prices.

Limits and excesses apply to sums over nodes and pairs, such as bytes. With prices on these sums, one elimination gives
the Lagrangian bound of every choice (``priced``). At the best prices, several choices cost the same, some within a
limit and some beyond it, and the bound is the cost of their weighted mean, which is no single choice. So the search
branches on the node about which these choices disagree most. Its configs are grouped by the choice whose config they
resemble, and the bound of each group is higher. Before that, configs whose min-marginal (``marginals``) reaches the
best known cost are dropped.

Held & Karp, Mathematical Programming 1971, with the bounds of Geoffrion, Mathematical Programming Study 1974.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pase.errors import Infeasible
from pase.search.elimination.exact import KernelName
from pase.search.elimination.factors import Pool
from pase.search.elimination.marginals import min_marginals
from pase.search.elimination.priced import HeldAlong, PricedTables, prepare
from pase.tables.types import CostTables

__all__ = ["Branches", "SummedTables"]

_EXACT = 1e-9  # choices whose costs differ by less than this fraction count as equally good
_MOST_CUTS = 12  # the most prices tried for one part; each adds a cutting plane
_ENOUGH = 0.02  # fraction of the gap; prices that promise less are not tried
_LOOK, _CLOSED = 16, 0.9  # after this many parts, at most this fraction of the gap may be left
_ROUNDED = 1e-12  # relative allowance for rounding


@dataclass(frozen=True, kw_only=True, eq=False)
class SummedTables:
    """Tables, and sums over a choice.

        cost = tables + sum over s of (max(sum_s, 0) if s is an excess, inf if sum_s > room_s)

    held: per node, float64 [K, sums], what each config adds to each sum. along: what pairs of nodes add. room: float64
    [sums], the limit of each sum; inf for an excess, which is no limit but a cost: the part of the sum above zero.
    weights: float64 [sums], the fraction of each sum that the tables' costs already include.
    """

    tables: CostTables
    held: tuple[np.ndarray, ...]
    along: tuple[HeldAlong, ...]
    room: np.ndarray
    weights: np.ndarray

    @cached_property
    def paid(self) -> np.ndarray:
        """bool [sums]: which sums are an excess."""
        return np.isinf(self.room)

    @cached_property
    def limits(self) -> np.ndarray:
        """The limit of each sum; 0 for an excess, which is charged above zero."""
        return np.where(self.paid, 0.0, self.room)

    def sums(self, choice: np.ndarray) -> np.ndarray:
        """The sums of a choice, float64 [sums]."""
        out = np.sum([h[k] for h, k in zip(self.held, choice, strict=True)], axis=0)
        for e in self.along:
            out = out + e.held[e.src_class[choice[e.src]], e.dst_class[choice[e.dst]]]
        return np.asarray(out)

    def least(self, among: Sequence[np.ndarray]) -> np.ndarray:
        """A lower bound on the sums from the nodes alone, float64 [sums]. among: per node, the remaining configs."""
        return np.asarray(np.sum([h[k].min(axis=0) for h, k in zip(self.held, among, strict=True)], axis=0))

    def prepared(
        self, among: Sequence[np.ndarray], kernel: KernelName, seed: int, order: tuple[int, ...] | None
    ) -> PricedTables | None:
        """The tables restricted to these configs, ready to be eliminated at prices. None if no order fits."""
        keep = dict(enumerate(among))
        along = [
            HeldAlong(
                src=e.src,
                dst=e.dst,
                src_class=e.src_class[among[e.src]],
                dst_class=e.dst_class[among[e.dst]],
                held=e.held,
            )
            for e in self.along
        ]
        held = [h[k] for h, k in zip(self.held, among, strict=True)]
        return prepare(self.tables.restricted(keep), held, kernel, 1, seed, along, order)


@dataclass(frozen=True, kw_only=True, eq=False)
class _ChoicePlane:
    """A choice, int64 [nodes], as a plane over prices: its cost is height + prices · slopes.

    slopes: its sums minus their limits. The Lagrangian bound at some prices is the lowest plane there.
    """

    choice: np.ndarray
    height: float
    slopes: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class _Parted:
    """A part of the search: some configs of each node.

    among: per node, the remaining configs. bound: no choice in the part costs less. prices: float64 [sums], those of
    the highest bound. planes: the choices found. shares: float64 [planes], the weight of each choice in the mean that
    the bound represents; above 0 for the choices whose planes meet at these prices.
    """

    among: list[np.ndarray]
    bound: float
    prices: np.ndarray
    planes: list[_ChoicePlane]
    shares: np.ndarray


@dataclass(kw_only=True, eq=False)
class Branches:
    """The branch and bound search.

    offer: called with each choice found. top: returns the cost of the cheapest known choice; costlier choices are not
    searched. work: the effort of the eliminations so far (``PricedTables.effort``).
    """

    problem: SummedTables
    kernel: KernelName
    seed: int
    offer: Callable[[np.ndarray], object]
    top: Callable[[], float]
    stop: Callable[[], bool]
    work: int = 0
    parts: int = 0
    _order: tuple[int, ...] | None = field(default=None, repr=False)

    def run(self, prices: np.ndarray, most: int) -> float | None:
        """A bound on every choice; at least ``top()`` once nothing cheaper is left. None if no order fits.

        prices: float64 [sums], the initial prices. most: the most parts to split.
        """
        whole = [np.flatnonzero(np.isfinite(c)) for c in self.problem.tables.node_costs]
        prepared = self.problem.prepared(whole, self.kernel, self.seed, None)
        if prepared is None:
            return None
        self._order = prepared.plan.order
        first = self._bounded(whole, prices, [], prepared)
        queue = [] if first is None else [(first.bound, 0, first)]
        number, gap = 1, np.inf
        while queue and self.parts < most and not self.stop():
            bound, _, part = queue[0]
            if bound >= self._enough:
                break
            if self.parts % _LOOK == 0:
                if (
                    self.top() - bound > _CLOSED * gap
                ):  # for example, many equal nodes that are split one by one
                    break
                gap = self.top() - bound
            heapq.heappop(queue)
            self.parts += 1
            for among in self._divided(part):
                child = self._bounded(among, part.prices, part.planes, None)
                if child is not None:
                    heapq.heappush(queue, (max(child.bound, bound), number, child))
                    number += 1
        return min(self.top(), queue[0][0]) if queue else self.top()

    @property
    def _enough(self) -> float:
        """A part whose bound reaches this has no choice that is cheaper than the best known one."""
        top = self.top()
        return top - _EXACT * abs(top) if np.isfinite(top) else top

    def _bounded(
        self,
        among: list[np.ndarray],
        prices: np.ndarray,
        planes: Sequence[_ChoicePlane],
        prepared: PricedTables | None,
    ) -> _Parted | None:
        """The part at its best prices, without configs that no cheaper choice uses. None if there is no cheaper choice.

        planes: known choices, some of which may be in the part.
        """
        p = self.problem
        if (
            any(not k.size for k in among)
            or (p.least(among) > p.limits * (1 + _ROUNDED) + 1e-9)[~p.paid].any()
        ):
            return None
        prepared = prepared or p.prepared(among, self.kernel, self.seed, self._order)
        assert prepared is not None  # an order that fits the whole problem fits each part
        planes = [p for p in planes if all(c in k for c, k in zip(p.choice, among, strict=True))]
        best, at, pool = -np.inf, prices, Pool()
        shares = np.ones(1)
        for _ in range(_MOST_CUTS):
            try:
                local, least, tables = prepared.at(prices - p.weights)
            except Infeasible:
                return None
            self.work += prepared.effort
            choice = np.array([k[i] for k, i in zip(among, local, strict=True)])
            self.offer(choice)
            bound = least - float(prices @ p.limits)
            bound -= _ROUNDED * abs(bound)
            slopes = p.sums(choice) - p.limits
            planes.append(_ChoicePlane(choice=choice, height=bound - float(prices @ slopes), slopes=slopes))
            if bound > best:
                best, at, pool = bound, prices, tables
            if best >= self._enough:
                return None
            height, prices, shares = _highest(planes, at, p.paid)
            known = np.isfinite(self.top())
            if height <= best + (_ENOUGH * (self.top() - best) if known else _EXACT * abs(best)):
                break
        allowed = self._enough - best
        slack = [m - m.min() for m in min_marginals(prepared.plan, pool)]
        left = [k[s < allowed] for k, s in zip(among, slack, strict=True)]
        if any(not k.size for k in left):
            return None
        if all(k.size == 1 for k in left):
            self.offer(np.array([k[0] for k in left]))
            return None
        return _Parted(among=left, bound=best, prices=at, planes=planes, shares=shares)

    def _divided(self, part: _Parted) -> list[list[np.ndarray]]:
        """Splits the configs of one node into two or more groups."""
        meet = [(p.choice, s) for p, s in zip(part.planes, part.shares, strict=True) if s > 1e-6]
        v = self._disputed(part, meet)
        here = part.among[v]
        held = self._held(part, v, here)
        centres = np.unique([c[v] for c, _ in meet if c[v] in here])
        groups = np.zeros(here.size, np.int64)
        if centres.size:
            away = [np.square(held - held[here == k]).sum(axis=1) for k in centres]
            groups = np.argmin(away, axis=0)
        if np.unique(groups).size < 2:  # the configs are indistinguishable: split off one of them
            groups = np.where(here == (centres[0] if centres.size else here[0]), 0, 1)
        parts = []
        for g in np.unique(groups):
            among = list(part.among)
            among[v] = here[groups == g]
            parts.append(among)
        return parts

    def _disputed(self, part: _Parted, meet: Sequence[tuple[np.ndarray, float]]) -> int:
        """The node whose configs, in the choices that meet, differ most in what they hold at these prices. If there is
        none, the node with the most configs."""
        spread = np.zeros(len(part.among))
        shares = np.array([s for _, s in meet])
        for v, left in enumerate(part.among):
            mine = np.array([c[v] for c, _ in meet])
            if left.size < 2 or np.unique(mine).size < 2:
                continue
            held = [self.problem.held[v][mine]]
            for e in self.problem.along:
                if v in (e.src, e.dst):
                    others = np.array([c[e.dst if v == e.src else e.src] for c, _ in meet])
                    held.append(e.between(v, mine, others))
            for h in held:
                charged = h * part.prices
                mean = shares @ charged / shares.sum()
                spread[v] += float(shares @ np.square(charged - mean).sum(axis=1))
        if spread.any():
            return int(spread.argmax())
        return int(np.argmax([k.size for k in part.among]))

    def _held(self, part: _Parted, v: int, here: np.ndarray) -> np.ndarray:
        """What each config of a node holds at the prices, alone and averaged over each neighbour's configs."""
        held = [self.problem.held[v][here]]
        for e in self.problem.along:
            if v in (e.src, e.dst):
                u = e.dst if v == e.src else e.src
                pairs = e.between(v, here[:, None], part.among[u][None, :])
                held.append(pairs.mean(axis=1))
        return np.concatenate([h * part.prices for h in held], axis=1)


def _highest(
    planes: Sequence[_ChoicePlane], at: np.ndarray, paid: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """(Height, prices, shares) of the highest point below all planes, by a linear program.

    The price of an excess is in [0, 1]. Other prices are at most 4 times their best value ``at`` so far or, if that is
    more, 4 times the price at which the sums matter as much as the heights.
    shares: the weight of each plane in the mean, float64 [planes].
    """
    from scipy.optimize import linprog

    heights, slopes = np.array([p.height for p in planes]), np.array([p.slopes for p in planes])
    scale = max(float(np.abs(heights).max()), 1e-300)
    widest = np.maximum(np.abs(slopes).max(axis=0), 1e-300)
    unit = np.where(paid, 1.0, np.maximum(at, scale / widest))  # the unit of each price
    rows = np.hstack([np.ones((len(planes), 1)), -slopes * unit / scale])
    variable_bounds = [(None, None), *((0.0, 1.0 if is_excess else 4.0) for is_excess in paid)]
    objective = np.zeros(1 + paid.size)
    objective[0] = -1.0
    answer = linprog(objective, A_ub=rows, b_ub=heights / scale, bounds=variable_bounds)
    if answer.x is None or answer.status != 0:
        return -np.inf, at, np.ones(len(planes))
    prices = np.clip(answer.x[1:], 0.0, np.where(paid, 1.0, np.inf)) * unit
    return float(answer.x[0]) * scale, prices, -np.asarray(answer.ineqlin.marginals)
