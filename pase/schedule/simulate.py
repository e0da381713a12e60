"""Evaluates a bucket plan with a discrete-event simulation of several iterations. All policies are judged by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pase.errors import PaseError
from pase.schedule.engine import run_jobs
from pase.schedule.plan import BucketPlan, Message, check_plan
from pase.schedule.types import AxisGroup, ScheduleProblem

__all__ = ["Evaluation", "Interval", "as_sequence", "evaluate", "message_name", "message_seconds"]

MOST_PERIODS = 48


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A block or a message in the steady period. Times are in seconds from the start of the period.

    resource: "compute" or the name of a link.
    iteration: the iteration of the run, which distinguishes the periods.
    message: index into the plan's messages; None for a block.
    """

    resource: str
    name: str
    start_s: float
    end_s: float
    iteration: int
    message: int | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The cost of a plan per iteration in the steady state.

    compute_s: seconds of compute alone.
    exposed_s: seconds in which a link is busy while compute waits, with those that compute is held under any schedule
        (``ScheduleProblem.held_s``).
    bubble_s: seconds in which compute waits, for any reason.
    efficiency, speedup: TicTac's E and S, where U is the sum of all work and L is the busiest resource.
    """

    policy: str
    iteration_s: float
    compute_s: float
    exposed_s: float
    bubble_s: float
    link_busy_s: dict[str, float]
    updates_per_iteration: float
    staleness: int
    messages: int
    efficiency: float
    speedup: float
    timeline: tuple[Interval, ...] = field(default=(), repr=False)
    starts_s: np.ndarray | None = field(default=None, repr=False, compare=False)
    """Start of each message of the steady period, on the run's clock: float64 [messages]."""
    late: tuple[int, ...] = field(default=(), repr=False, compare=False)
    """For each message of the steady period, in which iteration it starts, counted from the last one that makes its
    gradients."""


def message_seconds(problem: ScheduleProblem, messages: tuple[Message, ...]) -> np.ndarray:
    """Seconds for which each message occupies its link, float64 [M]."""
    out = np.zeros(len(messages))
    by_curve: dict[tuple[int, AxisGroup], list[int]] = {}
    for i, m in enumerate(messages):
        by_curve.setdefault((m.link, problem.tensors[m.pieces[0].tensor].axes), []).append(i)
    for (link, axes), which in by_curve.items():
        sizes = np.asarray([messages[i].nbytes for i in which], float)
        out[which] = problem.links[link].curve_for(axes).seconds_of(sizes)
    return out


def evaluate(
    problem: ScheduleProblem,
    plan: BucketPlan,
    *,
    kernel: str = "auto",
    timeline: bool = True,
    check: bool = True,
    seconds: np.ndarray | None = None,
) -> Evaluation:
    """Run the plan until its period settles, and report the steady iteration.

    kernel: "python", "numba", or "auto", which chooses by the number of jobs.
    timeline: whether to record the intervals of the steady period.
    check: whether to check the plan with `check_plan` first.
    seconds: seconds of each message, used instead of the links' curves; float64 [M].

    Raises PaseError if the plan does not cover the problem, or if it deadlocks.
    """
    if check:
        check_plan(problem, plan)
    delayed = plan.period > 1 or plan.staleness > 0
    if delayed and any(t.lag == 0 or t.follows for t in problem.tensors):
        raise PaseError(
            f"the plan delays updates, but problem '{problem.name}' has tensors that are needed in their own iteration",
            where=f"plan '{plan.policy}'",
            fix="delay updates only for plain gradients",
        )
    periods = 3 if problem.is_plain and not delayed else 4 + 2 * delayed
    while True:
        run = _Periods(problem, plan, periods, seconds)
        start, end = run_jobs(kernel=kernel, **run.arrays)
        if np.isnan(end).any():
            stuck = int(np.flatnonzero(np.isnan(end))[0])
            raise PaseError(
                f"the plan deadlocks on problem '{problem.name}': {run.name(stuck)} never starts, because it waits for "
                "something that is later in the order",
                where=f"plan '{plan.policy}'",
                fix="send each message after those that its tensors follow",
            )
        marks = end[run.iteration_ends()][plan.period - 1 :: plan.period]
        steps = np.diff(np.concatenate(([0.0], marks)))
        steady = abs(steps[-1] - steps[-2]) <= 1e-9 * max(steps[-1], 1e-30)
        # Compute of a delayed plan can run ahead of the links for some time. The plan has settled only when the
        # backlog of messages limits it.
        load = max(run.link_load_s(), default=0.0)
        if (steady and steps[-1] >= load * (1 - 1e-9)) or periods >= MOST_PERIODS:
            break
        periods *= 2
    # A plan that never settles alternates between a few step times. Take their mean over the second half of the run.
    half = len(marks) // 2
    period_s = float(steps[-1]) if steady else float((marks[-1] - marks[half - 1]) / (len(marks) - half))
    period_s = max(period_s, load)
    return _report(problem, plan, run, start, end, period_s, timeline)


