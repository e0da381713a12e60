"""DeFT: fills forward and backward with communication like knapsacks, and delays and merges updates. Meng & Sun, 2025.

It consists of the Profiler (`profile`), the Solver (`solve`) and the Preserver (`pase.schedule.preserver`), with
feedback: if the Preserver fails a plan, the knapsacks grow and the Solver runs again, up to ten times.

Differences from the paper:
- Algorithm 2 is missing from the paper; `solve` follows its four cases.
- The second capacity of Problem 2 is the stage's time divided by mu, not multiplied. Here every link has the stage's
  time as capacity, and each bucket has its own time on each link.
- Algorithm 1 ignores when buckets become ready, so it overruns backward. With `release_aware` (the default), a knapsack
  takes only buckets that can be ready in time. The printed form (`release_aware=False`) is kept for the paper's
  figures.
- Updates average over the merged batches and skip the optimizer in between. The released code steps with zeros, and
  sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pase.errors import Infeasible
from pase.schedule.plan import BucketPlan, Message, Piece, Update
from pase.schedule.preserver import TrainingState, Verdict, judge
from pase.schedule.registry import Options, register
from pase.schedule.types import ScheduleProblem
from pase.schedule.view import can_fuse, plain_view, ready_order

__all__ = ["Horizon", "Profile", "Send", "deft", "profile", "solve"]

RETRIES = 10
GROWTH = 1.2
HORIZON = 600
"""The Solver's state must repeat within this many iterations, because a plan must be periodic."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Buckets in the order in which they become ready (DeFT's N … 1). Times are in seconds.

    pieces: the pieces of each bucket.
    ready_s: when each bucket is ready, from the start of backward.
    seconds: float64 [buckets, links]; inf if the link does not carry the bucket.
    """

    pieces: tuple[tuple[Piece, ...], ...]
    ready_s: np.ndarray
    seconds: np.ndarray
    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class Send:
    """One bucket of one generation of gradients, sent in a phase of an iteration on a link."""

    bucket: int
    generation: int
    iteration: int
    phase: str
    link: int


@dataclass(frozen=True, kw_only=True)
class Horizon:
    """The Solver's result.

    sends: everything that is sent. generations: the (first, last, applied after) iterations of every generation of
    gradients that is applied within the horizon.
    """

    sends: tuple[Send, ...]
    generations: dict[int, tuple[int, int, int]]
    period: tuple[int, int] | None
    """The iterations [begin, end) of one period of the state; None if it does not repeat."""

    @property
    def updates(self) -> int:
        return len(self.generations)


def profile(problem: ScheduleProblem, partition_bytes: int) -> Profile:
    """Fuse or cut the tensors to buckets of the partition size, and cut further until each fits the smallest knapsack.

    DeFT III.D: 6.5 M parameters per bucket. Then every bucket must be shorter than forward / mu, which means shorter
    than forward on every link that it may use.
    """
    view = plain_view(problem)
    cut = min(t.ready_after or 0 for t in problem.tensors)
    backward_s = sum(b.seconds for b in problem.blocks[cut:] if b.phase == "backward")
    forward_s = view.compute - backward_s
    pieces: list[tuple[Piece, ...]] = []
    members: list[int] = []
    for t in [*ready_order(problem), None]:
        size = sum(problem.tensors[i].nbytes for i in members)
        if members and (
            t is None
            or size + problem.tensors[t].nbytes > partition_bytes
            or not can_fuse(problem, members, t)
        ):
            pieces += _cut(problem, members, size, partition_bytes, forward_s)
            members = []
        if t is not None:
            members.append(t)
    ready = np.asarray([max(view.ready[p.tensor] for p in b) for b in pieces])
    seconds = np.full((len(pieces), len(problem.links)), np.inf)
    for i, b in enumerate(pieces):
        for k in problem.links_for(b[0].tensor):
            seconds[i, k] = problem.message_s(k, b[0].tensor, sum(p.nbytes for p in b))
    return Profile(
        pieces=tuple(pieces), ready_s=ready, seconds=seconds, forward_s=forward_s, backward_s=backward_s
    )


def _cut(
    problem: ScheduleProblem, members: list[int], size: int, partition_bytes: int, forward_s: float
) -> list[tuple[Piece, ...]]:
    """The members as one bucket, or as equal parts that are short enough for both limits."""
    t = members[0]
    parts = -(-size // partition_bytes)
    while max(problem.message_s(k, t, size / parts) for k in problem.links_for(t)) >= forward_s:
        parts += 1
        if parts > 10_000:
            raise Infeasible(
                f"no part of tensor '{problem.tensors[t].name}' can be sent within forward's {forward_s:.3g} s, so "
                "DeFT has no knapsack for it",
                where=f"problem '{problem.name}'",
                fix="use another policy",
            )
    edges = np.linspace(0, size, parts + 1).round().astype(int).tolist()
    out: list[list[Piece]] = [[] for _ in range(parts)]
    start = 0
    for i in members:
        n = problem.tensors[i].nbytes
        for j in range(parts):
            a, b = max(edges[j], start), min(edges[j + 1], start + n)
            if a < b:
                out[j].append(Piece(tensor=i, offset=a - start, nbytes=b - a))
        start += n
    return [tuple(p) for p in out if p]


Chosen = dict[int, int]
"""bucket -> link."""


def _knapsack(p: Profile, items: Sequence[int], room: np.ndarray) -> Chosen:
    """Greedy multi-knapsack in O(N M): knapsacks by rising capacity, items by falling time, first fit.

    Capacities are compared in units of the fastest link.
    """
    relative = np.asarray([np.median(p.seconds[:, k] / p.seconds.min(1)) for k in range(room.size)])
    chosen: Chosen = {}
    left = room.copy()
    longest = sorted(items, key=lambda i: (-p.seconds[i].min(), i))
    for k in np.argsort(room / relative, kind="stable").tolist():
        for i in longest:
            if i not in chosen and p.seconds[i, k] <= left[k] + 1e-15:
                chosen[i] = k
                left[k] -= p.seconds[i, k]
    return chosen


def _worth(p: Profile, chosen: Chosen) -> float:
    return float(sum(p.seconds[i].min() for i in chosen))


def _printed_recursive(p: Profile, items: Sequence[int], room: np.ndarray) -> Chosen:
    """Algorithm 1 as printed: try to drop the first-ready bucket together with the backward time after it."""
    best: Chosen = {}
    left = room.copy()
    for start in range(len(items)):
        if (left <= 0).all():
            break
        chosen = _knapsack(p, items[start:], np.maximum(left, 0.0))
        if _worth(p, chosen) > _worth(p, best):
            best = chosen
        if start + 1 < len(items):
            left = left - (p.ready_s[items[start + 1]] - p.ready_s[items[start]])
    return best


def _released(p: Profile, items: Sequence[int], room: np.ndarray, end_s: float) -> Chosen:
    """The buckets to send by end_s with the largest total time, considering when each becomes ready.

    Sending in order of readiness is optimal for a common deadline, so a set fits a link if and only if it fits in that
    order. Slow links come first, as in the knapsack. On each link, a dynamic program keeps the (finish, worth) pairs
    that no other pair dominates.
    """
    chosen: Chosen = {}
    for k in np.argsort(-np.median(p.seconds, axis=0), kind="stable").tolist():
        begin = end_s - float(room[k])
        states: list[tuple[float, float, tuple[int, ...]]] = [(begin, 0.0, ())]
        for i in sorted((i for i in items if i not in chosen), key=lambda i: (p.ready_s[i], i)):
            d = float(p.seconds[i, k])
            more = [
                (finish, worth + float(p.seconds[i].min()), (*which, i))
                for f, worth, which in states
                if (finish := max(f, float(p.ready_s[i])) + d) <= end_s + 1e-15
            ]
            states = _undominated([*states, *more])
        for i in max(states, key=lambda s: (s[1], -s[0]))[2]:
            chosen[i] = k
    return chosen


def _undominated(
    states: list[tuple[float, float, tuple[int, ...]]], most: int = 256
) -> list[tuple[float, float, tuple[int, ...]]]:
    """The states that no other state dominates in finish and worth. If there are more than `most`, a uniform sample."""
    states.sort(key=lambda s: (s[0], -s[1]))
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for s in states:
        if not kept or s[1] > kept[-1][1] + 1e-15:
            kept.append(s)
    if len(kept) > most:
        step = (len(kept) - 1) / (most - 1)
        kept = [kept[round(i * step)] for i in range(most)]
    return kept


def solve(
    p: Profile,
    *,
    capacity: float = 1.0,
    release_aware: bool = True,
    iterations: int = HORIZON,
    stop: bool = True,
) -> Horizon:
    """Run the Solver's two queues and four cases, iteration by iteration, until the state repeats.

    capacity: factor on the knapsacks, which the Preserver's feedback raises.
    release_aware: whether knapsacks consider when buckets become ready.
    stop: whether to stop when the period is known.
    """
    links = p.seconds.shape[1]
    forward, backward = np.full(links, p.forward_s * capacity), np.full(links, p.backward_s * capacity)
    every = tuple(range(len(p.pieces)))
    current: list[int] = []
    k_current = k_future = 0
    generation, first, future_first = -1, 0, 0
    last_of: dict[int, tuple[int, int]] = {}
    generations: dict[int, tuple[int, int, int]] = {}
    sends: list[Send] = []
    seen: dict[tuple[object, ...], int] = {}
    period: tuple[int, int] | None = None

    def send(chosen: Chosen, g: int, iteration: int, phase: str) -> None:
        sends.extend(
            Send(bucket=i, generation=g, iteration=iteration, phase=phase, link=k) for i, k in chosen.items()
        )

    def select(room: np.ndarray) -> Chosen:
        if release_aware:
            return _released(p, every, room, p.backward_s * capacity)
        return _printed_recursive(p, every, room)

    for it in range(iterations):
        state = (tuple(current), k_current, k_future)
        if state in seen and period is None:
            period = (seen[state], it)
        seen.setdefault(state, it)
        if stop and period is not None and it >= period[1] + 2 * (period[1] - period[0]) + 2:
            break
        if current:  # case 1
            chosen = _knapsack(p, current, forward)
            send(chosen, generation, it, "forward")
            current = [i for i in current if i not in chosen]
        if k_future == 0:
            future_first = it
        k_future += 1
        fits = _knapsack(p, current, backward)
        if len(fits) < len(current):  # case 2: this iteration's gradients are merged with those kept
            send(fits, generation, it, "backward")
            current = [i for i in current if i not in fits]
            continue
        send(fits, generation, it, "backward")  # case 3; in case 4 there is nothing to send
        if k_current:
            generations[generation] = (*last_of[generation], it)
        room = backward.copy()
        for i, k in fits.items():
            room[k] -= p.seconds[i, k]
        generation, first = generation + 1, future_first
        last_of[generation] = (first, it)
        chosen = select(room)
        send(chosen, generation, it, "ready")
        current = [i for i in every if i not in chosen]
        k_current, k_future = k_future, 0
    return Horizon(sends=tuple(sends), generations=generations, period=period)


def to_plan(p: Profile, solution: Horizon) -> BucketPlan:
    """The steady period as a bucket plan. Iterations are counted from the start of the period."""
    assert solution.period is not None
    begin, end = solution.period
    chosen = [g for g, (_, last, _) in solution.generations.items() if begin <= last < end]
    origin = min(solution.generations[g][0] for g in chosen)
    updates = {}
    for u, g in enumerate(chosen):
        first, last, at = solution.generations[g]
        updates[g] = (u, Update(first=first - origin, last=last - origin, at=at - origin))
    messages = []
    for s in solution.sends:
        if s.generation in updates:
            u, update = updates[s.generation]
            messages.append(
                Message(
                    pieces=p.pieces[s.bucket],
                    link=s.link,
                    update=u,
                    iteration=s.iteration - origin - update.last,
                    phase=None if s.phase == "ready" else "forward" if s.phase == "forward" else "backward",
                )
            )
    return BucketPlan(
        policy="deft",
        messages=tuple(messages),
        dispatch="priority",
        barrier=True,
        period=end - begin,
        updates=tuple(u for _, u in updates.values()),
    )


@register(
    "deft",
    "DeFT: knapsacks filled across iterations, delayed and merged updates",
    plain_only=True,
    delays=True,
)
def deft(problem: ScheduleProblem, options: Options) -> BucketPlan:
    """The Solver's plan at the smallest capacity that passes the Preserver and keeps to the allowed staleness."""
    walk = options.walk or TrainingState()
    p = profile(problem, options.partition_elements * 4)
    best: tuple[BucketPlan, Verdict, int] | None = None
    stale: list[int] = []
    for retry in range(RETRIES + 1):
        solution = solve(p, capacity=GROWTH**retry)
        if solution.period is None:
            continue
        plan = to_plan(p, solution)
        verdict = judge(walk, [u.batches for u in plan.updates])
        stale.append(plan.staleness)
        if plan.staleness <= options.staleness:
            best = plan, verdict, retry
            if verdict.passed:
                break
    if best is None:
        larger = f"even with knapsacks {GROWTH**RETRIES:.1f} times as large"
        if not stale:
            raise Infeasible(
                f"DeFT's schedule does not repeat within {HORIZON} iterations, {larger}",
                where=f"problem '{problem.name}'",
                fix="use another policy",
            )
        raise Infeasible(
            f"DeFT needs gradients at least {min(stale)} iterations old, {larger}, but {options.staleness} are allowed",
            where=f"problem '{problem.name}'",
            fix=f"allow them with --staleness {min(stale)}",
        )
    plan, verdict, retry = best
    detail = {
        "preserver": str(verdict),
        "passed": verdict.passed,
        "ratio": verdict.ratio,
        "retries": retry,
        "capacity": GROWTH**retry,
        "buckets": len(p.pieces),
    }
    return replace(plan, detail=detail)
