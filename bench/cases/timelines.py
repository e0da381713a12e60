"""Simulates a data-parallel PyTorch-like run with known dependencies, and writes it as Kineto traces.

It is independent of pase's simulator: it walks the one program that all ranks run, in order, and computes the starts
itself. Times are in µs. Forward runs on the main thread, backward and bucketed all-reduces on the autograd thread, the
optimizer on the main thread again, followed by a blocking read of the loss.
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
    """The settings of the simulated run."""

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
    """The number of elementwise kernels after each forward kernel."""
    light_us: float = 8.0
    fused: bool = False
    """Whether the elementwise kernels of a layer are one kernel that takes as long as all of them."""
    noise: float = 0.0
    slow_rank: int = -1
    slow_by: float = 1.0
    late_us: float = 0.0
    """Additional host time of the slow rank before the first launch of each step, in µs."""
    chance_us: float = 0.0
    """The mean of an exponential distribution of the same time for every rank, drawn for each step."""
    skew_us: tuple[float, ...] = ()
    drift: tuple[float, ...] = ()
    seed: int = 0
    events: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    iteration_us: list[list[float]] = field(default_factory=list)
    true_waits: set[tuple[str, str]] = field(default_factory=set)
    """(kernel name, kernel name) pairs across streams: the second waits for the first."""


def bucketed(layers_a_bucket: int, mib: float = 8.0, **changed: Any) -> ImaginedRun:
    """Returns a run with buckets of this many layers; all these runs send the same bytes for each layer."""
    n, growth = layers_a_bucket, 0.2
    first = 1 + growth * (n - 1) / 2
    fields: dict[str, Any] = {"layers": 12, "iterations": 4, "bucket_layers": n, "collective_us": 150.0}
    fields |= {"bucket_bytes": round(mib * 2**20 * n * first), "bucket_growth": growth * n / first}
    return ImaginedRun(**fields | changed)


def simulate(run: ImaginedRun) -> ImaginedRun:
    """Fills the run's events, its true iteration times [rank][iteration] and its true cross-stream waits."""
    run.events = {r: [] for r in range(run.ranks)}
    walk = _Clockwork(run)
    starts: list[list[float]] = [[] for _ in range(run.ranks)]
    for it in range(run.iterations + 1):
        for r in range(run.ranks):
            starts[r].append(walk.main[r])
        if it == run.iterations:
            break
        for r in range(run.ranks):
            walk.forward(r)
        summed = [walk.backward(back) for back in range(run.layers)]
        for r in range(run.ranks):
            walk.update(r, max(ends[r] for ends in summed if ends))
    run.iteration_us = [[b - a for a, b in itertools.pairwise(s)] for s in starts]
    for r in range(run.ranks):
        for it, (a, b) in enumerate(itertools.pairwise(starts[r])):
            walk.host(r, 1, f"ProfilerStep#{it}", a, b - a, "user_annotation")
    _set_clocks(run)
    return run


