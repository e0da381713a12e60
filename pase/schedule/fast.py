"""The fast mode of the policy ours: construction by bisection on the makespan, then a fixed budget of local search."""

from __future__ import annotations

import numpy as np

from pase.schedule.bound import lower_bound_s
from pase.schedule.chain import plain_iteration_s
from pase.schedule.greedy import Instance, construct, instance, preemptive
from pase.schedule.plan import BucketPlan, Message, Piece
from pase.schedule.simulate import as_sequence
from pase.schedule.types import ScheduleProblem
from pase.schedule.view import plain_view

__all__ = ["coarsen", "fast_plan", "improve", "refine"]

Pieces = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]

RESERVES = (0.0, 0.01, 0.04, 0.15, 0.5)
LEAST = (0.3, 1.0, 4.0)
"""Shortest message that a tensor is cut for, in startups."""
STEPS = 9
WORK = 3_500_000
"""Number of atoms and messages that the local search visits, per link; a quarter of it if the tensors are coarsened."""
HEATS = (0.02, 0.1, 0.02)
HEATS_LINKS = (0.02, 0.3, 0.1, 0.02, 0.3, 0.05)
"""Initial temperatures, one search for each. HEATS is for one link, HEATS_LINKS for several."""
COARSE_FROM = 300
ENOUGH = 1e-6
"""The search stops at this relative gap to the bound. Rounding to whole bytes alone leaves about 1e-8."""


def fast_plan(
    problem: ScheduleProblem, *, seed: int = 0, warm_starts: tuple[BucketPlan, ...] = (), work: int = WORK
) -> tuple[BucketPlan, float, float]:
    """Returns (plan, iteration seconds, lower bound) for a plain problem. The plan is no worse than any warm start."""
    view = plain_view(problem)
    bound = lower_bound_s(problem, view=view)
    inst = instance(problem, view)
    starts = _construct(problem, inst, bound)
    for plan in warm_starts:
        if plan.staleness == 0 and plan.period == 1 and not any(m.hold_s for m in plan.messages):
            pieces = _pieces_of(inst, plan if plan.dispatch == "sequence" else as_sequence(problem, plan))
            starts.append((_cost(inst, pieces), pieces))
    starts.sort(key=lambda x: x[0])
    cost, pieces = starts[0]
    if cost > bound * (1 + ENOUGH):
        heats = HEATS if inst.links == 1 else HEATS_LINKS
        each = work * inst.links / len(heats) / (4 if len(pieces[0]) > COARSE_FROM else 1)
        for i, heat in enumerate(heats):
            begin = pieces if i + 1 == len(heats) else starts[i % len(starts)][1]
            cost, pieces = _search(inst, begin, cost, pieces, each, bound, seed + i, heat)
    plan = _to_plan(inst, pieces)
    return plan, plain_iteration_s(problem, plan, view), bound


def _search(
    inst: Instance,
    begin: Pieces,
    best: float,
    pieces: Pieces,
    work: float,
    bound: float,
    seed: int,
    heat: float,
) -> tuple[float, Pieces]:
    """The better of (best, pieces) and the result of a search from `begin`."""
    if len(begin[0]) <= COARSE_FROM:
        cost, found = improve(
            inst, begin, evaluations=_evaluations(begin, work), bound_s=bound, seed=seed, heat=heat
        )
        return (cost, found) if cost < best else (best, pieces)
    small, coarse, first = coarsen(inst, begin)
    cost, coarse = improve(
        small, coarse, evaluations=_evaluations(coarse, work), bound_s=bound, seed=seed, heat=heat
    )
    if cost >= best:
        return best, pieces
    fine = refine(inst, coarse, first)
    return min(cost, _cost(inst, fine)), fine


def _evaluations(pieces: Pieces, work: float) -> int:
    return int(np.clip(work / (len(pieces[0]) + 2 * len(pieces[3])), 500, 30_000))


