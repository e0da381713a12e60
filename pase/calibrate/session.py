"""Measuring a suite within a budget: warm-up, repeats, median and spread, doubtful points once more."""

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
"""Cores that other programs may take while a sample is measured (a host's ticks tell no less), and tries."""
_LOOKS, _GROWTH, _MOST_TRIPS = 3, 100.0, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How long and how carefully.

    budget_s: what all tasks may take together; tasks of rank 0 are measured even beyond it, but in one try.
    program_s: an op is repeated inside one program until that takes so long: dispatch is then no part of it.
    repeats: (fewest, most) timed programs. steady: a spread above this asks for more repeats.
    max_spread: a sample that is wider is measured again in a resumed session, and refused by the fit.
    """

    budget_s: float = 300.0
    program_s: float = 0.01
    repeats: tuple[int, int] = (5, 15)
    steady: float = 0.1
    max_spread: float = 0.5


@dataclass(frozen=True, kw_only=True)
class SessionResult:
    """measured: now; resumed: from the journal; too_slow: keys left out since one would eat the budget;
    beyond: how many tasks the budget did not reach."""

    measured: int
    resumed: int
    too_slow: tuple[str, ...]
    beyond: int
    seconds: float


def spread(times: Iterable[float]) -> float:
    """Interquartile range over the median.

    >>> spread([1.0, 1.0, 1.0, 1.0]), spread([1.0, 2.0, 3.0])
    (0.0, 0.5)
    """
    low, middle, high = np.percentile(list(times), [25, 50, 75])
    return float((high - low) / middle)


def measure(task: Task, bench: Bench, settings: Settings, tries: int = _TRIES) -> Sample:
    """One task, compiled and warm. Where other programs took some of the host's cores meanwhile it is measured again,
    up to so many tries; the sample that had most of them to itself counts."""
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
    """Choose how often, and time; the slowest process's time counts."""
    inner = 1
    # A short program is mostly dispatch, and one that was interrupted says nothing: the best of three, growing.
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
    """Seconds that a task will take at least, from the best rate of smaller ones of its family."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str, tuple[int, ...]], list[tuple[float, float]]] = {}

    def saw(self, task: Task, seconds: float) -> None:
        self.seen.setdefault(task.family, []).append((task.work, seconds))

    def too_slow(self, task: Task, settings: Settings) -> bool:
        """A curve needs two points, however slow; and one at which bytes tell, not the startup alone, since beyond
        its last point it goes on at that point's rate: for that one a task may take longer."""
        known = self.seen.get(task.family, [])
        if len(known) < 2:
            return False
        seconds = [s for _, s in known]
        tells = max(seconds) > _BEYOND_STARTUP * min(seconds)
        if task.op in COLLECTIVE_OPS:
            # Stragglers make a small message last as long as a large one: its own size must be large.
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
    """Measures in order, until the budget is spent; what the journal holds is not measured again.

    One process (the first) looks at clock and journal, and shares what it decides.
    """
    tasks = list(tasks)
    began = bench.now()
    forecast = _Forecast()
    slow: list[str] = []
    measured = resumed = beyond = 0
    for number, task in enumerate(tasks):
        known = journal.samples.get(task.key)
        # "dispatch" is small and jumpy by nature; only the op's own time is held to the limit.
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
            # Beyond the budget, which what must be measured may exceed, no sample waits for a quiet moment.
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
    """Measures what the first process doubts once more (it alone knows the keys); how many that were."""
    place = {task.key: i for i, task in enumerate(tasks)}
    mine = [float(place[key]) for key in doubtful if key in place][:_MOST_REMEASURED]
    shared = bench.share([float(len(mine)), *mine, *[0.0] * (_MOST_REMEASURED - len(mine))])[0]
    chosen = [tasks[int(i)] for i in shared[1 : 1 + int(shared[0])]]
    for number, task in enumerate(chosen):
        say(f"once more: {task.key}", number, len(chosen))
        journal.add(measure(task, bench, settings))
    return len(chosen)
