"""Decides how far a replay can be trusted, from its error on held-out iterations compared with a naive prediction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pase.errors import Infeasible
from pase.replay.changes.balance import balanced_rows
from pase.replay.graph import EDGE, DataflowGraph
from pase.replay.measurement.model import Measured, OwnTimes, own_times
from pase.replay.measurement.times import UNSEEN_NS
from pase.replay.simulation.predict import HeldOut, held_out, held_out_ranks
from pase.replay.simulation.steady import Steady, evaluate, lengths_in_a_row, steady, stretched
from pase.replay.types import on_stream

__all__ = ["UNEXPLAINED", "Run", "busiest_ns", "unexplained_ns", "unexplained_share"]

UNEXPLAINED = 0.1
"""If a larger fraction of the critical path is unexplained, the replay of a changed run cannot be trusted."""
_GOOD = 0.01
"""A median error up to this is good enough, even if the mean of the other iterations predicts better."""
_POOR, _WRONG = 0.1, 0.5
"""A larger median or worst error cannot be trusted, even if the mean of the other iterations predicts worse."""
_ALLOWED = 0.05
"""How far outside of the range of the measured iterations the replay of the unchanged run may be."""
_IMPOSSIBLE = 0.5
"""If the replay is further outside than this, it is not even shown. Iterations of a busy machine differ by less."""
_PLAIN_NS = {"launch": 100_000.0, "stream": 30_000.0, "wait": 50_000.0, "handoff": UNSEEN_NS}
"""The longest delays that launches, streams, events and hand-offs explain. They may be up to three times as long if
most lags of the kind on the device are."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A measured run, its replay, and how far the replay can be trusted. All reports take their numbers from here."""

    measured: Measured

    @cached_property
    def iterations(self) -> list[int]:
        """The steady iterations. PaseError if no iteration is complete on every rank."""
        found = self.measured.steady()
        if not found:
            own_times(self.measured, found)  # raises an error that lists the iterations of the ranks
        return found

    @cached_property
    def _own(self) -> OwnTimes:
        return own_times(self.measured, self.iterations)

    @property
    def medians(self) -> DataflowGraph:
        """One iteration whose tasks take their median times. It is shorter than the mean iteration if ranks are late in
        turn or noise is skewed."""
        return self._own.graph

    @cached_property
    def stretch(self) -> float:
        """The ratio of the mean iteration, each replayed with its own times, to the replay of medians.

        It is 1 if fewer than two iterations can be replayed.
        """
        usual = max(evaluate(self.medians).values(), default=0.0)
        mean = _mean_ns(self.medians, self._own.own_ns, self._own.own_lag_ns)
        return mean / usual if mean is not None and usual > 0 else 1.0

    @cached_property
    def graph(self) -> DataflowGraph:
        """The mean iteration: the median time of each task, times ``stretch``.

        Changes are made to this graph, and ``changed_ns`` returns the resulting time.
        """
        return stretched(self.medians, self.stretch)

    def changed_ns(self, changed: DataflowGraph) -> float:
        """Returns the time (ns) of the iteration after a change of ``graph``.

        If only times changed, each iteration's own times are changed in proportion to the medians, and all iterations
        are replayed consecutively. So the change does not scale the time spent waiting for late ranks. A graph with
        other ops or waits is replayed as it is.

        With less work, ops whose order is not fixed by the trace may change their order, and the iteration may take
        longer (Graham, 1969). If no time increased but the replay did, devices run their ops in the present order. Then
        no op can end later, and the result is capped at the present time.
        """
        # A stream runs one op at a time, so an iteration is never shorter than the work that a change leaves to it.
        least = min(busiest_ns(changed), self.replayed_ns)
        ns = max(self._changed_ns(changed), least)
        if ns > self.replayed_ns and _only_shorter(self.graph, changed):
            return min(max(self._changed_ns(changed, in_order=True), least), self.replayed_ns)
        return ns

    def _changed_ns(self, changed: DataflowGraph, in_order: bool = False) -> float:
        mean = self._in_a_row(changed, in_order) if _same_tasks(self.graph, changed) else None
        if mean is None or self._as_it_is is None:
            return max(evaluate(changed, self.graph if in_order else None).values(), default=0.0)
        return self.replayed_ns * (mean / self._as_it_is)

    @cached_property
    def _as_it_is(self) -> float | None:
        return self._in_a_row(self.graph)

    def _in_a_row(self, changed: DataflowGraph, in_order: bool = False) -> float | None:
        """Returns the mean (ns) of the iterations with their own times, changed in proportion to the graph's times.

        in_order: each device runs its ops in the present order.
        """
        g, x = self.graph, self._own
        own = _as_the_medians(x.own_ns, g.duration_ns, changed.duration_ns)
        lag = _as_the_medians(x.own_lag_ns, g.lag_ns, changed.lag_ns)
        if changed.even:
            own, lag = balanced_rows(changed, own, lag)
        before = (x.graph, x.own_ns, x.own_lag_ns) if in_order else None
        return _mean_ns(stretched(changed, 1 / self.stretch), own, lag, before)

    @cached_property
    def replay(self) -> Steady:
        return steady(self.graph)

    @cached_property
    def held_out(self) -> list[HeldOut]:
        """Each iteration predicted from the others or, if there is only one, each rank from the other ranks."""
        if len(self.iterations) > 1:
            return held_out(self.measured, self.iterations)
        return held_out_ranks(self.measured, self.graph, self.iterations)

    @property
    def _kept_out(self) -> str:
        return "iterations" if len(self.iterations) > 1 else "ranks"

    def length_ns(self, iteration: int) -> float:
        """Returns the measured length of an iteration on the slowest rank."""
        return max(v for (_, i), v in self.measured.measured_ns.items() if i == iteration)

    @cached_property
    def lengths_ns(self) -> np.ndarray:
        """Measured lengths of the steady iterations."""
        return np.array([self.length_ns(i) for i in self.iterations])

    @property
    def measured_ns(self) -> float:
        """The measured time of an iteration: the mean of the steady ones."""
        return float(self.lengths_ns.mean())

    @property
    def replayed_ns(self) -> float:
        """The replayed time of an iteration, with which every what-if and every cost is compared."""
        return self.replay.iteration_ns

    @property
    def spread(self) -> float:
        """Half of the range of the steady iterations, relative to their mean."""
        return float(np.ptp(self.lengths_ns)) / 2 / self.measured_ns if self.measured_ns else 0.0

    def within_spread(self, speedup: float) -> bool:
        """Whether a change of that size is smaller than the variation between the run's own iterations."""
        return abs(speedup - 1) < self.spread

    def error(self, naive: bool = False, worst: bool = False) -> float | None:
        """Returns the median (or worst) absolute error of held-out predictions; None if there are none.

        naive: use the mean of the other iterations as prediction instead of the replay.
        """
        sizes = [abs(p.naive_error if naive else p.error) for p in self.held_out]
        if not sizes:
            return None
        return max(sizes) if worst else float(np.median(sizes))

    @cached_property
    def gaps_errors(self) -> tuple[float, float] | None:
        """The median error of iterations replayed with their own op times but the gaps of the other iterations, and the
        median error of the mean of the others; None if there are fewer than three iterations.

        A replay with an iteration's own gaps would just copy it. Every what-if assumes that gaps do not depend on the
        times of ops. If gaps are really waits for something that is not in the trace, this error is large.
        """
        own, gaps = self._own.own_ns, self._own.own_lag_ns
        if len(own) < 3:
            return None
        others = (gaps.sum(axis=0) - gaps) / (len(gaps) - 1)
        lengths = lengths_in_a_row(self.medians, own, others)
        if lengths is None:
            return None
        measured = self.lengths_ns
        naive = (measured.sum() - measured) / (len(measured) - 1)
        replayed = lengths.max(axis=1)
        error, plain = (
            float(np.median(np.abs(x / measured[: len(x)] - 1))) for x in (replayed, naive[: len(replayed)])
        )
        return error, plain

    @cached_property
    def unexplained(self) -> float:
        """The fraction of the replayed iteration that is delay without a known cause.

        It counts such delays on the critical path, and the contribution to the mean of delays that only some iterations
        have.
        """
        x = self._own
        whole, plain = (_mean_ns(x.graph, x.own_ns, lag) for lag in (x.own_lag_ns, x.plain_lag_ns))
        now_and_then = 1 - plain / whole if whole and plain is not None else 0.0
        return self._unexplained_path + max(now_and_then, 0.0)

    @cached_property
    def _unexplained_path(self) -> float:
        return unexplained_share(self.graph, self.replay)

    def _outside(self, allowed: float) -> str:
        """Returns how the replay of the unchanged run contradicts its iterations; empty if it does not."""
        low, high = float(self.lengths_ns.min()), float(self.lengths_ns.max())
        if low * (1 - allowed) <= self.replayed_ns <= high * (1 + allowed):
            return ""
        return (
            f"the replay of the unchanged run takes {self.replayed_ns / 1e6:.2f} ms, but its iterations take "
            f"{low / 1e6:.2f} to {high / 1e6:.2f} ms: {self._cause()}"
        )

    @cached_property
    def doubts(self) -> list[str]:
        """The reasons why a prediction of a changed run cannot be trusted; empty if it can."""
        lost = (
            f"{self.unexplained:.0%} of the critical path is delay before ops that could begin, while other ops ran "
            f"or nothing did, and nothing in the trace explains it{self._longest_delay()}"
        )
        return [
            *self._outside_doubts,
            *([lost] if self.unexplained > UNEXPLAINED else []),
            *self._other_doubts,
        ]

    @property
    def _outside_doubts(self) -> list[str]:
        outside = self._outside(_ALLOWED)
        return [outside] if outside else []

    @cached_property
    def _other_doubts(self) -> list[str]:
        """Doubts about the iterations, and about how well they are predicted."""
        out = [
            f"what is missing from {p.where} counts as time in which nothing ran"
            for p in self.measured.timeline.problems
            if p.is_cut
        ]
        cut = [x for x in self.measured.iteration_of.values() if x.number in self.iterations and x.partial]
        if cut:
            out.append(
                f"no iteration is complete (iteration {cut[0].number} on rank {cut[0].rank}: {cut[0].why_not})"
            )
        error, naive, worst = self.error(), self.error(naive=True), self.error(worst=True)
        if error is not None and worst is not None and (error > _POOR or worst > _WRONG):
            plain = self.error(naive=True, worst=True) or 0.0
            out.append(
                f"held-out {self._kept_out} are predicted with a median error of {error:.0%} and a worst error of "
                f"{worst:.0%} (the mean of the others: {naive or 0.0:.0%} and {plain:.0%})"
            )
        elif error is not None and naive is not None and error > max(_GOOD, 1.1 * naive):
            out.append(
                f"the mean of the other {self._kept_out} is a better prediction (median error {naive:.1%}) than the "
                f"replay ({error:.1%})"
            )
        gaps = self.gaps_errors
        if gaps is not None and gaps[0] > max(_GOOD, 1.1 * gaps[1]):
            out.append(
                f"a replay of an iteration's own ops with the gaps of the others has a median error of {gaps[0]:.1%}, "
                f"and the mean of the others has one of {gaps[1]:.1%}, so gaps are not constant"
            )
        return out

    @property
    def _stretch_doubts(self) -> list[str]:
        """Doubts about a change of more than times."""
        if abs(self.stretch - 1) <= _ALLOWED:
            return []
        usual = self.replayed_ns / self.stretch
        return [
            f"iterations take {self.replayed_ns / 1e6:.2f} ms on average, but {usual / 1e6:.2f} ms if each op takes "
            "its median time, and the trace does not show how other ops or waits change the difference"
        ]

    def _cause(self) -> str:
        """Returns the main part of a replay that is far from the measured iterations."""
        path = self.replay.path()
        if not path:
            return "nothing in the trace connects its ops"
        s = max(path, key=lambda s: s.added_ns)
        name = self.graph.task_name(s.task % self.replay.tasks)[:60]
        if s.lag_ns > 0.5 * s.added_ns:
            return f"most of it is a delay of {s.lag_ns / 1e6:.2f} ms before '{name}'"
        own = self.graph.duration_ns[[s.task % self.replay.tasks for s in path]].sum()
        if self.replayed_ns < self.lengths_ns.min():
            return f"ops and calls on its critical path take {own / 1e6:.2f} ms, and the rest is not in the trace"
        return f"most of it is '{name}', {s.added_ns / 1e6:.2f} ms"

    def _longest_delay(self) -> str:
        s = max(self.replay.path(), key=lambda s: s.lag_ns, default=None)
        if s is None or s.lag_ns <= 0:
            return ""
        name = self.graph.task_name(s.task % self.replay.tasks)[:60]
        return f", the longest {s.lag_ns / 1e6:.2f} ms before '{name}'"

    @property
    def is_tested(self) -> bool:
        """Whether iterations or ranks that were held out show how far the replay is off."""
        return self.error() is not None

    @property
    def headline(self) -> str:
        """The first line of every report: whether it can be trusted."""
        if self.doubts:
            return f"Do not rely on what-ifs of this run: {'; '.join(self.doubts)}."
        error, naive = self.error(), self.error(naive=True)
        if error is None or naive is None:
            return (
                "There is only one iteration, so there is none to test the replay on: the error of each predicted gain "
                "is unknown."
            )
        these = (
            "Held-out iterations" if len(self.iterations) > 1 else "There is one iteration; held-out ranks"
        )
        return (
            f"{these} are predicted within {error:.1%} in the median, {self.error(worst=True) or 0:.1%} at "
            f"worst (the mean of the others: {naive:.1%}, {self.error(naive=True, worst=True) or 0:.1%})."
        )

    def must_be_possible(self, what: str, force: bool) -> None:
        """Raises Infeasible, with the cause, if the replay of the unchanged run is far outside of its iterations."""
        outside = self._outside(_IMPOSSIBLE)
        if outside and not force:
            raise Infeasible(
                outside,
                where=what,
                fix="see where the measured time went with pase diagnose, or give --force to see the replay",
            )

    def judged(self, changed: DataflowGraph) -> tuple[float, str]:
        """Returns the iteration (ns) after a change, and why it cannot be trusted; an empty text if it can.

        Unexplained delay counts if it is on the changed run's critical path. So a change that removes it (a rank that
        is no longer late) can be trusted.
        """
        s, ns = steady(changed), self.changed_ns(changed)
        share = unexplained_share(changed, s) + self.unexplained - self._unexplained_path
        doubts = [*self._outside_doubts, *self._other_doubts]
        if not _same_tasks(self.graph, changed):
            doubts += self._stretch_doubts
        if share > UNEXPLAINED:
            doubts.append(
                f"{share:.0%} of the critical path would be delay that nothing in the trace explains, and that a "
                "change might move"
            )
        return ns, "; and ".join(doubts)

    def must_be_explained(self, what: str, changed: DataflowGraph) -> float:
        """Returns the iteration (ns) after a change. Raises Infeasible, with the reasons, if it cannot be trusted."""
        ns, doubt = self.judged(changed)
        if doubt:
            raise Infeasible(
                f"it is not predicted, because {doubt}", where=what, fix="give --force to predict it anyway"
            )
        return ns

    def must_be_believed(self, what: str, force: bool) -> None:
        """Raises Infeasible, with the reasons, if changes of the run's ops and waits cannot be predicted."""
        doubts = [*self.doubts, *self._stretch_doubts]
        if doubts and not force:
            raise Infeasible(
                f"it is not predicted, because {'; and '.join(doubts)}",
                where=what,
                fix="give --force to predict it anyway",
            )