def _construct(problem: ScheduleProblem, inst: Instance, bound: float) -> list[tuple[float, Pieces]]:
    """Candidates (cost, pieces) for the local search.

    They are: one message per group, which always exists; preemptive priority, if startups are small or tensors are few;
    and the best result of bisections on the makespan for each minimum length of a cut message.
    """
    axes = {t.axes for t in problem.tensors}
    startup = max(k.curve_for(a).startup_s for k in problem.links for a in axes if k.carries(a))
    crumb = float(inst.tensors["fluid"].sum()) / 1000
    out = [_all_in_one(inst)]
    if startup <= crumb or inst.order.size <= 100:
        out += _preemptive(inst)
    worst = min(c for c, _ in out)
    for least_s in (max(crumb, k * startup) for k in LEAST):
        for from_s in _openings(inst):
            best: tuple[float, Pieces] | None = None
            for reserve in RESERVES if inst.links == 1 else RESERVES[::2]:
                low, high = bound, min(worst, best[0]) if best else worst
                for step in range(STEPS):
                    target = high if step == 0 else low + (0.5 if step > 1 else 0.1) * (high - low)
                    pieces: Pieces = construct(inst, target, reserve, least_s, from_s)  # type: ignore[assignment]
                    cost = _cost(inst, pieces) if pieces[3].size else np.inf
                    if best is None or cost < best[0]:
                        best = (cost, pieces)
                    if cost <= bound * (1 + 1e-9):
                        return [best]
                    low, high = (low, min(target, cost)) if cost <= target * (1 + 1e-12) else (target, high)
            if best is not None and np.isfinite(best[0]):
                out.append(best)
        if startup <= crumb / 4:
            break
    return out


def _openings(inst: Instance) -> list[np.ndarray]:
    """Start times of the links to try: all at 0, or all but one slightly, half a backward or a full backward later."""
    out = [np.zeros(inst.links)]
    if inst.links > 1:
        last = float(inst.tensors["ready"].max())
        for k in range(inst.links):
            for late in (1e-9, 0.5, 0.999):
                opening = np.full(inst.links, late * last)
                opening[k] = 0.0
                out.append(opening)
    return out


def _all_in_one(inst: Instance) -> tuple[float, Pieces]:
    """One message for each group, on its fastest link."""
    n = inst.order.size
    groups, axes, nbytes = (inst.tensors[f] for f in ("group", "axes", "nbytes"))
    first = {int(g): i for i, g in reversed(list(enumerate(groups.tolist())))}
    number = {g: i for i, g in enumerate(first)}
    link = []
    for g, i in first.items():
        total = float(nbytes[groups == g].sum())
        rows = [int(axes[i]) * inst.links + k for k in range(inst.links)]
        link.append(min(range(inst.links), key=lambda k: _seconds(inst, rows[k], total)))
    msg = np.asarray([number[int(g)] for g in groups], np.int64)
    pieces = (msg, np.arange(n), nbytes.copy(), np.asarray(link, np.int64))
    return _cost(inst, pieces), pieces


def _seconds(inst: Instance, row: int, nbytes: float) -> float:
    first, last, slope = inst.curves.rows[row]
    if slope < 0:
        return float("inf")
    corners = inst.curves.corners[first:last]
    s = float(np.interp(nbytes, corners["nbytes"], corners["seconds"]))
    return s + max(0.0, nbytes - float(corners["nbytes"][-1])) * float(slope)


def _preemptive(inst: Instance) -> list[tuple[float, Pieces]]:
    """The preemptive priority schedule on one link, which is optimal if startups cost nothing."""
    if inst.links > 1:
        return []
    pieces: Pieces = preemptive(inst)
    return [(_cost(inst, pieces), pieces)]


def _cost(inst: Instance, pieces: Pieces) -> float:
    cost, _ = improve(inst, pieces, evaluations=0, bound_s=0.0, seed=0)
    return cost


def _pieces_of(inst: Instance, plan: BucketPlan) -> Pieces:
    place = np.empty(inst.order.size, np.int64)
    place[inst.order] = np.arange(inst.order.size)
    rows = [(i, place[p.tensor], float(p.nbytes)) for i, m in enumerate(plan.messages) for p in m.pieces]
    msg, at, nbytes = zip(*rows, strict=True)
    link = np.asarray([m.link for m in plan.messages], np.int64)
    return np.asarray(msg, np.int64), np.asarray(at, np.int64), np.asarray(nbytes, float), link


