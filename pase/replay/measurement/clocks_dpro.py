"""Clock alignment as in dPRO: an optimization over clock offsets (section 4.2 of the paper).

It minimizes a1·O1 + a2·O2, subject to the constraint that no rank receives before the sender sends. O1 is the variance,
within a family (one collective of the program over its iterations), of the time from the latest aligned start to the
end. O2 is the variance of the offsets on one machine. If one rank is always the last to arrive, O1 is flat and the
optimum is not unique; the center of the feasible box is then used. ``clocks.align_ends`` is usually better.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pase.replay.measurement.matching import Match
from pase.replay.types import Clock, Problem, Timeline

__all__ = ["align_dpro"]


def align_dpro(
    t: Timeline, matches: list[Match], a1: float = 1.0, a2: float = 1.0
) -> tuple[tuple[Clock, ...], list[Problem]]:
    """Returns clocks by the paper's objective, and problems. The uncertainty is half an offset's feasible interval."""
    from scipy.optimize import linprog, minimize

    ranks = list(t.ranks)
    row = {r: i for i, r in enumerate(ranks)}
    n = len(ranks)
    if not matches or n < 2:
        return tuple(Clock(rank=r, uncertainty_ns=math.inf if r != ranks[0] else 0.0) for r in ranks), []
    # Order constraint: the data that rank i sends when it starts a collective arrives at rank j before j's end.
    bound = np.full((n, n), np.inf)
    start, end = t["start_ns"], t.end_ns
    zero = np.array([int(start[t.rank_of == r].min()) for r in ranks], dtype=np.int64)
    for m in matches:
        for r, a in m.members.items():
            for s, b in m.members.items():
                if r != s:
                    i, j = row[r], row[s]
                    bound[i, j] = min(bound[i, j], float(end[b] - zero[j]) - float(start[a] - zero[i]))
    pairs = [(i, j) for i in range(n) for j in range(n) if np.isfinite(bound[i, j])]
    # With φ = θ + zero, the constraint is φ_i − φ_j ≤ bound. A slack s keeps it feasible if clocks drift.
    rows = np.zeros((len(pairs), n + 1))
    limit = np.array([bound[p] for p in pairs])
    for k, (i, j) in enumerate(pairs):
        rows[k, i], rows[k, j], rows[k, n] = 1.0, -1.0, 1.0
    fixed = [(0.0, 0.0)] + [(None, None)] * (n - 1)
    centre = linprog(
        np.r_[np.zeros(n), -1.0], A_ub=rows, b_ub=limit, bounds=[*fixed, (None, None)], method="highs"
    )
    problems = []
    if not centre.success:
        return tuple(Clock(rank=r, uncertainty_ns=math.inf) for r in ranks), [
            Problem(where="clocks", what=f"dPRO's alignment found no solution ({centre.message})")
        ]
    solved: np.ndarray = np.asarray(centre.x)
    slack = min(0.0, float(solved[n]))
    if slack < 0:
        what = f"sends and receives contradict each other by {-slack / 1e3:.1f} µs: clocks drift or jump"
        problems.append(Problem(where="clocks", what=what))
    tight = limit - slack + 1.0
    families = _families(t, matches, row, zero)
    groups: dict[str, list[int]] = {}
    for r, host in t.hosts.items():
        groups.setdefault(host, []).append(row[r])
    scale = 1e3

    def objective(free: np.ndarray) -> float:
        phi = np.r_[0.0, free * scale]
        total = 0.0
        for starts, ends, who in families:
            latest = np.where(who, starts + phi[None, :], -np.inf).max(axis=1)
            spans = np.where(who, ends + phi[None, :] - latest[:, None], np.nan)
            total += a1 * float(np.nansum(np.nanvar(spans, axis=0)))
        theta = phi - zero
        for members in groups.values():
            total += a2 * float(np.var(theta[members] - theta[members[0]]))
        return total / scale**2

    def room(free: np.ndarray) -> np.ndarray:
        return (tight - rows[:, :n] @ np.r_[0.0, free * scale]) / scale

    begin = solved[1:n] / scale
    options: Any = {"maxiter": 200, "ftol": 1e-10}
    constraint: Any = {"type": "ineq", "fun": room}
    found: Any = minimize(objective, begin, method="SLSQP", constraints=[constraint], options=options)
    inside = bool(np.all(room(found.x) > -1e-3))
    best = found.x if inside and objective(found.x) <= objective(begin) else begin
    theta = np.r_[0.0, best * scale] - (zero - zero[0])
    # The uncertainty is half the interval that the order constraints with rank 0 leave.
    half = [0.0] + [0.5 * float(bound[i, 0] + bound[0, i]) for i in range(1, n)]
    clocks = tuple(
        Clock(rank=r, offset_ns=float(theta[i]), uncertainty_ns=max(0.0, half[i]), reference_ns=int(zero[i]))
        for i, r in enumerate(ranks)
    )
    return clocks, problems


def _families(
    t: Timeline, matches: list[Match], row: dict[int, int], zero: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Returns (starts, ends, present), each [occurrences, ranks], for each collective of the program."""
    order: dict[tuple[int, int, int], int] = {}
    families: dict[tuple[int, int, int, int], list[Match]] = {}
    for m in matches:
        first = next(iter(m.members.values()))
        key = (int(t["name"][first]), m.group, int(t["operation"][first]))
        k = order[(*key[:2], m.iteration)] = order.get((*key[:2], m.iteration), -1) + 1
        families.setdefault((*key, k), []).append(m)
    out = []
    for members in families.values():
        if len(members) < 2:
            continue
        starts = np.zeros((len(members), len(row)))
        ends, who = starts.copy(), np.zeros(starts.shape, dtype=bool)
        for c, m in enumerate(members):
            for r, e in m.members.items():
                i = row[r]
                starts[c, i], ends[c, i] = t["start_ns"][e] - zero[i], t.end_ns[e] - zero[i]
                who[c, i] = True
        # Keep only occurrences that all ranks have, so that each rank has the same number of samples.
        full = who.all(axis=1)
        if full.sum() >= 2:
            out.append((starts[full], ends[full], who[full]))
    return out