class _Periods:
    """The jobs of several periods as the arrays that `run_jobs` takes."""

    def __init__(
        self, problem: ScheduleProblem, plan: BucketPlan, periods: int, seconds: np.ndarray | None
    ) -> None:
        self.problem, self.plan, self.periods = problem, plan, periods
        self.nb = nb = len(problem.blocks) + 1  # a marker job ends each iteration
        self.iterations = periods * plan.period
        self.base = self.iterations * nb
        self.message_ids = list(self._instances())
        self.seconds_m = message_seconds(problem, plan.messages) if seconds is None else seconds
        pred, succ = self._edges()
        jobs = self.base + len(self.message_ids)
        m_of = np.asarray([m for _, m in self.message_ids], int)
        block_s = np.asarray([*(b.seconds for b in problem.blocks), 0.0])
        sizes = np.asarray([m.nbytes for m in plan.messages], float)
        order = np.argsort(succ_key := np.asarray(pred, int), kind="stable")
        strict_links = plan.dispatch == "sequence"
        links = len(problem.links)
        self.arrays = {
            "seconds": np.concatenate((np.tile(block_s, self.iterations), self.seconds_m[m_of])),
            "resource": np.concatenate(
                (np.zeros(self.base), [1.0 + plan.messages[m].link for m in m_of])
            ).astype(np.int64),
            "rank": np.concatenate((np.arange(self.base), self.base + self._ranks())).astype(np.int64),
            "npred": np.bincount(np.asarray(succ, int), minlength=jobs).astype(np.int64),
            "succ_ptr": np.searchsorted(succ_key[order], np.arange(jobs + 1)).astype(np.int64),
            "succ": np.asarray(succ, np.int64)[order],
            "hold": np.concatenate((np.zeros(self.base), [plan.messages[m].hold_s for m in m_of])),
            "size": np.concatenate((np.ones(self.base), sizes[m_of])),
            "credit": np.asarray([0.5] + [float(plan.credit_bytes)] * links),
            "strict": np.asarray([not problem.dataflow] + [strict_links] * links),
        }

    def _instances(self) -> Iterator[tuple[int, int]]:
        for p in range(self.periods):
            for m, message in enumerate(self.plan.messages):
                if p * self.plan.period + self.plan.updates[message.update].last < self.iterations:
                    yield p, m

    def _issue(self, p: int, m: int) -> tuple[int, int]:
        """The earliest (iteration, phase) in which the message may be issued; phase 0 is forward, 1 is backward."""
        message = self.plan.messages[m]
        at = p * self.plan.period + self.plan.updates[message.update].last + message.iteration
        return at, 0 if message.phase == "forward" else 1

    def _ranks(self) -> np.ndarray:
        keys = np.asarray([(*self._issue(p, m), p, m) for p, m in self.message_ids]).reshape(-1, 4)
        ranks = np.empty(len(keys), int)
        ranks[np.lexsort(keys.T[::-1])] = np.arange(len(keys))
        return ranks

    def _edges(self) -> tuple[list[int], list[int]]:
        """The dependencies as two lists: job i of the first list must end before job i of the second starts."""
        problem, plan, nb, base = self.problem, self.plan, self.nb, self.base
        blocks = problem.blocks
        first_of = {
            phase: next((i for i, b in enumerate(blocks) if b.phase == phase), 0)
            for phase in ("forward", "backward")
        }
        pred: list[int] = []
        succ: list[int] = []

        def edge(a: int, b: int) -> None:
            pred.append(a)
            succ.append(b)

        if problem.dataflow:
            for it in range(self.iterations):
                for b in range(nb - 1):
                    after = blocks[b].after
                    waits = after if after is not None else ((b - 1,) if b else ())
                    for a in waits:
                        edge(it * nb + a, it * nb + b)
                    if not waits and it:
                        edge(it * nb - 1, it * nb + b)
                    edge(it * nb + b, it * nb + nb - 1)

        holders = _holders(problem, plan)
        for j, (p, m) in enumerate(self.message_ids):
            job, message = base + j, plan.messages[m]
            update = plan.updates[message.update]
            it = p * plan.period + update.last
            waits_for: set[int] = set()
            for piece in message.pieces:
                t = problem.tensors[piece.tensor]
                if t.ready_after is not None:
                    waits_for.add(it * nb + t.ready_after)
                elif not t.follows and it:
                    waits_for.add(it * nb - 1)
                for f in t.follows:
                    scale = problem.tensors[f].nbytes / t.nbytes
                    lo_b, hi_b = piece.offset * scale, (piece.offset + piece.nbytes) * scale
                    for other, lo, hi in holders.get((message.update, f), ()):
                        if lo < hi_b - 1e-6 and hi > lo_b + 1e-6:
                            waits_for.add(
                                base + j - m + other
                            )  # of the same period, because no update is delayed here
                at = p * plan.period + update.at + 1 if t.lag else it
                if at < self.iterations:
                    block = nb - 1 if t.needed_before is None else t.needed_before
                    edge(job, at * nb + block)
                    if plan.barrier and t.lag:
                        edge(job, at * nb)
            if message.phase is not None:
                at, _ = self._issue(p, m)
                if at < self.iterations and at * nb + first_of[message.phase] > 0:
                    waits_for.add(at * nb + first_of[message.phase] - 1)
            compute = [w for w in waits_for if 0 <= w < base]
            if compute and not problem.dataflow:
                waits_for = {w for w in waits_for if w >= base} | {max(compute)}
            for w in waits_for:
                edge(w, job)
        return pred, succ

    def link_load_s(self) -> list[float]:
        """Seconds per period in which each link is busy."""
        on = np.asarray([m.link for m in self.plan.messages], int)
        return [float(self.seconds_m[on == k].sum()) for k in range(len(self.problem.links))]

    def iteration_ends(self) -> np.ndarray:
        return np.arange(self.iterations) * self.nb + self.nb - 1

    def name(self, job: int) -> str:
        if job >= self.base:
            p, m = self.message_ids[job - self.base]
            return f"message {m} ({message_name(self.problem, self.plan.messages[m])}) of period {p}"
        it, b = divmod(job, self.nb)
        return (
            f"block '{self.problem.blocks[b].name}' of iteration {it}" if b < self.nb - 1 else f"end of {it}"
        )