def _to_plan(inst: Instance, pieces: Pieces) -> BucketPlan:
    """The plan of these pieces. Pieces of one tensor get ascending offsets in the order in which they are sent."""
    msg, at, nbytes, link = pieces
    taken = np.zeros(inst.order.size, np.int64)
    members: list[dict[int, int]] = [{} for _ in range(link.size)]
    for a in np.lexsort((at, msg)).tolist():
        members[msg[a]][int(at[a])] = members[msg[a]].get(int(at[a]), 0) + round(float(nbytes[a]))
    messages = []
    for m, tensors in enumerate(members):
        made = []
        for t, size in sorted(tensors.items()):
            made.append(Piece(tensor=int(inst.order[t]), offset=int(taken[t]), nbytes=size))
            taken[t] += size
        if made:
            messages.append(Message(pieces=tuple(made), link=int(link[m])))
    return BucketPlan(policy="ours", messages=tuple(messages))


def improve(
    inst: Instance, pieces: Pieces, *, evaluations: int, bound_s: float, seed: int, heat: float = 0.02
) -> tuple[float, Pieces]:
    """The compiled local search. It moves bytes between messages, and merges, splits and reorders them.

    Returns (iteration seconds, pieces) no worse than the given pieces. The search stops early at the bound. Its state
    is the atoms (pieces of tensors, each in one message) and the order of the messages. An evaluation is one pass over
    the atoms and one over the messages. A run is a fixed number of evaluations with a seed, so it is reproducible.

    evaluations: number of moves to try. heat: the initial temperature, as a fraction of the gap to the bound.
    """
    from pase.schedule.kernels_search import search

    cost, found = search(inst, pieces, evaluations, bound_s, seed, heat)
    return float(cost), found


def coarsen(inst: Instance, pieces: Pieces) -> tuple[Instance, Pieces, np.ndarray]:
    """Returns (instance of places, the plan on it, first tensor of each place: int64 [places + 1]).

    A run of neighbouring tensors that a plan sends uncut in one message becomes a few places. Places are small at both
    ends of the run (1, 2, 4, … tensors), because the search moves the run's boundaries. A place becomes ready with its
    last tensor and is needed with its first, so a refined plan is at least as good as the coarse one.
    """
    msg, at, nbytes, link = pieces
    n = inst.order.size
    count = np.bincount(at, minlength=n)
    of = np.full(n, -1)
    of[at] = msg
    of = np.where(count == 1, of, -1 - np.arange(n))  # a tensor that is cut gets its own place
    key = np.stack((of, inst.tensors["group"]))
    starts = np.flatnonzero(np.concatenate(([True], (key[:, 1:] != key[:, :-1]).any(0))))
    first: list[int] = []
    for a, b in zip(starts.tolist(), [*starts[1:].tolist(), n], strict=True):
        step, lo, hi, ends = 1, a, b, []
        while hi - lo > 2 * step:
            first.append(lo)
            ends.append(hi - step)
            lo, hi, step = lo + step, hi - step, 2 * step
        first += [lo, *reversed(ends)]
    at_first = np.asarray(first, np.int64)
    line = inst.tensors[at_first]
    for field in ("ready", "tail"):
        line[field] = np.maximum.reduceat(inst.tensors[field], at_first)
    for field in ("nbytes", "fluid"):
        line[field] = np.add.reduceat(inst.tensors[field], at_first)
    small = inst._replace(order=at_first, tensors=line)
    place = np.searchsorted(at_first, at, side="right") - 1
    merged: dict[tuple[int, int], float] = {}
    for m, p, size in zip(msg.tolist(), place.tolist(), nbytes.tolist(), strict=True):
        merged[m, p] = merged.get((m, p), 0.0) + size
    keys = np.asarray(list(merged), np.int64)
    made = (keys[:, 0].copy(), keys[:, 1].copy(), np.asarray(list(merged.values())), link)
    return small, made, np.concatenate((at_first, [n]))


def refine(inst: Instance, pieces: Pieces, first: np.ndarray) -> Pieces:
    """The plan on tensors. If a place is cut between messages, its first tensors go to the first message."""
    msg, at, nbytes, link = pieces
    rows: list[tuple[int, int, float]] = []
    left = inst.tensors["nbytes"].copy()
    cursor = first[:-1].copy()
    for a in np.lexsort((at, msg)).tolist():
        p, need = int(at[a]), float(nbytes[a])
        while need > 0.5 and cursor[p] < first[p + 1]:
            t = int(cursor[p])
            take = min(need, float(left[t]))
            rows.append((int(msg[a]), t, take))
            left[t] -= take
            need -= take
            if left[t] <= 0.5:
                cursor[p] += 1
    messages, tensors, sizes = zip(*rows, strict=True)
    return np.asarray(messages, np.int64), np.asarray(tensors, np.int64), np.asarray(sizes, float), link
