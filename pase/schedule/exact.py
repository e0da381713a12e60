"""The exact mode of the policy ours: fusion, partition, order and link as one mixed-integer program.

The program is solved by HiGHS through scipy. Each link has a row of message slots in the order of sending. A slot takes
any bytes of any tensors of one group.

Number of slots: in an optimal plan, take two consecutive messages on a link such that no tensor ends in the first and
no tensor is released between their starts. Fusing them saves a startup and delays nothing. Therefore an optimal plan
exists in which every message but the last ends a tensor or is followed by a release. This gives at most 2n messages, if
fusing never costs more: t(a + b) <= t(a) + t(b).

The incremental form makes the program solvable. "Slot j starts no earlier than the release of tensor i" is a binary.
It can only switch from 0 to 1 along the slots, and for tensors sorted by release it switches in that order. The start
of the slot is then at least the sum of the release steps that are switched on. Deadlines are modelled in the same way.
With one binary for each (tensor, slot) and big-M rows instead, CP-SAT did not prove three tensors in 10 s; this form
proves twelve.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pase.schedule.chain import plain_iteration_s
from pase.schedule.plan import BucketPlan, Message, Piece
from pase.schedule.types import ScheduleProblem, SendTime
from pase.schedule.view import PlainView, plain_view

__all__ = ["Exact", "exact_plan", "slots_needed"]

PROVEN = 1e-5
"""An answer counts as proven if its relative gap is below this. HiGHS satisfies its rows to about 1e-7."""
SAFETY = 2e-6
"""Fraction by which HiGHS's bound is reduced to allow for its tolerances."""


@dataclass(frozen=True, kw_only=True)
class Exact:
    """A plan and its iteration.

    bound_s: a lower bound for every plan, in seconds. proven: whether the gap is below PROVEN. seconds: time spent.
    """

    plan: BucketPlan
    iteration_s: float
    bound_s: float
    proven: bool
    seconds: float


