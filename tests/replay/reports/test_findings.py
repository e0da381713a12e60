"""Reasons for lost time that are found in runs which have them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.cases.timelines import ImaginedRun, simulate, write
from pase.replay import align
from pase.replay.changes.whatif import apply
from pase.replay.measurement.model import measure
from pase.replay.reports.diagnose import diagnose_run
from pase.replay.reports.trust import Run
from pase.replay.traces.ingest import load
from tests.replay.runs import numbered


def test_a_blocking_copy_is_found_and_named(tmp_path: Path) -> None:
    """A copy of 704 bytes is short on the device, but blocks the CPU until all earlier ops have ended."""
    events: list[dict[str, Any]] = []
    at, number = 0.0, 0
    for step in range(5):
        begun = at
        for k in range(20):
            number += 1
            kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "dur": 990.0}
            events.append({**kernel, "ts": begun + 20 + 1000 * k, "args": numbered(number)})
            call = {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "pid": 0,
                "tid": 1,
                "dur": 5.0,
            }
            events.append({**call, "ts": at, "args": {"correlation": number}})
            at += 10
        number += 1
        done = begun + 20_100
        copy = {
            "ph": "X",
            "cat": "gpu_memcpy",
            "name": "Memcpy DtoH (Device -> Pageable)",
            "pid": 0,
            "tid": 7,
        }
        events.append({**copy, "ts": done, "dur": 2.0, "args": {**numbered(number), "bytes": 704}})
        call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "pid": 0, "tid": 1, "ts": at}
        events.append({**call, "dur": done + 10 - at, "args": {"correlation": number}})
        item = {"ph": "X", "cat": "cpu_op", "name": "aten::item", "pid": 0, "tid": 1, "ts": at - 1}
        events.append({**item, "dur": done + 12 - at})
        at = done + 5000.0
        mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 0, "tid": 1}
        events.append({**mark, "ts": begun, "dur": at - begun})
    path = tmp_path / "copy.json"
    path.write_text(json.dumps({"traceEvents": events}))
    d = diagnose_run(measure(load(path)))
    f = next(f for f in d.findings if f.kind == "blocking-calls")
    assert "704 bytes" in f.title and "aten::item" in f.detail
    assert f.measured_ns == pytest.approx(19.9e6, rel=0.01)
    (b,) = d.breakdowns
    assert b.mean_ns("blocking") == pytest.approx(5e6, rel=0.02)


def test_ranks_that_are_late_in_turn_get_no_advice_about_one_of_them(tmp_path: Path) -> None:
    base: dict[str, Any] = {"ranks": 4, "iterations": 16, "layers": 4, "noise": 0.02, "chance_us": 3_000.0}
    more = {"kernel_us": 200.0, "between_us": 4.0, "bandwidth_bytes_per_us": 6000.0}
    late = simulate(ImaginedRun(**base | more))
    found = diagnose_run(measure(align(load(write(late, tmp_path))))).findings
    turns = next(f for f in found if f.kind == "imbalance")
    assert "in turn" in turns.title and "No rank is much later than the others" in turns.detail
    # The finding and the what-if give one figure for balanced ranks.
    run = Run(measured=measure(align(load(tmp_path))))
    then = run.changed_ns(apply(run.graph, "balance=1"))
    assert (
        f"With balanced ranks (--what-if balance=1), an iteration would take {then / 1e6:.2f} ms."
        in turns.detail
    )
    assert turns.cost_ns <= run.replayed_ns - then + 1
    sent = next(f for f in found if f.kind == "exposed-communication")
    assert re.search(r"all_reduce \(\d of \d, [\d.]+ MiB\)", sent.detail)
