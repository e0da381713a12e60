"""Clock alignment recovers injected skews and drifts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cases.timelines import ImaginedRun, simulate, write
from pase.replay.measurement.clocks import align, collective_costs
from pase.replay.measurement.matching import match_collectives
from pase.replay.traces.ingest import load
from pase.replay.types import Event, Group, from_events
from tests.replay.runs import collectives


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.lists(st.floats(-5e6, 5e6), min_size=1, max_size=4))
def test_skews_of_5_ms_are_recovered_within_5_us(seed: int, skews: list[float]) -> None:
    t = align(collectives(seed, [0.0, *skews], [0.0] * (len(skews) + 1)))
    for r, skew in enumerate(skews, 1):
        c = t.clock(r)
        middle = np.array([4e8 + skew])
        assert abs(c.to_global(middle)[0] - 4e8) < 5_000
        assert c.uncertainty_ns < 2_000


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.floats(-100e-6, 100e-6), st.floats(-5e6, 5e6))
def test_drift_is_recovered_within_1_us_per_s(seed: int, drift: float, skew: float) -> None:
    t = align(collectives(seed, [0.0, skew], [0.0, drift], noise_ns=300.0, n=150))
    c = t.clock(1)
    assert abs((1 + c.drift) * (1 + drift) - 1) < 1e-6
    for truth in (1e8, 4e8, 7e8):
        local = truth * (1 + drift) + skew
        assert abs(c.to_global(np.array([local]))[0] - truth) < 5_000


@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_no_drift_is_invented(seed: int) -> None:
    assert abs(align(collectives(seed, [0.0, 1e6], [0.0, 0.0])).clock(1).drift) < 3e-6


def test_ranks_without_a_shared_collective_are_reported() -> None:
    events = [
        Event(
            rank=r,
            lane="s",
            device=True,
            kind="collective",
            operation="all_reduce",
            name="n",
            group=f"g{r // 2}",
            iteration=0,
            start_ns=10 * k + r,
            duration_ns=5,
        )
        for r in range(4)
        for k in range(10)
    ]
    t = align(from_events(events, groups=(Group(name="g0", ranks=(0, 1)), Group(name="g1", ranks=(2, 3)))))
    assert np.isinf(t.clock(2).uncertainty_ns) and np.isinf(t.clock(3).uncertainty_ns)
    assert np.isfinite(t.clock(1).uncertainty_ns)
    assert any("ranks [2, 3]" in str(p) for p in t.problems)


def test_work_is_told_from_waiting(tmp_path: Path) -> None:
    run = simulate(
        ImaginedRun(ranks=3, slow_rank=2, slow_by=1.5, kernel_us=300.0, skew_us=(0.0, 4000.0, -3000.0))
    )
    t = align(load(write(run, tmp_path / "x")))
    matches, problems = match_collectives(t)
    assert not problems
    cost = (run.collective_us + run.bucket_bytes / run.bandwidth_bytes_per_us) * 1e3
    for c in collective_costs(t, matches):
        assert c["work_ns"] == pytest.approx(cost, abs=50)
        assert c["wait_ns"] > 1e4
