"""What the streams of several GPUs get from a plan's step: NCCL's kernels beside compute, in PyTorch's own trace.

    python -m bench gpu.torch_streams                # on a machine with at least two GPUs; two minutes
    python -m bench gpu.torch_streams --only fsdp

Each row is GPT-2 under one strategy, with a process for each GPU; rank 0 records a step. ``nccl_s`` and ``compute_s``:
seconds of its kernels. ``beside``: the share of NCCL's time in which a kernel of another stream runs. ``shared``: the
streams that have kernels of both kinds, of which there should be none. ``step_s``: the median of five steps. On a CPU,
``tests/backends/torch/spmd/test_streams.py`` asserts what is enqueued where. Writes
bench/results/gpu_torch_streams.json.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.cases.torch_ranks import on_processes
from bench.gpu.torch_steps import built
from bench.runner import Benchmark

STRATEGIES = {
    "data parallel": {"target": "ddp"},
    "fsdp": {"target": "fsdp2", "regather": "none"},
    "fsdp, gathered again": {"target": "fsdp2", "regather": "all"},
}
"""Row -> options of ``pase.compile``."""


def beside(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the figures of a row from the events of a trace in Chrome's format.

    >>> kernel = {"cat": "kernel", "ts": 0, "dur": 4, "name": "gemm", "args": {"stream": 7}}
    >>> beside([kernel, {**kernel, "ts": 2, "name": "ncclDevKernel_AllReduce", "args": {"stream": 20}}])
    {'nccl_s': 4e-06, 'compute_s': 4e-06, 'beside': 0.5, 'shared': []}
    """
    spans: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    streams: dict[bool, set[int]] = {False: set(), True: set()}
    for e in events:
        if e.get("cat") == "kernel":
            sent = e["name"].startswith("nccl")
            spans[sent].append((e["ts"], e["ts"] + e["dur"]))
            streams[sent].add(e["args"]["stream"])
    both = sum(
        max(0.0, min(end, until) - max(begin, since))
        for begin, end in joined(spans[True])
        for since, until in joined(spans[False])
    )
    sent_s, compute_s = (sum(end - begin for begin, end in joined(spans[kind])) for kind in (True, False))
    return {
        "nccl_s": sent_s * 1e-6,
        "compute_s": compute_s * 1e-6,
        "beside": round(both / sent_s, 3) if sent_s else None,
        "shared": sorted(streams[True] & streams[False]),
    }


def joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the spans in order, with those that overlap as one."""
    out: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def recorded(options: Mapping[str, Any], count: int, rank: int) -> dict[str, Any]:
    """Returns the figures of a rank's step."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    import pase

    torch.cuda.set_device(rank)
    model, batch, loss = built("gpt2", "cuda")
    plan = pase.compile(
        model, *batch, devices=count, loss=loss, memory_limit="none", baselines=False, **options
    )
    step = plan.torch.train_step(model, torch.optim.AdamW, lr=1e-4, fused=True)
    times = []
    for _ in range(8):
        begin = time.perf_counter()
        step(*batch)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step(*batch)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: Sequence[Mapping[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return {"gpus": count, "step_s": statistics.median(times[3:]), **beside(events)}


def row(name: str) -> dict[str, Any]:
    """Returns the row of a strategy, of rank 0."""
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return {"error": f"needs two GPUs, and has {count}"}
    run = partial(recorded, STRATEGIES[name], count)
    return on_processes(count, run, how="spawn", seconds=300.0, backend="nccl")[0]


BENCH = Benchmark("gpu_torch_streams", [*STRATEGIES], row)
