"""Gloo's collectives, their launches and the waits for them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pase.replay import align, estimate, load, measure
from pase.replay.graph import EDGES
from pase.replay.traces.gloo import WAIT
from pase.replay.types import COLLECTIVE
from tests.command import reported


def _gloo_trace(rank: int, late_us: float, recorded: bool = False) -> dict[str, Any]:
    """Three steps with two all-reduces each. The thread waits for both, and then works for 300 µs.

    recorded: whether the trace has the wait as an op, as with functional collectives.
    """
    events: list[dict[str, Any]] = []

    def span(cat: str, name: str, tid: int, ts: float, dur: float, **args: Any) -> None:
        events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    sizes = {"Input Dims": [[1000]], "Input type": ["float"]}
    for k in range(3):
        z = 3300.0 * (k + 1)
        own = late_us * rank
        span("user_annotation", f"ProfilerStep#{k}", 1, z, 3300)
        span("cpu_op", "aten::mm", 1, z, 500 + own)
        span("cpu_op", "c10d::allreduce_", 1, z + 500 + own, 20)
        span("cpu_op", "aten::mm", 1, z + 520 + own, 480)
        span("cpu_op", "c10d::allreduce_", 1, z + 1000 + own, 20)
        # The assignment to workers is random, and a worker may record its end after it has woken the thread.
        a, b = (8, 9) if k % 2 else (9, 8)
        span("user_annotation", "gloo:all_reduce", a, z + 550 + own, 1450 - own, **sizes)
        span("user_annotation", "gloo:all_reduce", b, z + 1050 + own, 1960 - own, **sizes)
        if recorded:
            span("cpu_op", "_c10d_functional::wait_tensor", 1, z + 1020 + own, 1980 - own)
        span("cpu_op", "copy", 1, z + 3000, 300)
    info = {"rank": rank, "world_size": 2}
    return {"distributedInfo": info, "traceEvents": events}


@pytest.mark.parametrize("recorded", [False, True])
def test_launches_and_waits_are_found_among_gloos_events(tmp_path: Path, recorded: bool) -> None:
    for rank in (0, 1):
        with gzip.open(tmp_path / f"rank{rank}.json.gz", "wt") as f:
            json.dump(_gloo_trace(rank, 100.0, recorded), f)
    t = align(load(tmp_path), "none")
    waits = np.array([n == WAIT for n in t.names])[t["name"]]
    assert waits.sum() == 6 and (t["duration_ns"][waits] > 1_800_000).all()
    sends = t["kind"] == COLLECTIVE
    assert {t.lanes[int(x)].name for x in t["lane"][sends]} == {"gloo 0", "gloo 1"}
    assert set(t["nbytes"][sends].tolist()) == {4000}
    m = measure(t)
    g = estimate(m, m.steady())
    into = g.edge_kind == EDGES.index("sync")
    # On each rank, the wait depends on both all-reduces.
    assert into.sum() == 4 and (g.kind[g.src[into]] == COLLECTIVE).all()
    report = reported("replay", tmp_path, "--align", "none", "--what-if", "bandwidth=1000")
    for r in report["ranks"]:
        assert abs(r["error"]) < 0.02
        assert r["compute_s"] == pytest.approx(1.3e-3 + 1e-4 * r["rank"], rel=0.05)
    # With fast all-reduces, only the thread's own work is left of the step.
    assert report["what_if"][0]["iteration_s"] < 1.7e-3
    found = reported("diagnose", tmp_path, "--align", "none")["findings"]
    (held,) = [f for f in found if f["kind"] == "blocking-calls"]
    assert "Gloo works meanwhile. The thread waits for its collectives" in held["detail"]
