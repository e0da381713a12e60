"""Compute that is slower while communication overlaps with it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pase.replay import align, load
from pase.replay.simulation.contention import slowdowns
from tests.command import reported


def _contended_trace(rank: int, slower: float) -> dict[str, Any]:
    """Steps with three matrix products alone, and three of the same size that overlap with an all-reduce.

    slower: how many times as long the latter take.
    """
    events: list[dict[str, Any]] = []

    def span(cat: str, name: str, tid: int, ts: float, dur: float, **args: Any) -> None:
        events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    shape = {"Input Dims": [[64, 64], [64, 64]]}
    sizes = {"Input Dims": [[1000]], "Input type": ["float"]}
    step = 1620.0 + 1500.0 * slower + 400.0
    for k in range(3):
        z = 1000.0 + step * k
        span("user_annotation", f"ProfilerStep#{k}", 1, z, step)
        for i in range(3):
            span("cpu_op", "aten::mm", 1, z + 500 * i, 499.9, **shape)
        span("cpu_op", "c10d::allreduce_", 1, z + 1500, 20)
        span("user_annotation", "gloo:all_reduce", 9, z + 1520, 1500.0 * slower + 50.0, **sizes)
        for i in range(3):
            span("cpu_op", "aten::mm", 1, z + 1520 + 500 * slower * i, 500 * slower - 0.1, **shape)
        # The thread waits for the end of the all-reduce, and then updates.
        span("cpu_op", "aten::add_", 1, z + 1620 + 1500 * slower, 400.0)
    return {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}


@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_hidden_sums_slow_what_they_hide_behind(tmp_path: Path, slower: float) -> None:
    """Twice the bandwidth halves the time in which products overlap with an all-reduce, which makes them faster."""
    for rank in (0, 1):
        with gzip.open(tmp_path / f"rank{rank}.json.gz", "wt") as f:
            json.dump(_contended_trace(rank, slower), f)
    found = slowdowns(align(load(tmp_path), "none"))
    assert found == pytest.approx({0: slower, 1: slower}, rel=1e-3)
    report = reported("replay", tmp_path, "--align", "none", "--what-if", "bandwidth=2", "--force")
    beside = 1500 * slower
    # While the shorter all-reduce runs, work proceeds at 1/slower, and then at full speed.
    sped_up = beside / 2 + (1500 - beside / 2 / slower)
    waited = 100.0  # after the last product, for the end of the all-reduce
    saved = report["replayed_s"] - report["what_if"][0]["iteration_s"]
    assert saved == pytest.approx((beside - sped_up + waited) * 1e-6, abs=60e-6)
