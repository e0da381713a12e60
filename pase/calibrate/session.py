"""Measures a suite within a time budget: warm-up, repeats, median and spread; measures doubtful points again."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pase.calibrate.journal import Journal
from pase.calibrate.types import COLLECTIVE_OPS, Bench, Sample, Task

__all__ = ["SessionResult", "Settings", "measure", "remeasured", "session", "spread"]

_MOST_REMEASURED = 60

_SLOWER_THAN_BUDGET, _SLOWER_AT_ALL = 1 / 30, 1 / 6
_BEYOND_STARTUP = 8.0
_MESSAGE_THAT_TELLS = 1 << 20
_DISTURBED, _TRIES = 0.2, 5
"""The number of cores that other programs may use while a sample is measured (the resolution of the host's accounting
is no finer), and the number of tries."""
_LOOKS, _GROWTH, _MOST_TRIPS = 3, 100.0, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How long and how carefully to measure.

    budget_s: the time budget for all tasks. Tasks of rank 0 are measured even beyond it, but with a single try.
    program_s: an op is repeated inside one program until the program takes this long, so that dispatch is negligible.
    repeats: (fewest, most) timed runs of a program.
    steady: if the spread is above this, the program is run more often.
    max_spread: a sample with a larger spread is measured again in a resumed session, and rejected by the fit.
    """

    budget_s: float = 300.0
    program_s: float = 0.01
    repeats: tuple[int, int] = (5, 15)
    steady: float = 0.1
    max_spread: float = 0.5


@dataclass(frozen=True, kw_only=True)
class SessionResult:
    """The outcome of a session.

    measured: number of tasks measured now. resumed: number of tasks taken from the journal.
    too_slow: keys of tasks left out because each would use too much of the budget.
    beyond: number of tasks that the budget did not reach.
    """

    measured: int
    resumed: int
    too_slow: tuple[str, ...]
    beyond: int
    seconds: float


def spread(times: Iterable[float]) -> float:
    """Returns the interquartile range divided by the median.

    >>> spread([1.0, 1.0, 1.0, 1.0]), spread([1.0, 2.0, 3.0])
    (0.0, 0.5)
    """
    low, middle, high = np.percentile(list(times), [25, 50, 75])
    return float((high - low) / middle)


def measure(task: Task, bench: Bench, settings: Settings, tries: int = _TRIES) -> Sample:
    """Measures one task, compiled and warmed up.

    If other programs used the host's cores meanwhile, it is measured again, up to ``tries`` times. The sample with the
    least use of cores by other programs is returned.
    """
    run = bench.prepare(task)
    run(1)
    found: list[Sample] = []
    while not found or (found[-1].others > _DISTURBED and len(found) < tries):
        began, others = bench.now(), bench.others_s()
        sample = _sampled(task, run, bench, settings)
        took = max(bench.now() - began, 1e-9)
        found.append(replace(sample, others=max(bench.others_s() - others, 0.0) / took))
    return min(found, key=lambda s: s.others)


def _sampled(task: Task, run: Callable[[int], float], bench: Bench, settings: Settings) -> Sample:
    """Chooses the number of repetitions, and times the program. The time of the slowest process counts."""
    inner = 1
    # Grow the program until its ops dominate dispatch. Take the best of three runs, in case one is interrupted.
    while task.op != "dispatch":
        took = min(max(v) for v in zip(*bench.share([run(inner) for _ in range(_LOOKS)]), strict=True))
        if took >= settings.program_s / 2 or inner == _MOST_TRIPS:
            break
        inner = min(math.ceil(inner * min(settings.program_s / max(took, 1e-9), _GROWTH)), _MOST_TRIPS)
    fewest, most = settings.repeats
    times: list[float] = []
    for _ in range(2):
        mine = [run(inner) / inner for _ in range(fewest)]
        times += [max(t) for t in zip(*bench.share(mine), strict=True)]
        if len(times) + fewest > most or spread(times) <= settings.steady:
            break
    return Sample(
        key=task.key, seconds=statistics.median(times), spread=spread(times), repeats=len(times), inner=inner
    )


