"""A data-parallel PyTorch-like run on imagined GPUs, with every dependency known, written as Kineto traces.

Independent of pase's simulator: it walks the one program that all ranks run, in order, and computes starts
by hand. Times in µs. Forward on the main thread, backward and bucketed all-reduces on the autograd thread,
the optimizer on the main thread again, then a blocking read of the loss.
"""

from __future__ import annotations

import gzip
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(kw_only=True)
class ImaginedRun:
    """What the imagined run looks like."""

    ranks: int = 2
    iterations: int = 5
    layers: int = 12
    kernel_us: float = 120.0
    launch_us: float = 6.0
    between_us: float = 9.0
    latency_us: float = 5.0
    gap_us: float = 1.2
    event_us: float = 3.0
    bucket_layers: int = 3
    bucket_bytes: int = 25 << 20
    bucket_growth: float = 0.0
    """Bucket k holds bucket_bytes · (1 + growth · k)."""
    bandwidth_bytes_per_us: float = 60_000.0
    collective_us: float = 20.0
    light: int = 0
    """Elementwise kernels behind each forward kernel."""
    light_us: float = 8.0
    fused: bool = False
    """Those of a layer are one kernel that takes as long as all of them."""
    noise: float = 0.0
    slow_rank: int = -1
    slow_by: float = 1.0
    late_us: float = 0.0
    """What the slow rank's host does more before the first launch of each step."""
    skew_us: tuple[float, ...] = ()
    drift: tuple[float, ...] = ()
    seed: int = 0
    events: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    iteration_us: list[list[float]] = field(default_factory=list)
    true_waits: set[tuple[str, str]] = field(default_factory=set)
    """(kernel name, kernel name) pairs across streams: the second waits for the first."""


def bucketed(layers_a_bucket: int, mib: float = 8.0, **changed: Any) -> ImaginedRun:
    """A run with buckets of that many layers each; every such run sends the same bytes for each layer."""
    n, growth = layers_a_bucket, 0.2
    first = 1 + growth * (n - 1) / 2
    fields: dict[str, Any] = {"layers": 12, "iterations": 4, "bucket_layers": n, "collective_us": 150.0}
    fields |= {"bucket_bytes": round(mib * 2**20 * n * first), "bucket_growth": growth * n / first}
    return ImaginedRun(**fields | changed)


