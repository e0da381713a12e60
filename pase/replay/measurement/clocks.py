"""Aligns the clocks of all ranks by the ends of collectives, which all ranks observe at the same time.

A rank that arrives early waits inside the collective, so starts differ by milliseconds. But no rank can finish before
all data has arrived. On real traces, ends agree within microseconds after alignment.
"""

from __future__ import annotations

import math
from dataclasses import replace

import networkx as nx
import numpy as np

from pase.replay.measurement.matching import Match, match_collectives
from pase.replay.types import Clock, Problem, Timeline

__all__ = ["align", "align_ends", "collective_costs"]

_MAD_TO_SIGMA = 1.4826
_MEDIAN_LOSS = 1.2533
"""The ratio of the standard error of a median to that of a mean, for normal noise."""


def align(t: Timeline, method: str = "ends") -> Timeline:
    """Returns the timeline with clocks that map every rank to the clock of the lowest rank.

    method: "ends" (median difference of collective ends, plus a drift if it is significant), "dpro" (the dPRO paper's
    optimization, see ``clocks_dpro``) or "none". Raises ValueError for any other method.
    """
    if method == "none" or len(t.ranks) < 2:
        return replace(t, clocks=tuple(Clock(rank=r) for r in t.ranks))
    matches, problems = match_collectives(t)
    shared = [m for m in matches if len(m.members) > 1]
    if method == "dpro":
        from pase.replay.measurement.clocks_dpro import align_dpro

        clocks, more = align_dpro(t, shared)
    elif method == "ends":
        clocks, more = align_ends(t, shared)
    else:
        raise ValueError(f"there is no alignment method '{method}'; choose ends, dpro or none")
    return replace(t, clocks=clocks, problems=(*t.problems, *problems, *more))


def align_ends(t: Timeline, matches: list[Match]) -> tuple[tuple[Clock, ...], list[Problem]]:
    """Returns the offset and drift of every rank from the ends of shared collectives, and problems.

    The fit alternates between the common time of each collective (median over its ranks) and the offset of each rank
    (median over its collectives). Then it fits drifts, and keeps those that are significant.
    """
    ranks = list(t.ranks)
    # Ranks that are known to share a host read one clock, so they have one offset.
    units: dict[object, int] = {}
    row = {r: units.setdefault(t.hosts.get(r, r), len(units)) for r in ranks}
    pieces = _components(ranks, matches, row)
    end = t.end_ns
    pairs = [(c, row[r], int(end[e])) for c, m in enumerate(matches) for r, e in m.members.items()]
    if not pairs and len(units) > 1:
        what = "no two ranks share a collective, so clocks cannot be aligned; they are used as recorded"
        return tuple(Clock(rank=r, uncertainty_ns=0.0 if r == ranks[0] else math.inf) for r in ranks), [
            Problem(where="clocks", what=what)
        ]
    if len(units) == 1:
        return tuple(Clock(rank=r) for r in ranks), []
    which = np.array([p[0] for p in pairs])
    who = np.array([p[1] for p in pairs])
    # Subtract each rank's first end, so that float64 is exact to well below a nanosecond.
    zero = np.array(
        [min((p[2] for p in pairs if p[1] == i), default=0) for i in range(len(units))], dtype=np.int64
    )
    local = np.array([p[2] for p in pairs], dtype=np.int64)
    offset, drift, spread = _fit(which, who, local, zero, len(units), len(matches))
    clocks: list[Clock] = []
    problems: list[Problem] = []
    for piece in pieces:
        anchor = piece[0]
        tied = anchor == ranks[0]
        if not tied:
            what = f"ranks {piece} share no collective with rank {ranks[0]}, so their clock offset is unknown"
            problems.append(Problem(where="clocks", what=what))
        for r in piece:
            i, a = row[r], row[anchor]
            count = max(1, int((who == i).sum()))
            uncertainty = _MEDIAN_LOSS * math.hypot(spread[i], spread[a]) / math.sqrt(count)
            # Subtract the anchor's own correction, so that its clock stays as recorded.
            delta = float(drift[i] - drift[a])
            at = int(zero[i])
            shift = float(offset[i] - offset[a] - drift[a] * (at + offset[i] - offset[a] - zero[a]))
            clocks.append(
                Clock(
                    rank=r,
                    offset_ns=0.0 if i == a else shift,
                    drift=0.0 if i == a else delta,
                    reference_ns=at,
                    uncertainty_ns=0.0 if i == row[ranks[0]] else (uncertainty if tied else math.inf),
                )
            )
    return tuple(sorted(clocks, key=lambda c: c.rank)), problems


