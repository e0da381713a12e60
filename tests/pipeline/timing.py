"""Shared by the tests of schedules: the seconds of a step at equal stages, and each schedule with its chunks."""

from __future__ import annotations

from hypothesis import strategies as st

from pase.pipeline.registry import SCHEDULES, Discipline, schedule
from pase.pipeline.simulate import simulate
from pase.pipeline.types import StageTimes

# Whole numbers, so that equality is exact.
whole = st.integers(1, 9).map(float)

sizes = {"p": st.integers(1, 6), "m": st.integers(1, 20)}


def chunks_of(d: Discipline) -> list[int]:
    low, high = d.chunks
    return [v for v in (1, 2, 3) if v >= low and (not high or v <= high)]


CASES = [(name, v) for name, d in SCHEDULES.items() for v in chunks_of(d)]


def step_s(name, p, m, v, f, i, w, send=0.0):  # type: ignore[no-untyped-def]
    return simulate(
        schedule(name, p, m, v), StageTimes.of([f] * (p * v), i, w, ranks=p, send=send), kernel="numpy"
    ).step_s


def period_s(name, p, m, v, f, i, w):  # type: ignore[no-untyped-def]
    t = StageTimes.of([f] * (p * v), i, w, ranks=p)
    return simulate(schedule(name, p, m, v), t, kernel="numpy").period_s