def simulate(run: ImaginedRun) -> ImaginedRun:
    """Fill events, true iteration times [rank][iteration] and the true cross-stream waits."""
    rng = np.random.default_rng(run.seed)
    main = [100.0 * (r + 1) for r in range(run.ranks)]
    auto = list(main)
    compute = [0.0] * run.ranks
    comm = [0.0] * run.ranks
    number = 0
    run.events = {r: [] for r in range(run.ranks)}
    starts: list[list[float]] = [[] for _ in range(run.ranks)]

    def jitter() -> float:
        return float(1 + run.noise * rng.standard_normal()) if run.noise else 1.0

    def cpu(r: int, tid: int, name: str, at: float, length: float, cat: str = "cpu_op", **args: Any) -> None:
        event = {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": 10 + r,
            "tid": tid,
            "ts": at,
            "dur": length,
            "args": args,
        }
        run.events[r].append(event)

    def launch(
        r: int, tid: int, at: float, stream: int, name: str, length: float, ready: float, **args: Any
    ) -> tuple[float, float]:
        """Host time after the launch, and end of the kernel."""
        nonlocal number
        number += 1
        cost = run.launch_us * jitter()
        free = compute[r] if stream == 7 else comm[r]
        begin = max(at + run.latency_us, free + run.gap_us, ready)
        cpu(r, tid, "cudaLaunchKernel", at, cost, "cuda_runtime", correlation=number)
        kernel = {
            "ph": "X",
            "cat": "kernel",
            "name": name,
            "pid": r,
            "tid": stream,
            "ts": begin,
            "dur": length,
        }
        run.events[r].append(
            {**kernel, "args": {"stream": stream, "device": r, "correlation": number, **args}}
        )
        if stream == 7:
            compute[r] = begin + length
        else:
            comm[r] = begin + length
        return at + cost, begin + length

    def between(r: int, tid: int, at: float, name: str) -> float:
        length = run.between_us * jitter()
        cpu(r, tid, name, at, length)
        return at + length

    for it in range(run.iterations + 1):
        for r in range(run.ranks):
            starts[r].append(main[r])
        if it == run.iterations:
            break
        for r in range(run.ranks):
            at = main[r]
            slow = run.slow_by if r == run.slow_rank else 1.0
            if run.late_us and r == run.slow_rank:
                cpu(r, 1, "preparing", at, run.late_us)
                at += run.late_us
            for layer in range(run.layers):
                at = between(r, 1, at, "aten::linear")
                at, _ = launch(r, 1, at, 7, f"fwd_{layer}", run.kernel_us * slow * jitter(), 0.0)
                kernels = min(run.light, 1) if run.fused else run.light
                for k in range(kernels):
                    at = between(r, 1, at, "aten::add")
                    length = run.light_us * slow * run.light / kernels * jitter()
                    at, _ = launch(r, 1, at, 7, f"elementwise_{layer}_{k}", length, 0.0)
            main[r] = at
            auto[r] = at + 30.0
        pending: list[list[float]] = [[] for _ in range(run.ranks)]
        for back in range(run.layers):
            layer = run.layers - 1 - back
            due = (back + 1) % run.bucket_layers == 0 or back == run.layers - 1
            begins, hosts, ids = [], [], []
            for r in range(run.ranks):
                slow = run.slow_by if r == run.slow_rank else 1.0
                at = between(r, 2, auto[r], "LinearBackward")
                at, done = launch(r, 2, at, 7, f"bwd_{layer}", 2 * run.kernel_us * slow * jitter(), 0.0)
                if due:
                    cpu(r, 2, "cudaEventRecord", at, 1.0, "cuda_runtime")
                    cpu(r, 2, "cudaStreamWaitEvent", at + 1.0, 1.0, "cuda_runtime")
                    at += 2.0
                    begins.append(max(at + run.latency_us, comm[r] + run.gap_us, done + run.event_us))
                    hosts.append(at)
                    run.true_waits.add((f"bwd_{layer}", f"bucket_{back // run.bucket_layers}"))
                auto[r] = at
            if not due:
                continue
            held = round(run.bucket_bytes * (1 + run.bucket_growth * (back // run.bucket_layers)))
            cost = (run.collective_us + held / run.bandwidth_bytes_per_us) * jitter()
            end = max(begins) + cost
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            for r in range(run.ranks):
                number += 1
                ids.append(number)
                took = run.launch_us * jitter()
                cpu(r, 2, "cudaLaunchKernelExC", hosts[r], took, "cuda_runtime", correlation=number)
                args = {"stream": 20, "device": r, "correlation": number, "Collective name": "allreduce"}
                args |= {"In msg nelems": held // 4, "Out msg nelems": held // 4}
                args |= {
                    "dtype": "Float",
                    "Process Group Name": "0",
                    "Process Group Ranks": str(list(range(run.ranks))),
                }
                kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": r, "tid": 20, "ts": begins[r]}
                run.events[r].append({**kernel, "dur": end - begins[r], "args": args})
                comm[r] = end
                auto[r] = hosts[r] + took
                pending[r].append(end)
        for r in range(run.ranks):
            main[r] = auto[r] + 25.0
            at = main[r]
            cpu(r, 1, "cudaStreamWaitEvent", at, 1.0, "cuda_runtime")
            at += 1.0
            ready = pending[r][-1] + run.event_us
            for layer in range(3):
                at = between(r, 1, at, "Optimizer.step")
                at, done = launch(
                    r, 1, at, 7, f"adam_{layer}", run.kernel_us / 4, ready if layer == 0 else 0.0
                )
            run.true_waits.add((f"bucket_{(run.layers - 1) // run.bucket_layers}", "adam_0"))
            back_at = max(at + 4.0, done + 6.0)
            cpu(r, 1, "cudaStreamSynchronize", at, back_at - at, "cuda_runtime")
            main[r] = between(r, 1, back_at, "aten::item")
    run.iteration_us = [[b - a for a, b in itertools.pairwise(s)] for s in starts]
    for r in range(run.ranks):
        for it, (a, b) in enumerate(zip(starts[r], starts[r][1:], strict=False)):
            cpu(r, 1, f"ProfilerStep#{it}", a, b - a, "user_annotation")
    _set_clocks(run)
    return run


def _set_clocks(run: ImaginedRun) -> None:
    for r, events in run.events.items():
        skew = run.skew_us[r] if run.skew_us else 0.0
        drift = run.drift[r] if run.drift else 0.0
        for e in events:
            begin, end = (x * (1 + drift) + skew for x in (e["ts"], e["ts"] + e["dur"]))
            e["ts"], e["dur"] = round(begin, 3), round(end - begin, 3)


def trace(run: ImaginedRun, rank: int) -> dict[str, Any]:
    """One rank's Kineto document."""
    info = {"backend": "nccl", "rank": rank, "world_size": run.ranks}
    return {"schemaVersion": 1, "distributedInfo": info, "traceEvents": run.events[rank]}


def write(run: ImaginedRun, folder: Path) -> Path:
    """All ranks' traces, as the profiler would leave them."""
    folder.mkdir(parents=True, exist_ok=True)
    for r in range(run.ranks):
        with gzip.open(folder / f"rank{r}.json.gz", "wt", compresslevel=1) as f:
            json.dump(trace(run, r), f)
    return folder