def _fit(
    which: np.ndarray, who: np.ndarray, local: np.ndarray, zero: np.ndarray, n: int, m: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the offset (ns), drift and residual spread (ns) of each rank, relative to the common times."""
    drift = np.zeros(n)
    x = (local - zero[who]).astype(np.float64)
    rough = (zero - zero[0]).astype(np.float64)
    by_collective = _slices(which, m)
    by_rank = _slices(who, n)
    # Start from chains of direct differences, so that the medians start close to the solution.
    offset = -_spanning(by_collective, who, local, n)

    def residuals() -> np.ndarray:
        """Returns the common time of each pair's collective (median over ranks) minus the rank's own time, in ns."""
        y = x * (1 + drift[who]) + rough[who] + offset[who]
        common = np.array([np.median(y[s]) if len(s) else 0.0 for s in by_collective])
        return common[which] - y

    def centre(rounds: int) -> None:
        for _ in range(rounds):
            left = residuals()
            step = np.array([np.median(left[s]) if len(s) else 0.0 for s in by_rank])
            step -= step[0]
            offset[:] += step
            if np.abs(step).max() < 0.5:
                return

    centre(30)
    # A drift is the rank's slope against the common time, which changes with every correction. So iterate.
    errors = np.full(n, math.inf)
    for _ in range(60):
        left = residuals()
        slopes = [_slope(x[s], left[s]) for s in by_rank]
        errors = np.array([e for _, e in slopes])
        change = np.array([s for s, _ in slopes])
        change -= change[0]
        drift += change
        centre(1)
        if np.abs(change).max() < 1e-9:
            break
    # Keep only significant drifts. The errors of two ranks add, because they are opposite: the common time lies between
    # the two ranks.
    drift[np.abs(drift) < 4 * (errors + errors[0])] = 0.0
    centre(30)
    left = residuals()
    spread = np.array(
        [_MAD_TO_SIGMA * float(np.median(np.abs(left[s]))) if len(s) else math.inf for s in by_rank]
    )
    return offset, drift, spread


def _slices(labels: np.ndarray, n: int) -> list[np.ndarray]:
    order = np.argsort(labels, kind="stable")
    edges = np.searchsorted(labels[order], np.arange(n + 1))
    return [order[edges[i] : edges[i + 1]] for i in range(n)]


def _spanning(by_collective: list[np.ndarray], who: np.ndarray, local: np.ndarray, n: int) -> np.ndarray:
    """Returns an initial estimate of each clock minus the first one: medians of direct differences along a tree."""
    ahead = np.zeros(n)
    known = {0}
    samples: dict[tuple[int, int], list[int]] = {}
    for s in by_collective:
        for a in s.tolist():
            for b in s.tolist():
                if a != b and len(samples.get((who[a], who[b]), ())) < 200:
                    samples.setdefault((int(who[a]), int(who[b])), []).append(int(local[b] - local[a]))
    while True:
        grown = False
        for (a, b), differences in samples.items():
            if a in known and b not in known:
                ahead[b] = ahead[a] + float(np.median(differences))
                known.add(b)
                grown = True
        if not grown:
            rest = [i for i in range(n) if i not in known and any(k[0] == i for k in samples)]
            if not rest:
                return ahead
            known.add(rest[0])


def _slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Returns the slope of y over x and its standard error, robustly against outliers.

    It chooses the line through a pair of points that minimizes the sum of squared residuals, each capped at four times
    the noise between neighbours. Then it fits the points close to that line by least squares. So a few points that are
    far away in time, which determine a drift best, are not treated as outliers, and outliers do not look like drift.
    """
    n = len(x)
    if n < 8 or x.max() - x.min() <= 0:
        return 0.0, math.inf
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    sigma = max(_MAD_TO_SIGMA * float(np.median(np.abs(np.diff(y)))) / math.sqrt(2), 1.0)
    left, right = (np.unique(np.linspace(0, n - 1, k).astype(np.int64)) for k in (24, 25))
    a, b = (m.ravel() for m in np.meshgrid(left, right))
    apart = x[b] - x[a] > 0.05 * (x[-1] - x[0])
    a, b = a[apart], b[apart]
    some = np.unique(np.linspace(0, n - 1, 2000).astype(np.int64))
    slopes = np.concatenate(([0.0], (y[b] - y[a]) / (x[b] - x[a])))
    off = y[some] - slopes[:, None] * x[some]
    off -= np.median(off, axis=1, keepdims=True)
    slope = float(slopes[np.argmin(np.square(np.minimum(np.abs(off), 4 * sigma)).sum(axis=1))])
    residual = y - slope * x
    residual -= np.median(residual)
    fine = np.abs(residual) < 4 * sigma
    around = x[fine] - x[fine].mean()
    slope += float(around @ residual[fine] / (around @ around))
    return slope, sigma / (float(around.std()) * math.sqrt(int(fine.sum())))


def _components(ranks: list[int], matches: list[Match], unit: dict[int, int]) -> list[list[int]]:
    """Returns the sets of ranks connected by shared collectives or a common clock, sorted."""
    tied: nx.Graph[int] = nx.Graph()
    tied.add_nodes_from(ranks)
    for m in matches:
        nx.add_path(tied, m.members)
    first_of: dict[int, int] = {}
    tied.add_edges_from((first_of.setdefault(unit[r], r), r) for r in ranks)
    return sorted(map(sorted, nx.connected_components(tied)))


def collective_costs(t: Timeline, matches: list[Match]) -> list[dict[str, float]]:
    """Returns the work, wait and end spread of every collective, in ns on the common clock.

    work_ns: the last end minus the latest start. wait_ns: the mean wait of its ranks for the latest start.
    end_spread_ns: the difference between the last and the first end. If only one rank recorded a collective, the wait
    is not visible, and the whole duration counts as work.
    """
    start, end = t.to_global(t["start_ns"]), t.to_global(t.end_ns)
    out = []
    for m in matches:
        e = np.fromiter(m.members.values(), dtype=np.int64)
        latest, done = float(start[e].max()), float(end[e].max())
        wait = float((latest - start[e]).mean())
        spread = done - float(end[e].min())
        out.append({"work_ns": max(0.0, done - latest), "wait_ns": wait, "end_spread_ns": spread})
    return out
