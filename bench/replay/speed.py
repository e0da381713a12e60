"""How fast traces are read and graphs replayed, and in how much memory.

    python -m bench replay.speed [--megabytes 1000]

The trace is that of a simulated run with Kineto's usual arguments, repeated to the requested size. Each part runs in
its own process, which has its own peak memory. Writes bench/results/replay_speed.json.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from bench.processes import forks_of, row_apart
from bench.runner import Benchmark, option

CPU_S = 3600

# What Kineto adds to each event of a kind. The values do not matter: a reader only has to skip them.
PADDING = {
    "kernel": {
        "External id": 12353,
        "queued": 0,
        "context": 1,
        "registers per thread": 40,
        "shared memory": 400,
        "blocks per SM": 4.740741,
        "warps per SM": 75.851852,
        "grid": [512, 1, 1],
        "block": [512, 1, 1],
        "est. achieved occupancy %": 75,
    },
    "cuda_runtime": {"External id": 57532, "cbid": 211},
    "cpu_op": {"External id": 2049, "Record function id": 1909, "Sequence number": 1080, "Fwd thread id": 1},
}


def generate(file: Path, size: int) -> int:
    """Writes a Chrome trace of about this many bytes, and returns its exact size."""
    from bench.cases.timelines import ImaginedRun, simulate, trace

    document = trace(simulate(ImaginedRun(ranks=1, iterations=20, layers=200)), 0)
    events = document.pop("traceEvents")
    span = max(e["ts"] + e["dur"] for e in events) + 1000.0
    lines = []
    for e in events:
        ts = e.pop("ts")
        e["args"] = {**PADDING.get(e["cat"], {}), **e["args"]}
        lines.append((ts, json.dumps(e)[1:]))
    written = 0
    with file.open("w") as f:
        f.write(json.dumps(document)[:-1] + ', "traceEvents": [{}')
        shift = 0.0
        while written < size:
            written += f.write("".join(f',\n{{"ts": {round(ts + shift, 3)}, {rest}' for ts, rest in lines))
            shift += span
        f.write("]}")
    return file.stat().st_size


def read(file: Path) -> dict[str, Any]:
    """Reads a trace, and returns the row: events, seconds, memory."""
    from pase.replay.traces.chrome import read_chrome

    begun = time.perf_counter()
    cpu = time.process_time()
    t = read_chrome(file)
    return {
        "events": len(t),
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time() - cpu,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def replay() -> dict[str, Any]:
    """Replays a million tasks on 64 devices, each waiting for two earlier ones, by the numba kernel."""
    import numpy as np

    from pase.replay.graph import DataflowGraph, TaskQueue
    from pase.replay.simulation.simulate import replay_graph

    n, devices = 1_000_000, 64
    rng = np.random.default_rng(0)
    later = np.arange(devices, n)
    src = np.concatenate([later - rng.integers(1, devices, len(later)), later - devices])
    g = DataflowGraph(
        devices=tuple(TaskQueue(rank=i // 4, name=f"stream {i % 4}", kind="stream") for i in range(devices)),
        names=("op",),
        name=np.zeros(n, dtype=np.int32),
        kind=np.full(n, 2, dtype=np.uint8),
        device=np.arange(n, dtype=np.int64) % devices,
        duration_ns=rng.uniform(1e3, 1e4, n),
        src=src,
        dst=np.concatenate([later, later]),
        lag_ns=np.zeros(len(src)),
        edge_kind=np.zeros(len(src), dtype=np.uint8),
        gang=np.full(n, -1, dtype=np.int64),
        priority=np.zeros(n, dtype=np.int64),
        release_ns=np.zeros(n),
        nbytes=np.full(n, -1, dtype=np.int64),
        operation=np.zeros(n, dtype=np.uint8),
        ways=np.zeros(n, dtype=np.int32),
        event=np.full(n, -1, dtype=np.int64),
        device_free_ns=np.zeros(devices),
    )
    replay_graph(g)
    seconds, cpu = [], []
    for _ in range(7):
        begun, used = time.perf_counter(), time.process_time()
        replay_graph(g)
        seconds.append(time.perf_counter() - begun)
        cpu.append(time.process_time() - used)
    median, best = sorted(seconds)[3], sorted(cpu)[3]
    return {
        "tasks": n,
        "edges": len(src),
        "median_seconds": median,
        "median_cpu_seconds": best,
        "tasks_per_s": n / best,
    }


def measured(part: str, given: Namespace) -> dict[str, Any]:
    """Runs one part in a process of its own and returns its row."""
    processes = forks_of([])
    if part == "replay":
        return row_apart(processes, replay, cpu_s=CPU_S)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rank0.json"
        written = generate(file, given.megabytes << 20)
        return {"megabytes": written / 1e6, **row_apart(processes, read, file, cpu_s=CPU_S)}


BENCH = Benchmark(
    "replay_speed",
    ("read", "replay"),
    measured,
    at="",
    options=[option("--megabytes", type=int, default=1000)],
)