def _holders(problem: ScheduleProblem, plan: BucketPlan) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
    """(update, tensor) -> (message, first byte, end byte), for tensors that other tensors follow."""
    followed = {f for t in problem.tensors for f in t.follows}
    out: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    if followed:
        for m, message in enumerate(plan.messages):
            for p in message.pieces:
                if p.tensor in followed:
                    out.setdefault((message.update, p.tensor), []).append((m, p.offset, p.offset + p.nbytes))
    return out


def message_name(problem: ScheduleProblem, message: Message) -> str:
    """A short name of the message, for tables and drawings."""
    first, n = message.pieces[0], len(message.pieces)
    name = problem.tensors[first.tensor].name
    if n > 1:
        return f"{name} +{n - 1}"
    return name if first.nbytes == problem.tensors[first.tensor].nbytes else f"{name}[{first.offset}:]"


def _report(
    problem: ScheduleProblem,
    plan: BucketPlan,
    run: _Periods,
    start: np.ndarray,
    end: np.ndarray,
    period_s: float,
    timeline: bool,
) -> Evaluation:
    seconds = np.asarray(run.seconds_m, float)
    iteration_s = period_s / plan.period
    compute_s = problem.compute_s
    busy = {
        link.name: float(seconds[[m.link == i for m in plan.messages]].sum()) / plan.period
        for i, link in enumerate(problem.links)
    }
    marks = end[run.iteration_ends()]
    # The last period but one, because the end of the run does not cut it off.
    last = run.iterations - plan.period
    t1 = float(marks[last - 1])
    t0 = float(marks[last - plan.period - 1]) if last > plan.period else 0.0
    exposed_s = _exposed(run, start, end, t0, t1) / plan.period if t1 > t0 else 0.0
    upper, lower = compute_s + sum(busy.values()), max(compute_s, *busy.values())
    shown: tuple[Interval, ...] = ()
    if timeline:
        shown = tuple(_timeline(run, start, end, t0, t1))
    steady = run.periods - 2
    starts, late = np.full(len(plan.messages), np.nan), [0] * len(plan.messages)
    for j, (p, m) in enumerate(run.message_ids):
        if p == steady:
            starts[m] = start[run.base + j]
            made = p * plan.period + plan.updates[plan.messages[m].update].last
            late[m] = max(int(np.searchsorted(marks, starts[m] * (1 + 1e-12), side="right")) - made, 0)
    return Evaluation(
        policy=plan.policy,
        iteration_s=iteration_s,
        compute_s=compute_s - problem.held_s,
        exposed_s=exposed_s + problem.held_s,
        bubble_s=max(0.0, iteration_s - compute_s) + problem.held_s,
        link_busy_s=busy,
        updates_per_iteration=plan.updates_per_iteration,
        staleness=plan.staleness,
        messages=len(plan.messages),
        efficiency=(upper - iteration_s) / (upper - lower) if upper > lower else 1.0,
        speedup=(upper - lower) / lower if lower > 0 else 0.0,
        timeline=shown,
        starts_s=starts,
        late=tuple(late),
    )


