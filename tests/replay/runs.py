"""Runs of an independent simulator, measured, that the tests of replay share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from bench.cases.timelines import ImaginedRun, write
from pase.replay.measurement.clocks import align
from pase.replay.measurement.model import Measured, measure
from pase.replay.traces.ingest import load
from pase.replay.types import Event, Group, Timeline, from_events


def measured(tmp_path: Path, run: ImaginedRun) -> Measured:
    return measure(align(load(write(run, tmp_path / "traces"))))


def running_ahead(tmp_path: Path, wobble: bool = True, slow: int = -1) -> tuple[Path, list[float]]:
    """Writes a trace of one stream with 100 kernels of 1 ms per step. Returns its path and the true lengths in ms.

    The CPU launches a step in 10 to 60 ms. If ``slow`` is given, it launches that step in 260 ms, half of it work, and
    all others in 10 ms.
    """
    events: list[dict[str, Any]] = []
    rng = np.random.default_rng(3)
    host, device, number = 0.0, 0.0, 0
    ends = []

    def span(cat: str, name: str, tid: int, ts: float, dur: float, **args: Any) -> None:
        events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    for step in range(8):
        begun = host
        pause = float(rng.uniform(100, 600)) if wobble else 300.0
        if slow >= 0:
            pause = 2600.0 if step == slow else 100.0
        for k in range(100):
            number += 1
            span("cpu_op", "aten::mm", 1, host, pause / 2)
            host += pause
            span("cuda_runtime", "cudaLaunchKernel", 1, host, 5, correlation=number)
            begin = max(host + 8, device + 1)
            device = begin + 1000
            span("kernel", f"gemm_{k}", 7, begin, 1000, stream=7, device=0, correlation=number)
            host += 5
        span("user_annotation", f"ProfilerStep#{step}", 1, begun, host - begun)
        ends.append(device)
    path = tmp_path / "ahead.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path, [float(x) / 1e3 for x in np.diff(ends)]


def numbered(number: int) -> dict[str, Any]:
    """The arguments of a kernel on stream 7 that the call with this correlation id launched."""
    return {"stream": 7, "device": 0, "correlation": number}


GPU_BOUND = {"kernel_us": 300.0, "between_us": 4.0}
HOST_BOUND = {"kernel_us": 12.0, "between_us": 60.0}
COMM_BOUND = {"kernel_us": 60.0, "bucket_bytes": 64 << 20}


def collectives(
    seed: int, skew_ns: list[float], drift: list[float], noise_ns: float = 2000.0, n: int = 60
) -> Timeline:
    """Collectives only. Starts differ by milliseconds and ends by ``noise_ns``; rank 0 has the true clock."""
    rng = np.random.default_rng(seed)
    events = []
    at = 1e6
    for i in range(n):
        starts = at + rng.uniform(0, 5e6, len(skew_ns))
        end = starts.max() + 4e5
        for r in range(len(skew_ns)):
            s, e = (x * (1 + drift[r]) + skew_ns[r] for x in (starts[r], end + rng.normal(0, noise_ns)))
            common = {
                "rank": r,
                "lane": "20",
                "device": True,
                "kind": "collective",
                "operation": "all_reduce",
            }
            events.append(
                Event(
                    **common,
                    name="nccl",
                    group="g",
                    iteration=i // (n // 5),
                    start_ns=round(s),
                    duration_ns=round(e - s),
                )
            )
        at = end + rng.uniform(1e6, 2e7)
    return from_events(events, groups=(Group(name="g", ranks=tuple(range(len(skew_ns)))),))
