"""Lower bounds on the iteration that hold for every plan: for any fusion, partition, order and choice of links."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pase.schedule.types import ScheduleProblem, SendTime
from pase.schedule.view import PlainView, plain_view, positions

__all__ = ["delayed_bound_s", "jackson_s", "lower_bound_s", "preemptive_bound_s"]


def jackson_s(ready: np.ndarray, seconds: np.ndarray, tail: np.ndarray) -> float:
    """The least max(end + tail) on one machine with free preemption. All arrays are float64 [n].

    The optimum always runs the ready job with the longest tail. Jackson 1955; Carlier, EJOR 1982.

    >>> jackson_s(np.array([0.0, 2.0]), np.array([5.0, 1.0]), np.array([0.0, 9.0]))
    12.0
    """
    from pase.schedule.kernels_chain import jackson

    return float(jackson(ready, seconds.astype(float), tail, np.argsort(ready, kind="stable")))


def _minorants(curve: SendTime, most_bytes: float) -> Iterator[tuple[float, float]]:
    """Pairs (a, b) with a + b * bytes <= seconds for every message of at most this many bytes."""
    yield 0.0, curve.best_s_per_byte(most_bytes)
    a = curve.startup_s
    xs = [x for x in curve.bytes_ if 0 < x < most_bytes] + [most_bytes]
    yield a, min((curve.seconds_for(x) - a) / x for x in xs)


def _weights(rates: np.ndarray) -> list[np.ndarray]:
    """Weights over the links to try. rates: seconds per byte [groups, links]; inf if the link does not carry it."""
    links = rates.shape[1]
    out = [row for row in np.eye(links)]
    if links > 1:
        for row in rates:
            with np.errstate(divide="ignore"):
                speed = np.where(np.isfinite(row) & (row > 0), 1.0 / row, 0.0)
            if speed.sum() > 0:
                out.append(speed / speed.sum())
    return out


def _table(problem: ScheduleProblem) -> tuple[np.ndarray, list[list[SendTime | None]]]:
    """(axis group of each tensor, curve of each group on each link)."""
    axes = sorted({t.axes for t in problem.tensors}, key=str)
    which = np.asarray([axes.index(t.axes) for t in problem.tensors], int)
    return which, [[k.curve_for(g) if k.carries(g) else None for k in problem.links] for g in axes]


def _least_weighted(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The minimum over the links of weight * value, without values that are inf. values: [..., links]."""
    finite = np.isfinite(values)
    return np.where(finite, weights * np.where(finite, values, 0.0), np.inf).min(-1)


def _relaxations(problem: ScheduleProblem) -> Iterator[tuple[float, np.ndarray]]:
    """Relaxations of the links to a single machine, each as (startup, seconds per tensor).

    Let w >= 0 be weights of the links that sum to 1. Within any time window, the weighted busy time of the links is at
    most the window. By linear-programming duality it is at least the sum over tensors of the minimum over links of
    w * seconds. The weights tried are each link alone (for tensors that only it may carry), and the links' relative
    speeds.
    """
    most = float(problem.nbytes)
    nbytes = np.asarray([t.nbytes for t in problem.tensors], float)
    which, curves = _table(problem)
    for kind in (0, 1):
        pairs = [
            [(np.inf, np.inf) if c is None else list(_minorants(c, most))[kind] for c in row]
            for row in curves
        ]
        a, b = np.asarray(pairs)[..., 0], np.asarray(pairs)[..., 1]
        for w in _weights(b):
            seconds = _least_weighted(w, b)[which] * nbytes
            if seconds.any():
                yield float(_least_weighted(w, a).min()), seconds