class _Clockwork:
    """The present time of each rank's two threads (main, auto) and two streams (compute, comm), in µs."""

    def __init__(self, run: ImaginedRun) -> None:
        self.run, self.rng = run, np.random.default_rng(run.seed)
        self.main = [100.0 * (r + 1) for r in range(run.ranks)]
        self.auto = list(self.main)
        self.compute = [0.0] * run.ranks
        self.comm = [0.0] * run.ranks
        self.number = 0

    def jitter(self) -> float:
        """Returns a factor of noise around one."""
        return float(1 + self.run.noise * self.rng.standard_normal()) if self.run.noise else 1.0

    def slow_by(self, r: int) -> float:
        """Returns the factor by which kernels take longer on this rank."""
        return self.run.slow_by if r == self.run.slow_rank else 1.0

    def kernel_us(self, r: int) -> float:
        """Returns the time of a layer's forward kernel on this rank."""
        return self.run.kernel_us * self.slow_by(r)

    def host(
        self, r: int, tid: int, name: str, at: float, length: float, cat: str = "cpu_op", **args: Any
    ) -> None:
        """Adds an event of a host's thread."""
        event = {"ph": "X", "cat": cat, "name": name, "pid": 10 + r, "tid": tid, "ts": at, "dur": length}
        self.run.events[r].append({**event, "args": args})

    def kernel(self, r: int, stream: int, name: str, begin: float, length: float, **args: Any) -> None:
        """Adds an event of a device's stream, which the last launch started."""
        event = {
            "ph": "X",
            "cat": "kernel",
            "name": name,
            "pid": r,
            "tid": stream,
            "ts": begin,
            "dur": length,
        }
        known = {"stream": stream, "device": r, "correlation": self.number}
        self.run.events[r].append({**event, "args": {**known, **args}})

    def launch(
        self, r: int, tid: int, at: float, name: str, length: float, ready: float = 0.0
    ) -> tuple[float, float]:
        """Launches a kernel on the compute stream; returns the host time afterwards, and the end of the kernel."""
        self.number += 1
        cost = self.run.launch_us * self.jitter()
        begin = max(at + self.run.latency_us, self.compute[r] + self.run.gap_us, ready)
        self.host(r, tid, "cudaLaunchKernel", at, cost, "cuda_runtime", correlation=self.number)
        self.kernel(r, 7, name, begin, length)
        self.compute[r] = begin + length
        return at + cost, begin + length

    def between(self, r: int, tid: int, at: float, name: str) -> float:
        """Returns the host time after an op's own work."""
        length = self.run.between_us * self.jitter()
        self.host(r, tid, name, at, length)
        return at + length

    def forward(self, r: int) -> None:
        """Simulates a rank's forward pass, on the main thread."""
        run, at = self.run, self.main[r]
        if run.late_us and r == run.slow_rank:
            self.host(r, 1, "preparing", at, run.late_us)
            at += run.late_us
        if run.chance_us:
            late = float(self.rng.exponential(run.chance_us))
            self.host(r, 1, "preparing", at, late)
            at += late
        for layer in range(run.layers):
            at = self.between(r, 1, at, "aten::linear")
            at, _ = self.launch(r, 1, at, f"fwd_{layer}", self.kernel_us(r) * self.jitter())
            kernels = min(run.light, 1) if run.fused else run.light
            for k in range(kernels):
                at = self.between(r, 1, at, "aten::add")
                length = run.light_us * self.slow_by(r) * run.light / kernels * self.jitter()
                at, _ = self.launch(r, 1, at, f"elementwise_{layer}_{k}", length)
        self.main[r] = at
        self.auto[r] = at + 30.0

    def backward(self, back: int) -> list[float]:
        """Simulates a layer's backward pass on every rank; the last layer is 0. If its bucket is full, returns when
        that was reduced on each rank, otherwise nothing."""
        run, layer = self.run, self.run.layers - 1 - back
        full = (back + 1) % run.bucket_layers == 0 or back == run.layers - 1
        bucket = back // run.bucket_layers
        begins, hosts = [], []
        for r in range(run.ranks):
            at = self.between(r, 2, self.auto[r], "LinearBackward")
            at, done = self.launch(r, 2, at, f"bwd_{layer}", 2 * self.kernel_us(r) * self.jitter())
            if full:
                self.host(r, 2, "cudaEventRecord", at, 1.0, "cuda_runtime")
                self.host(r, 2, "cudaStreamWaitEvent", at + 1.0, 1.0, "cuda_runtime")
                at += 2.0
                begins.append(max(at + run.latency_us, self.comm[r] + run.gap_us, done + run.event_us))
                hosts.append(at)
                run.true_waits.add((f"bwd_{layer}", f"bucket_{bucket}"))
            self.auto[r] = at
        return self.all_reduce(bucket, begins, hosts) if full else []

    def all_reduce(self, bucket: int, begins: list[float], hosts: list[float]) -> list[float]:
        """Simulates the all-reduce of a bucket, which ends at the same time on every rank."""
        run = self.run
        held = round(run.bucket_bytes * (1 + run.bucket_growth * bucket))
        cost = (run.collective_us + held / run.bandwidth_bytes_per_us) * self.jitter()
        end = max(begins) + cost
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        args = {
            "Collective name": "allreduce",
            "In msg nelems": held // 4,
            "Out msg nelems": held // 4,
            "dtype": "Float",
            "Process Group Name": "0",
            "Process Group Ranks": str(list(range(run.ranks))),
        }
        for r in range(run.ranks):
            self.number += 1
            took = run.launch_us * self.jitter()
            self.host(r, 2, "cudaLaunchKernelExC", hosts[r], took, "cuda_runtime", correlation=self.number)
            self.kernel(r, 20, name, begins[r], end - begins[r], **args)
            self.comm[r] = end
            self.auto[r] = hosts[r] + took
        return [end] * run.ranks

    def update(self, r: int, summed: float) -> None:
        """Simulates a rank's optimizer after the last bucket is reduced, and a blocking read of the loss."""
        run, at = self.run, self.auto[r] + 25.0
        self.host(r, 1, "cudaStreamWaitEvent", at, 1.0, "cuda_runtime")
        at += 1.0
        ready = summed + run.event_us
        for layer in range(3):
            at = self.between(r, 1, at, "Optimizer.step")
            at, done = self.launch(r, 1, at, f"adam_{layer}", run.kernel_us / 4, ready if layer == 0 else 0.0)
        run.true_waits.add((f"bucket_{(run.layers - 1) // run.bucket_layers}", "adam_0"))
        back_at = max(at + 4.0, done + 6.0)
        self.host(r, 1, "cudaStreamSynchronize", at, back_at - at, "cuda_runtime")
        self.main[r] = self.between(r, 1, back_at, "aten::item")


def _set_clocks(run: ImaginedRun) -> None:
    for r, events in run.events.items():
        skew = run.skew_us[r] if run.skew_us else 0.0
        drift = run.drift[r] if run.drift else 0.0
        for e in events:
            begin, end = (x * (1 + drift) + skew for x in (e["ts"], e["ts"] + e["dur"]))
            e["ts"], e["dur"] = round(begin, 3), round(end - begin, 3)


def trace(run: ImaginedRun, rank: int) -> dict[str, Any]:
    """Returns one rank's Kineto document."""
    info = {"backend": "nccl", "rank": rank, "world_size": run.ranks}
    return {"schemaVersion": 1, "distributedInfo": info, "traceEvents": run.events[rank]}


def write(run: ImaginedRun, folder: Path) -> Path:
    """Writes all ranks' traces as the profiler does."""
    folder.mkdir(parents=True, exist_ok=True)
    for r in range(run.ranks):
        with gzip.open(folder / f"rank{r}.json.gz", "wt", compresslevel=1) as f:
            json.dump(trace(run, r), f)
    return folder