def _mean_ns(
    g: DataflowGraph,
    own_ns: np.ndarray,
    lag_ns: np.ndarray,
    before: tuple[DataflowGraph, np.ndarray, np.ndarray] | None = None,
) -> float | None:
    """Returns the mean length (ns) of consecutively replayed iterations; see ``lengths_in_a_row``."""
    lengths = lengths_in_a_row(g, own_ns, lag_ns, before)
    return None if lengths is None else float(lengths.max(axis=1).mean())


def _as_the_medians(own: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Returns own times, changed in proportion to their medians, or by the same amount if the median was 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(before > 0, own * (after / before), own + after)


def _same_tasks(g: DataflowGraph, changed: DataflowGraph) -> bool:
    """Whether the changed graph differs only in times."""
    return all(
        np.array_equal(a, b)
        for a, b in (
            (g.device, changed.device),
            (g.gang, changed.gang),
            (g.priority, changed.priority),
            (g.src, changed.src),
            (g.dst, changed.dst),
            (g.carried.src, changed.carried.src),
            (g.carried.dst, changed.carried.dst),
        )
    )


def _only_shorter(g: DataflowGraph, changed: DataflowGraph) -> bool:
    """Whether the changed graph differs only in times, and none of them is longer than before."""
    if not _same_tasks(g, changed):
        return False
    times = (
        (g.duration_ns, changed.duration_ns),
        (g.lag_ns, changed.lag_ns),
        (g.carried.lag_ns, changed.carried.lag_ns),
        (g.release_ns, changed.release_ns),
        (g.device_free_ns, changed.device_free_ns),
    )
    return all(bool((after <= before + 1e-6).all()) for before, after in times)


def busiest_ns(g: DataflowGraph) -> float:
    """Returns the time (ns) of the ops on the stream that is busy longest."""
    work = np.bincount(g.device, weights=g.duration_ns * on_stream(g.kind), minlength=len(g.devices))
    return float(work.max(initial=0.0))


def unexplained_share(g: DataflowGraph, replay: Steady) -> float:
    """Returns the fraction of a replay's critical path that is delay without a known cause."""
    lost = unexplained_ns(g)
    total = sum(min(s.lag_ns, float(lost[s.task % replay.tasks])) for s in replay.path())
    return total / replay.iteration_ns if replay.iteration_ns else 0.0


def unexplained_ns(g: DataflowGraph) -> np.ndarray:
    """Returns the delay (ns) before each task that no launch, stream, event or hand-off explains; float64 [tasks]."""
    out = _since_the_beginning(g)
    dst = np.concatenate([g.dst, g.carried.dst])
    lag = np.concatenate([g.lag_ns, g.carried.lag_ns])
    kind = np.concatenate([g.edge_kind, g.carried.kind])
    device = g.device[dst]
    for name, plain in _PLAIN_NS.items():
        mine = np.flatnonzero(kind == EDGE[name])
        mine = mine[on_stream(g.kind[dst[mine]])] if name != "handoff" else mine
        for d in np.unique(device[mine]):
            these = mine[device[mine] == d]
            usual = min(max(plain, 3 * float(np.median(lag[these]))), 3 * plain)
            np.maximum.at(out, dst[these], np.maximum(lag[these] - usual, 0.0))
    return out


def _since_the_beginning(g: DataflowGraph) -> np.ndarray:
    """Returns the delay (ns) since the iteration's start of tasks without any predecessor; float64 [tasks]."""
    out = np.zeros(len(g))
    waits = np.zeros(len(g), dtype=bool)
    waits[g.dst] = waits[g.carried.dst] = True
    for rank in g.ranks:
        mine = np.flatnonzero(~waits & (g.rank == rank))
        if len(mine):
            begin = g.release_ns[g.root[rank]] if rank in g.root else g.release_ns[mine].min()
            out[mine] = np.maximum(g.release_ns[mine] - begin - _PLAIN_NS["handoff"], 0.0)
    return out
