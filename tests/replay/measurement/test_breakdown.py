"""Measured iterations, broken down into compute, communication, waiting and idle time by cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.cases.timelines import ImaginedRun, simulate
from pase.replay.changes.whatif import apply
from pase.replay.measurement.breakdown import breakdowns
from pase.replay.measurement.clocks import align
from pase.replay.measurement.model import estimate, measure
from pase.replay.reports.trust import Run
from pase.replay.simulation.steady import evaluate
from pase.replay.traces.ingest import load
from tests.replay.runs import GPU_BOUND, measured, numbered
from tests.replay.traces.compiled import US, facts_of_step, timeline_of_steps


@pytest.mark.parametrize(
    "shape", [{"kernel_us": 300.0, "between_us": 4.0}, {"kernel_us": 12.0, "between_us": 60.0}]
)
def test_parts_sum_to_the_iteration_and_the_path_to_the_replay(tmp_path: Path, shape: dict[str, Any]) -> None:
    m = measured(tmp_path, simulate(ImaginedRun(ranks=2, noise=0.05, **shape)))
    for b in breakdowns(m):
        assert sum(b.parts.values()) == b.total_ns
        assert b.total_ns == sum(round(m.measured_ns[b.rank, i]) for i in b.iterations)
    run = Run(measured=m)
    assert sum(s.added_ns for s in run.replay.path()) == pytest.approx(run.replayed_ns, rel=1e-9)


def test_time_inside_of_a_launching_call_is_the_hosts(tmp_path: Path) -> None:
    """The driver loads a module for 8 ms within the second launch of each step."""
    events: list[dict[str, Any]] = []
    for step in range(4):
        z = 20_000.0 * step
        mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 0, "tid": 1}
        events.append({**mark, "ts": z, "dur": 20_000.0})
        for k, (at, long) in enumerate(((100.0, 10.0), (1000.0, 8000.0))):
            call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 0, "tid": 1}
            number = 2 * step + k
            events.append({**call, "ts": z + at, "dur": long, "args": {"correlation": number}})
            kernel = {"ph": "X", "cat": "kernel", "name": f"gemm_{k}", "pid": 0, "tid": 7, "dur": 500.0}
            events.append({**kernel, "ts": z + at + long + 2, "args": numbered(number)})
    path = tmp_path / "module.json"
    path.write_text(json.dumps({"traceEvents": events}))
    (b,) = breakdowns(measure(load(path)))
    assert b.mean_ns("unexplained") == 0 and b.mean_ns("compute") == 1e6
    assert b.mean_ns("launch") > 18.9e6 and sum(b.parts.values()) == b.total_ns


def test_a_straggler_shows_as_waiting_of_the_others(tmp_path: Path) -> None:
    run = simulate(ImaginedRun(ranks=3, slow_rank=1, slow_by=1.3, **GPU_BOUND))
    m = measured(tmp_path, run)
    from pase.replay.measurement.breakdown import breakdowns

    g = estimate(m, [1, 2, 3])
    waiting = {b.rank: b.mean_ns("rank") for b in breakdowns(m)}
    assert waiting[1] < 0.02 * waiting[0]
    assert waiting[1] < 0.02 * waiting[2]
    balanced = max(evaluate(apply(g, "balance=1")).values())
    even = simulate(ImaginedRun(ranks=3, **GPU_BOUND))
    assert abs(balanced / (np.median(even.iteration_us[0][1:]) * 1e3) - 1) < 0.01


def test_no_launch_is_late_where_the_trace_holds_none() -> None:
    """Without launches in the trace, the cause of idle time is unexplained, not a late launch."""
    late = breakdowns(measure(align(timeline_of_steps(facts_of_step(2), ranks=2, late_us=5000))))[1]
    assert late.mean_ns("launch") == 0 and late.mean_ns("unexplained") == pytest.approx(5000 * US)
