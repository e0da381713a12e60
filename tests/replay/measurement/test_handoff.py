"""Hand-offs between threads that start and await each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.cases.timelines import ImaginedRun, simulate
from pase.replay.changes.whatif import apply
from pase.replay.graph import EDGES
from pase.replay.measurement.model import estimate, measure
from pase.replay.reports.trust import Run
from pase.replay.simulation.steady import evaluate
from pase.replay.traces.ingest import load
from tests.replay.runs import HOST_BOUND, measured


@pytest.mark.parametrize("seed", [31, 44, 51])
def test_a_pool_of_threads_starts_no_circle(tmp_path: Path, seed: int) -> None:
    """Workers launch in turn. Each idles while another works, so each might have started the other."""
    rng = np.random.default_rng(seed)
    events: list[dict[str, Any]] = []

    def span(cat: str, name: str, tid: int, ts: float, dur: float, **args: Any) -> None:
        events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    for tid in (2, 3, 4):
        at = float(rng.uniform(0, 500))
        for _ in range(6):
            works = float(rng.uniform(100, 900))
            span("cpu_op", "aten::mm", tid, at, works)
            for call in (at + 10, at + works - 30):
                number = len(events)
                span("cuda_runtime", "cudaLaunchKernel", tid, call, 5, correlation=number)
                span("kernel", f"k{number}", 7 + tid, call + 8, 20, stream=7 + tid, correlation=number)
            at += works + float(rng.uniform(50, 1500))
    path = tmp_path / "pool.json"
    path.write_text(json.dumps({"traceEvents": events}))
    run = Run(measured=measure(load(path)))
    assert run.replayed_ns == pytest.approx(run.measured_ns, rel=0.1) or run.doubts


def test_a_thread_that_works_on_after_it_has_answered_is_still_awaited(tmp_path: Path) -> None:
    """The autograd thread frees memory for 60 µs after its work, but the main thread resumes after 25 µs."""
    run = simulate(ImaginedRun(ranks=1, **HOST_BOUND))
    marks = sorted((e for e in run.events[0] if e["name"].startswith("ProfilerStep")), key=lambda e: e["ts"])
    for m in marks:
        inside = [e for e in run.events[0] if e["tid"] == 2 and m["ts"] <= e["ts"] < m["ts"] + m["dur"]]
        end = max(e["ts"] + e["dur"] for e in inside)
        run.events[0].append(
            {**inside[0], "name": "free", "cat": "cpu_op", "ts": end, "dur": 60.0, "args": {}}
        )
    m = measured(tmp_path, run)
    for p in m.programs.values():
        assert sum(EDGES[k] == "handoff" for k in p.edges.values()) == 2
    slower = max(evaluate(apply(estimate(m, [1, 2, 3]), "host=2")).values())
    # The autograd thread begins later, because the main thread is slower.
    truth = simulate(ImaginedRun(ranks=1, kernel_us=12.0, between_us=120.0, launch_us=12.0))
    assert slower == pytest.approx(truth.iteration_us[0][2] * 1e3, rel=0.03)
