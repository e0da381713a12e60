"""The exact cheapest choice under limits on a few sums of bytes, by labels that go back through an elimination.

An elimination at some price per byte gives the best config of each node for its neighbours' configs. It also gives the
*slack* of every other config, which is how much more it costs in the end. The priced cost of a choice is the minimum
plus its slacks. Nodes are chosen in reverse: the result of each elimination comes before the nodes that went into it. A
label is a partial choice. It is kept while its slack is below a cap and its bytes, plus the minimum of what follows,
fit. If two labels agree in everything that later nodes see, and one neither costs nor holds more than the other, then
it dominates the other, which is dropped. At the end, all choices within the cap remain, except dominated ones. This is
a resource-constrained shortest path with perfect completion bounds (Handler & Zang, Networks 1980; Dumitrescu & Boland,
Networks 2003).

A sum with unlimited room is an *excess* (``pase.search.limits.excess``): a choice pays max(sum, 0) for it. So a label
with a larger sum still dominates if its cost is lower by at least the difference. The final value of each sum lies
between known bounds. What a choice must pay for its excess, or for room that it leaves unused, beyond what the prices
charge, counts as slack as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pase.search.elimination.factors import ConfigPartition, Pool
from pase.search.elimination.plan import Elimination
from pase.search.elimination.priced import HeldAlong, PricedTables

__all__ = ["Labels", "label_choices"]

_CHUNK = 1 << 22
_COMPARED = 256  # the most labels of the same state with which a label is compared, if there are several sums
_WIDEST = 200_000  # the most labels at a time
# Once there were too many labels: the most at a time, and the most for all nodes together.
_BEAM, _BEAM_LABELS = 1000, 200_000
_NARROWEST = 100  # the least limit on labels at a time, for any number of nodes
_UNSORTED = 20
"""Once there were too many labels: of more than so many times the most at a time, those with the least slack are
compared."""
_PRECISION = 1e-13
"""Relative to the cost and to each sum: smaller differences, per node, are ignored, so that sums that were added in
different orders give one label."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Labels:
    """The choices within the cap, cheapest first.

    cost: without the prices of the sums, float64 [choices]. used: their sums, float64 [choices, sums]. whole:
    whether they are complete, so that no choice within the cap is missing. made: the number of labels that were made.
    """

    cost: np.ndarray
    used: np.ndarray
    whole: bool
    made: int
    _trail: tuple[tuple[int, np.ndarray, np.ndarray], ...]
    _last: np.ndarray

    def choice(self, i: int) -> np.ndarray:
        """The i-th choice, int64 [nodes]."""
        out = np.zeros(len(self._trail), np.int64)
        at = int(self._last[i])
        for v, parent, config in reversed(self._trail):
            out[v] = config[at]
            at = int(parent[at])
        return out