def _exposed(run: _Periods, start: np.ndarray, end: np.ndarray, t0: float, t1: float) -> float:
    """Seconds in [t0, t1] in which a link is busy and compute is not."""
    b0, b1 = np.clip(start[run.base :], t0, t1), np.clip(end[run.base :], t0, t1)
    c0, c1 = np.clip(start[: run.base], t0, t1), np.clip(end[: run.base], t0, t1)
    return _union(np.concatenate((b0, c0)), np.concatenate((b1, c1))) - _union(c0, c1)


def _union(lo: np.ndarray, hi: np.ndarray) -> float:
    """Length of the union of the intervals [lo, hi]."""
    order = np.argsort(lo, kind="stable")
    lo, hi = lo[order], np.maximum.accumulate(hi[order])
    before = np.concatenate(([lo[0] if lo.size else 0.0], hi[:-1]))
    return float(np.maximum(0.0, hi - np.maximum(lo, before)).sum())


def _timeline(run: _Periods, start: np.ndarray, end: np.ndarray, t0: float, t1: float) -> Iterator[Interval]:
    problem = run.problem
    shown = np.flatnonzero((end > t0) & (start < t1) & (end > start))
    for job in shown[np.argsort(start[shown], kind="stable")].tolist():
        index = None
        if job < run.base:
            it, b = divmod(job, run.nb)
            resource, name = "compute", problem.blocks[b].name
        else:
            p, index = run.message_ids[job - run.base]
            message = run.plan.messages[index]
            it = p * run.plan.period + run.plan.updates[message.update].last
            resource, name = problem.links[message.link].name, message_name(problem, message)
        yield Interval(
            resource=resource,
            name=name,
            start_s=float(start[job]) - t0,
            end_s=float(end[job]) - t0,
            iteration=it,
            message=index,
        )


def as_sequence(problem: ScheduleProblem, plan: BucketPlan, *, kernel: str = "auto") -> BucketPlan:
    """The same plan with dispatch "sequence": messages in the order in which they start in the simulation.

    If each rank chose the first ready message, ranks could issue overlapping collectives in different orders and
    deadlock. A plan that runs on devices therefore needs one order. A delayed plan is returned unchanged.
    """
    from dataclasses import replace

    if plan.dispatch == "sequence" or plan.period > 1 or plan.staleness > 0:
        return plan  # each message of a delayed plan has its iteration and phase
    starts = evaluate(problem, plan, kernel=kernel, timeline=False).starts_s
    assert starts is not None
    order = np.argsort(starts, kind="stable")
    return replace(plan, messages=tuple(plan.messages[i] for i in order), dispatch="sequence", credit_bytes=1)