def _crowded_s(problem: ScheduleProblem, view: PlainView, low: float, high: float) -> float:
    """A lower bound by bisection: the smallest iteration K in [low, high] that passes a necessary test.

    A message that holds tensor i can take at most K - ready_i - tail_i seconds. Its size is therefore at most
    `bytes_within` this time, and each byte of i costs at least the best rate up to this size. With these costs, the
    one-machine bounds must not exceed K. If startups matter, this limits how few messages there can be.
    """
    which, curves = _table(problem)
    most = float(problem.nbytes)
    rates = np.asarray([[np.inf if c is None else c.best_s_per_byte(most) for c in row] for row in curves])
    weights = _weights(rates)

    def survives(k: float) -> bool:
        room = k - view.ready - view.tail
        rate = np.full((view.ready.size, len(problem.links)), np.inf)
        for g, row in enumerate(curves):
            mine = which == g
            for j, c in enumerate(row):
                if c is not None:
                    rate[mine, j] = c.best_rates(np.minimum(c.bytes_within(room[mine]), most))
        if np.isinf(rate).all(1).any():
            return False
        return all(
            jackson_s(view.ready, _least_weighted(w, rate) * view.nbytes, view.tail) <= k * (1 + 1e-12)
            for w in weights
        )

    if survives(low):
        return low
    for _ in range(22):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if survives(middle) else (middle, high)
    return low


def preemptive_bound_s(problem: ScheduleProblem, view: PlainView | None = None) -> float:
    """The bound for plain problems without startups: preemptive priority without overhead."""
    view = view or plain_view(problem)
    zero = (s for a, s in _relaxations(problem) if a == 0.0)
    return max([view.compute, *(jackson_s(view.ready, s, view.tail) for s in zero)])


def lower_bound_s(problem: ScheduleProblem, *, view: PlainView | None = None) -> float:
    """Seconds of an iteration that no plan without staleness can be shorter than."""
    best = problem.compute_s
    if not problem.tensors:
        return best
    if problem.is_plain:
        view = view or plain_view(problem)
        for startup, seconds in _relaxations(problem):
            best = max(best, startup + jackson_s(view.ready, seconds, view.tail))
        return _crowded_s(problem, view, best, 2.0 * best) if best > problem.compute_s else best
    for startup, seconds in _relaxations(problem):
        best = max(best, startup + float(seconds.sum()))
        if not problem.dataflow:
            best = max(best, startup + _window_s(problem, seconds))
    return best


def _window_s(problem: ScheduleProblem, seconds: np.ndarray) -> float:
    """The largest bound over pairs of blocks (a, b): communication between them plus compute outside.

    Tensors that are ready only after block a and needed before block b must be sent between the two. The compute from
    b through a, across the end of the iteration, comes in addition.
    """
    n = len(problem.blocks)
    ready, need = (np.asarray(x, int) for x in positions(problem))
    upto = np.concatenate(([0.0], np.cumsum([b.seconds for b in problem.blocks])))
    best = 0.0
    for lag in (0, 1):
        # A window must be shorter than one iteration: a < b if it ends in the same iteration, b <= a if in the next.
        a_of, b_of = ready, need - lag * n
        mine = ((b_of > a_of) & (b_of <= n)) if lag == 0 else ((b_of <= a_of) & (b_of >= 0))
        if not mine.any():
            continue
        a_values, a_index = np.unique(a_of[mine], return_inverse=True)
        b_values, b_index = np.unique(b_of[mine], return_inverse=True)
        load = np.zeros((a_values.size, b_values.size))
        np.add.at(load, (a_index, b_index), seconds[mine])
        load = np.cumsum(np.cumsum(load[::-1], axis=0)[::-1], axis=1)  # ready >= a and needed <= b
        before_b, through_a = upto[b_values][None, :], upto[a_values + 1][:, None]
        outside = upto[-1] - before_b + through_a if lag == 0 else through_a - before_b
        valid = (
            (b_values[None, :] > a_values[:, None]) if lag == 0 else (b_values[None, :] <= a_values[:, None])
        )
        best = max(best, float(np.where(valid & (load > 0), load + outside, 0.0).max()))
    return best


def delayed_bound_s(problem: ScheduleProblem, staleness: int) -> float:
    """Seconds of an iteration that no plan with at most this staleness can be shorter than.

    It is the larger of the compute and the links' load with one update every staleness + 1 iterations.
    """
    load = max((startup + float(s.sum()) for startup, s in _relaxations(problem)), default=0.0)
    return max(problem.compute_s, load / (staleness + 1))