def label_choices(
    priced: PricedTables,
    pool: Pool,
    prices: np.ndarray,
    least: float,
    room: np.ndarray,
    cap: float,
    work: int,
    along: Sequence[HeldAlong] = (),
) -> Labels:
    """All choices that cost at most ``cap`` above the bound at the prices, which is the least minus the price of the
    room.

    pool, least: from ``priced.at(prices)``. room: float64 [sums]; inf for an excess, whose price must be in [0, 1].
    work: the most labels to make; after that, only a few with the least slack are continued. along: what pairs of nodes
    add to the excess sums.
    """
    order = _depth_first(priced.plan.steps)
    seen = _seen_later(order, pool, along)
    closing = _closed_at(order, along)
    held = priced.held
    rest = _Rest.of(order, held, closing)
    paid = np.isinf(room)
    limit = room * (1 + 1e-12) + 1e-9  # sums are rounded; callers check the choice that they use
    grain = _PRECISION * max(abs(least), cap, 1e-200)
    beam = min(_BEAM, max(_NARROWEST, _BEAM_LABELS // len(order)))
    open_: dict[int, np.ndarray] = {}
    slack, used = np.zeros(1), np.zeros((1, room.size))
    trail, whole, made = [], True, 0
    for i, step in enumerate(order):
        parent, config, slack = _extended(step, pool, open_, slack, cap)
        made += slack.size
        if made > work and slack.size > _UNSORTED * beam:
            whole = False
            least_slack = np.sort(np.argpartition(slack, _UNSORTED * beam)[: _UNSORTED * beam])
            parent, config, slack = parent[least_slack], config[least_slack], slack[least_slack]
        used = used[parent] + held[step.v][config]
        for other, e in closing[i]:
            used = used + e.between(step.v, config, open_[other][parent])
        low, high = used + rest.least[i + 1], used + rest.most[i + 1]
        within = slack + _unseen(low, high, prices, room, paid) <= cap + 10 * grain
        fits = np.flatnonzero(within & (low <= limit).all(axis=1))
        now = {u: (config if u == step.v else open_[u][parent])[fits] for u in seen[i]}
        base, matters = _compared(slack - used @ prices, used, rest, i + 1, room, paid)
        cost = np.rint(base[fits] / grain)
        coarse = _PRECISION * np.maximum(np.abs(matters).max(axis=0, initial=0.0), 1e-200)
        coarse = np.where(paid, grain, coarse)  # an excess is compared on the scale of the cost
        sums = np.rint(matters[fits] / coarse)
        keep = fits[_undominated(_state(now, seen[i], fits.size), cost, sums, paid)]
        if keep.size > (_WIDEST if made < work and whole else beam):
            whole = False
            keep = keep[np.argsort(slack[keep], kind="stable")[:beam]]
        where = np.zeros(slack.size, np.int64)
        where[fits] = np.arange(fits.size)
        open_ = {u: ks[where[keep]] for u, ks in now.items()}
        slack, used = slack[keep], used[keep]
        trail.append((step.v, parent[keep], config[keep]))
    cost = least + slack - used @ prices
    by_cost = np.argsort(cost, kind="stable")
    return Labels(
        cost=cost[by_cost],
        used=used[by_cost],
        whole=whole,
        made=made,
        _trail=tuple(trail),
        _last=by_cost,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rest:
    """Bounds on what the steps after each step add to the sums, float64 [steps + 1, sums]."""

    least: np.ndarray
    most: np.ndarray

    @classmethod
    def of(
        cls,
        order: list[Elimination],
        held: Sequence[np.ndarray],
        closing: list[list[tuple[int, HeldAlong]]],
    ) -> _Rest:
        sums = held[0].shape[1] if held else 0
        least, most = np.zeros((2, len(order) + 1, sums))
        for i in range(len(order) - 1, -1, -1):
            every = [held[order[i].v], *(e.held.reshape(-1, sums) for _, e in closing[i])]
            least[i] = least[i + 1] + sum(h.min(axis=0) for h in every)
            most[i] = most[i + 1] + sum(h.max(axis=0) for h in every)
        return cls(least=least, most=most)


def _compared(
    cost: np.ndarray, used: np.ndarray, rest: _Rest, step: int, room: np.ndarray, paid: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Costs and sums of labels for comparison: labels that are equal here have the same future.

    A sum no longer matters if there is room for all that follows, or if an excess will certainly stay below zero. An
    excess that will certainly stay above zero is moved to the cost.
    """
    least, most = rest.least[step], rest.most[step]
    with np.errstate(invalid="ignore"):
        limited = np.maximum(used, room - most)
    surely = np.where(paid, np.maximum(used + least, 0.0), 0.0).sum(axis=1)
    return cost + surely, np.where(paid, np.clip(used, -most, -least), limited)


def _unseen(
    low: np.ndarray, high: np.ndarray, prices: np.ndarray, room: np.ndarray, paid: np.ndarray
) -> np.ndarray:
    """A lower bound on the cost of a choice above its slack, float64 [labels], if its sums end between low and high.

    It is the price of the room that the choice leaves unused, plus what an excess costs above its price.
    """
    with np.errstate(invalid="ignore"):
        unused = np.where(paid, 0.0, prices * np.maximum(room - high, 0.0))
    excess = np.maximum((1 - prices) * low, 0.0) + np.maximum(-prices * high, 0.0)
    out: np.ndarray = np.where(paid, excess, unused).sum(axis=1)
    return out


def _depth_first(steps: list[Elimination]) -> list[Elimination]:
    """Order the steps so that each follows the one that uses its result, small branches first, to keep few nodes
    open."""
    when = {s.v: i for i, s in enumerate(steps)}
    children: list[list[int]] = [[] for _ in steps]
    size = [1] * len(steps)
    roots = []
    for i, s in enumerate(steps):
        if s.out.scope:
            parent = min(when[u] for u in s.out.scope)
            children[parent].append(i)
            size[parent] += size[i]
        else:
            roots.append(i)
    order = []
    todo = sorted(roots, key=lambda i: size[i], reverse=True)
    while todo:
        i = todo.pop()
        order.append(steps[i])
        todo += sorted(children[i], key=lambda c: size[c], reverse=True)
    return order


def _closed_at(order: list[Elimination], along: Sequence[HeldAlong]) -> list[list[tuple[int, HeldAlong]]]:
    """For each step, (other node, pair) for the pairs whose second node the step chooses."""
    when = {s.v: i for i, s in enumerate(order)}
    out: list[list[tuple[int, HeldAlong]]] = [[] for _ in order]
    for e in along:
        early, late = sorted((e.src, e.dst), key=when.__getitem__)
        out[when[late]].append((early, e))
    return out


def _seen_later(
    order: list[Elimination], pool: Pool, along: Sequence[HeldAlong] = ()
) -> list[dict[int, ConfigPartition]]:
    """For each step, the nodes chosen so far that later steps still read, and the view in which they read them."""
    views = {id(c): pool.view(c) for e in along for c in (e.src_class, e.dst_class)}
    closing = _closed_at(order, along)
    out: list[dict[int, ConfigPartition]] = [{}] * len(order)
    later: dict[int, ConfigPartition] = {}
    for i in range(len(order) - 1, -1, -1):
        out[i] = dict(later)
        step = order[i]
        later.pop(step.v, None)
        looked = list(zip(step.out.scope, step.out.views, strict=True))
        looked += [(u, views[id(e.src_class if u == e.src else e.dst_class)]) for u, e in closing[i]]
        for u, view in looked:
            later[u] = pool.joint(later[u], view) if u in later else view
    return out


def _state(now: dict[int, np.ndarray], views: dict[int, ConfigPartition], size: int) -> np.ndarray:
    """A number per label, int64 [size]. It is equal for labels that these views of the open nodes' configs cannot
    distinguish."""
    out = np.zeros(size, np.int64)
    many = 1
    for u, ks in now.items():
        if many * views[u].n > 1 << 62:
            out, many = np.unique(out, return_inverse=True)[1].reshape(-1), size
        out = out * views[u].n + views[u].cls[ks]
        many *= views[u].n
    return out


def _extended(
    step: Elimination, pool: Pool, open_: dict[int, np.ndarray], slack: np.ndarray, cap: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(label, config of the step's node, slack) for every pair within the cap."""
    views = dict(zip(step.out.scope, step.out.views, strict=True))
    states = _state({u: open_[u] for u in views}, views, slack.size)
    _, first, which = np.unique(states, return_index=True, return_inverse=True)
    which = which.reshape(-1)
    configs = step.view.cls.size
    parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
    for rows in _chunks(np.argsort(which, kind="stable"), configs):
        distinct = np.unique(which[rows])
        at = {u: open_[u][first[distinct]] for u in views}
        total = np.zeros((distinct.size, configs))
        for f in step.factors:
            own = f.scope.index(step.v)
            table = np.moveaxis(pool.arrays[f.sig], own, -1)
            others = tuple(w.cls[at[u]] for u, w in zip(f.scope, f.views, strict=True) if u != step.v)
            total = total + (table[others] if others else table)[..., f.views[own].cls]
        with np.errstate(invalid="ignore"):
            more = total - total.min(axis=1, keepdims=True)
        some = np.flatnonzero((more <= cap).any(axis=0))
        sums = slack[rows, None] + more[np.searchsorted(distinct, which[rows])][:, some]
        label, config = np.nonzero(sums <= cap)
        parts.append((rows[label], some[config], sums[label, config]))
    label, config, sums = (np.concatenate(p) for p in zip(*parts, strict=True))
    return label, config, sums


def _chunks(order: np.ndarray, configs: int) -> Iterator[np.ndarray]:
    """The labels in chunks whose sums with all configs stay small."""
    rows = max(1, _CHUNK // max(configs, 1))
    for i in range(0, order.size, rows):
        yield order[i : i + rows]


def _undominated(state: np.ndarray, cost: np.ndarray, used: np.ndarray, paid: np.ndarray) -> np.ndarray:
    """int64 indices of the labels that no other label of their state dominates in cost and sums; one of equal
    labels."""
    order = np.lexsort((*used.T[::-1], cost, state))
    if not order.size:
        return order
    state, cost, used = state[order], cost[order], used[order]
    begins = np.concatenate([[True], state[1:] != state[:-1]])
    segment = np.cumsum(begins) - 1
    if used.shape[1] == 1 and not paid.any():
        rank = np.unique(used[:, 0], return_inverse=True)[1].reshape(-1)
        # Later segments are shifted lower, so that one running minimum works for all.
        below = rank - segment * np.int64(rank.max() + 1)
        so_far = np.minimum.accumulate(below)
        keep = np.concatenate([[True], below[1:] < so_far[:-1]])
        return order[keep]
    from pase.search.limits.kernels_labels import undominated

    keep = np.empty(order.size, bool)
    undominated(begins, cost, np.ascontiguousarray(used), paid, _COMPARED, keep)
    return np.asarray(order[keep])