def exact_plan(
    problem: ScheduleProblem, start: BucketPlan, *, time_limit_s: float = 10.0, bound_s: float = 0.0
) -> Exact:
    """Improve `start`, an undelayed plan of a plain problem, until it is proven optimal or the time limit is reached.

    bound_s: a lower bound that is already known.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_matrix

    began = time.perf_counter()
    view = plain_view(problem)
    best_s = plain_iteration_s(problem, start, view)
    if best_s <= bound_s * (1 + PROVEN):
        return Exact(plan=start, iteration_s=best_s, bound_s=min(bound_s, best_s), proven=True, seconds=0.0)
    model = _IntegerProgram(problem, view, best_s, max(bound_s, view.compute))
    matrix = coo_matrix(
        (np.asarray(model.value), (np.asarray(model.row), np.asarray(model.column))),
        shape=(len(model.low), model.size),
    ).tocsr()
    objective = np.zeros(model.size)
    objective[0] = 1.0
    found = milp(
        objective,
        constraints=LinearConstraint(matrix, model.low, model.high),
        integrality=np.asarray(model.integral),
        bounds=Bounds(np.asarray(model.least), np.asarray(model.most)),
        options={"time_limit": time_limit_s, "mip_rel_gap": PROVEN / 4},
    )
    plan = start
    if found.x is not None:
        candidate = model.read(found.x)
        if (c := plain_iteration_s(problem, candidate, view)) < best_s:
            plan, best_s = candidate, c
    bound = bound_s
    if model.complete:
        if found.mip_dual_bound is not None and np.isfinite(found.mip_dual_bound):
            bound = max(bound, float(found.mip_dual_bound) * model.scale * (1 - SAFETY))
        elif found.status == 2:  # infeasible: no plan is better than the start
            bound = best_s * (1 - SAFETY)
    bound = min(bound, best_s)
    return Exact(
        plan=replace(plan, policy="ours"),
        iteration_s=best_s,
        bound_s=bound,
        proven=best_s <= bound * (1 + PROVEN),
        seconds=time.perf_counter() - began,
    )


def _falls_per_byte(c: SendTime) -> bool:
    """Whether the seconds per byte never rise with the size, which means that fusing never costs more."""
    rates = [y / x for x, y in zip(c.bytes_, c.seconds, strict=True) if x > 0]
    last = c.seconds[-1] - c.tail_s_per_byte * c.bytes_[-1]
    return all(a >= b - 1e-18 for a, b in itertools.pairwise(rates)) and last >= -1e-15


def slots_needed(problem: ScheduleProblem, view: PlainView, link: int, best_s: float) -> int:
    """The number of slots of a link: 2n, or fewer if fewer messages fit into the best known iteration."""
    n = len(problem.tensors)
    axes = {t.axes for t in problem.tensors if problem.links[link].carries(t.axes)}
    if not axes:
        return 0
    curves = [problem.links[link].curve_for(a) for a in axes]
    startup = min(c.startup_s for c in curves)
    room = best_s - float(view.ready.min()) - float(view.tail.min())
    if len(problem.links) == 1 and all(len(c.bytes_) == 1 for c in curves):
        room -= min(c.tail_s_per_byte for c in curves) * problem.nbytes
    return max(1, min(2 * n, int(room / startup * (1 + 1e-9)) if startup > 0 else 2 * n))


class _IntegerProgram:
    """Rows and columns of the mixed-integer program.

    Column 0 is the iteration. Times and work are in units of `scale`, the best known iteration in seconds.
    """

    def __init__(self, problem: ScheduleProblem, view: PlainView, best_s: float, bound_s: float) -> None:
        self.problem, self.view, self.scale = problem, view, best_s
        self.row: list[int] = []
        self.column: list[int] = []
        self.value: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.least: list[float] = []
        self.most: list[float] = []
        self.integral: list[int] = []
        self.size = 0
        self.complete = all(
            _falls_per_byte(link.curve_for(t.axes))
            for link in problem.links
            for t in problem.tensors
            if link.carries(t.axes)
        )
        self.new(bound_s / best_s, 1.0 + 1e-9)
        self.shares: dict[tuple[int, int, int], int] = {}
        """(slot, link, tensor) -> column of the fraction of the tensor that is in this message, 0..1."""
        for k in range(len(problem.links)):
            self.link(k, slots_needed(problem, view, k, best_s))
        for i in range(len(problem.tensors)):
            self.add([(c, 1.0) for (_, _, t), c in self.shares.items() if t == i], 1.0, 1.0)

    def new(self, least: float = 0.0, most: float = 1.0, *, binary: bool = False) -> int:
        self.least.append(least)
        self.most.append(most)
        self.integral.append(int(binary))
        self.size += 1
        return self.size - 1

    def add(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        for c, v in terms:
            self.row.append(len(self.low))
            self.column.append(c)
            self.value.append(v)
        self.low.append(low)
        self.high.append(high)

    def link(self, k: int, slots: int) -> None:
        problem = self.problem
        mine = [i for i, t in enumerate(problem.tensors) if problem.links[k].carries(t.axes)]
        ready, tail = self.view.ready / self.scale, self.view.tail / self.scale
        by_ready = sorted(mine, key=lambda i: ready[i])
        by_tail = sorted(mine, key=lambda i: tail[i])
        before: tuple[int, int, dict[int, int], dict[int, int]] | None = None
        for j in range(slots):
            start, end, used = self.new(), self.new(), self.new(binary=True)
            after = {i: self.new(binary=True) for i in mine}  # the slot starts after the release of i
            early = {i: self.new(binary=True) for i in mine}  # the slot ends before the deadline of i
            for i in mine:
                y = self.shares[j, k, i] = self.new()
                for switch in (after[i], early[i], used):
                    self.add([(y, 1.0), (switch, -1.0)], -np.inf, 0.0)
            steps = np.diff([0.0, *(ready[i] for i in by_ready)])
            self.add(
                [(start, 1.0), *((after[i], -s) for i, s in zip(by_ready, steps, strict=True))], 0.0, np.inf
            )
            least = min(tail[i] for i in mine)
            steps = np.diff([least, *(tail[i] for i in by_tail)])
            self.add(
                [(end, 1.0), (0, -1.0), *((early[i], s) for i, s in zip(by_tail, steps, strict=True))],
                -np.inf,
                -least,
            )
            for switches, order in ((after, by_ready), (early, by_tail)):
                for a, b in itertools.pairwise(order):
                    self.add([(switches[a], 1.0), (switches[b], -1.0)], 0.0, np.inf)
            self.length(k, j, start, end, used, mine)
            if before is not None:
                self.add([(start, 1.0), (before[1], -1.0)], 0.0, np.inf)
                self.add([(before[0], 1.0), (used, -1.0)], 0.0, np.inf)
                for i in mine:
                    self.add([(after[i], 1.0), (before[2][i], -1.0)], 0.0, np.inf)
                    self.add([(before[3][i], 1.0), (early[i], -1.0)], 0.0, np.inf)
            before = (used, end, after, early)

    def length(self, k: int, j: int, start: int, end: int, used: int, mine: list[int]) -> None:
        """Add the rows for end - start >= curve(bytes of the slot).

        A slot that is used selects one group and one linear segment of the group's curve.
        """
        problem = self.problem
        groups = sorted({problem.tensors[i].group for i in mine}, key=str)
        whole = [(end, 1.0), (start, -1.0)]
        picks: list[int] = []
        for group in groups:
            members = [i for i in mine if problem.tensors[i].group == group]
            nbytes = sum(problem.tensors[i].nbytes for i in members)
            total = [(self.shares[j, k, i], problem.tensors[i].nbytes / nbytes) for i in members]
            stretches = list(_stretches(problem.links[k].curve_for(group[1]), nbytes))
            if len(groups) == len(stretches) == 1:
                _, y, slope, _ = stretches[0]
                whole += [(used, -y / self.scale), *((c, -slope * v * nbytes / self.scale) for c, v in total)]
                self.add(whole, 0.0, np.inf)
                return
            for x, y, slope, width in stretches:
                pick, extra = self.new(binary=True), self.new()
                picks.append(pick)
                self.add([(extra, 1.0), (pick, -width / nbytes)], -np.inf, 0.0)
                total += [(pick, -x / nbytes), (extra, -1.0)]
                whole += [(pick, -y / self.scale), (extra, -slope * nbytes / self.scale)]
            self.add(total, 0.0, 0.0)
        self.add([*((p, 1.0) for p in picks), (used, -1.0)], 0.0, 0.0)
        self.add(whole, 0.0, np.inf)

    def read(self, x: np.ndarray) -> BucketPlan:
        """The plan of a solution. Fractions become bytes; the rounding error goes to the tensor's largest piece."""
        sizes: dict[int, dict[tuple[int, int], int]] = {}
        for (j, k, i), c in self.shares.items():
            if (n := round(float(x[c]) * self.problem.tensors[i].nbytes)) > 0 and x[c] > 1e-6:
                sizes.setdefault(i, {})[j, k] = n
        rows: dict[tuple[int, int], list[Piece]] = {}
        for i, parts in sizes.items():
            largest = max(parts, key=lambda s: parts[s])
            parts[largest] += self.problem.tensors[i].nbytes - sum(parts.values())
            offset = 0
            for slot, n in sorted(parts.items()):
                rows.setdefault(slot, []).append(Piece(tensor=i, offset=offset, nbytes=n))
                offset += n
        messages = tuple(Message(pieces=tuple(p), link=k) for (_, k), p in sorted(rows.items()))
        return BucketPlan(policy="ours", messages=messages)


def _stretches(c: SendTime, most_bytes: float) -> Iterator[tuple[float, float, float, float]]:
    """The linear segments of the curve up to most_bytes: (first bytes, seconds there, seconds per byte, width)."""
    xs, ys = list(c.bytes_), list(c.seconds)
    if xs[0] > 0:
        xs, ys = [0.0, *xs], [ys[0], *ys]
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if x >= most_bytes:
            return
        if i + 1 < len(xs):
            width = xs[i + 1] - x
            yield x, y, (ys[i + 1] - y) / width, min(width, most_bytes - x)
        else:
            yield x, y, c.tail_s_per_byte, most_bytes - x