class _Forecast:
    """Forecasts a lower bound of a task's time, from the best rate of smaller tasks of its family."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str, tuple[int, ...]], list[tuple[float, float]]] = {}

    def saw(self, task: Task, seconds: float) -> None:
        self.seen.setdefault(task.family, []).append((task.work, seconds))

    def too_slow(self, task: Task, settings: Settings) -> bool:
        """Whether a task would use too much of the budget.

        A curve needs two points, however slow they are. It also needs a point at which the bytes dominate the startup,
        because beyond the last point the curve continues at that point's rate. Until there is one, a task may take
        longer.
        """
        known = self.seen.get(task.family, [])
        if len(known) < 2:
            return False
        seconds = [s for _, s in known]
        tells = max(seconds) > _BEYOND_STARTUP * min(seconds)
        if task.op in COLLECTIVE_OPS:
            # Stragglers can make a small message as slow as a large one, so the size itself must be large.
            tells = tells and max(w for w, _ in known) >= _MESSAGE_THAT_TELLS
        share = _SLOWER_THAN_BUDGET if tells else _SLOWER_AT_ALL
        one = min(s / w for w, s in known) * task.work
        return one * (1 + _LOOKS + settings.repeats[0]) > max(settings.budget_s * share, 0.1)


def session(
    tasks: Iterable[Task],
    bench: Bench,
    journal: Journal,
    settings: Settings,
    say: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> SessionResult:
    """Measures tasks in order until the budget is spent. Samples in the journal are not measured again.

    tasks: in the order in which to measure them.
    say: called with (task key, number of tasks done, number of tasks) before each measurement.

    The first process decides from its clock and journal, and shares its decisions with the others.
    """
    tasks = list(tasks)
    began = bench.now()
    forecast = _Forecast()
    slow: list[str] = []
    measured = resumed = beyond = 0
    for number, task in enumerate(tasks):
        known = journal.samples.get(task.key)
        # "dispatch" is short and noisy by nature, so its spread has no limit.
        usable = known is not None and (known.spread <= settings.max_spread or task.op == "dispatch")
        spent = bench.now() - began
        if usable:
            choice = 0.0
        elif spent > settings.budget_s and task.rank > 0:
            choice = 1.0
        elif forecast.too_slow(task, settings):
            choice = 2.0
        else:
            choice = 3.0
        choice = bench.share([choice])[0][0]
        if choice == 0:
            resumed += 1
            if known is not None:
                forecast.saw(task, known.seconds)
        elif choice == 1:
            beyond += 1
        elif choice == 2:
            slow.append(task.key)
        else:
            say(task.key, number, len(tasks))
            # Beyond the budget, only required tasks are measured, and without waiting for other programs to finish.
            sample = measure(task, bench, settings, _TRIES if spent <= settings.budget_s else 1)
            journal.add(sample)
            forecast.saw(task, sample.seconds)
            measured += 1
    return SessionResult(
        measured=measured,
        resumed=resumed,
        too_slow=tuple(slow),
        beyond=beyond,
        seconds=bench.now() - began,
    )


def remeasured(
    tasks: Sequence[Task],
    doubtful: Sequence[str],
    bench: Bench,
    journal: Journal,
    settings: Settings,
    say: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> int:
    """Measures doubtful tasks again. Returns their number.

    doubtful: task keys; only those of the first process count.
    """
    place = {task.key: i for i, task in enumerate(tasks)}
    mine = [float(place[key]) for key in doubtful if key in place][:_MOST_REMEASURED]
    shared = bench.share([float(len(mine)), *mine, *[0.0] * (_MOST_REMEASURED - len(mine))])[0]
    chosen = [tasks[int(i)] for i in shared[1 : 1 + int(shared[0])]]
    for number, task in enumerate(chosen):
        say(f"again: {task.key}", number, len(chosen))
        journal.add(measure(task, bench, settings))
    return len(chosen)
