"""Simulates one rank of a Megatron-like GPT at any degree of data, tensor and pipeline parallelism.

It is independent of pase: it walks the program op by op and computes the starts itself, in µs. The time of a product
follows from its extents by a law other than the roofline's: small extents are less efficient. Ranks of one stage are
equal, so one of each stage is simulated. Runs without stages can be written as Kineto traces with the shapes of
operands.
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
class ImaginedTransformer:
    """The settings of simulated training. data, tensor, stages: degrees. batch: sequences per micro-batch and rank."""

    layers: int = 4
    d: int = 768
    heads: int = 12
    batch: int = 2
    seq: int = 128
    vocab: int = 1021
    data: int = 1
    tensor: int = 1
    stages: int = 1
    micro_batches: int = 1
    iterations: int = 4
    between_us: float = 3.0
    launch_us: float = 4.0
    latency_us: float = 5.0
    gap_us: float = 1.0
    event_us: float = 3.0
    peak_flops_per_us: float = 20e6
    link_bytes_per_us: float = 20e3
    collective_us: float = 15.0
    noise: float = 0.0
    seed: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    iteration_us: list[float] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.batch * self.seq


OperandLists = list[list[int]]
_ImaginedOp = tuple[str, str, float, OperandLists]
"""The framework's op, the kernel, µs, operands."""


def _product_us(run: ImaginedTransformer, m: int, n: int, k: int) -> float:
    reached = min(m, n, k) / (min(m, n, k) + 96)
    return 3.0 + 2.0 * m * n * k / (run.peak_flops_per_us * reached)


def _mm(run: ImaginedTransformer, name: str, m: int, n: int, k: int) -> _ImaginedOp:
    return "aten::mm", f"gemm_f32_{name}", _product_us(run, m, n, k), [[m, k], [k, n]]


def _light(name: str, *dims: int) -> _ImaginedOp:
    return f"aten::{name}", f"elementwise_{name}", 2.0 + 8.0 * float(np.prod(dims)) / 1e6, [list(dims)]


def _sum_us(run: ImaginedTransformer, nbytes: float, ways: int) -> float:
    return (ways - 1) * (run.collective_us + 2 * nbytes / ways / run.link_bytes_per_us)  # rounds of a ring


def _between(run: ImaginedTransformer) -> list[_ImaginedOp]:
    """Returns Megatron's all-reduce of partial activations or gradients, if there is any."""
    nbytes = 4 * run.rows * run.d
    name = "ncclDevKernel_AllReduce_Sum_f32"
    return [("c10d::allreduce_", name, _sum_us(run, nbytes, run.tensor), [[nbytes // 4]])] * (run.tensor > 1)


def layer_forward(run: ImaginedTransformer) -> list[_ImaginedOp]:
    """Returns a layer's ops on one tensor-parallel rank."""
    rows, d, part = run.rows, run.d, run.d // run.tensor
    heads = run.heads // run.tensor
    scores = 4e-6 * run.batch * heads * run.seq * run.seq * 64 / run.peak_flops_per_us * 1e6
    attend: _ImaginedOp = (
        "aten::_scaled_dot_product_flash_attention",
        "flash_fwd",
        scores,
        [[run.batch, heads, run.seq, 64]] * 3,
    )
    return [
        _light("native_layer_norm", rows, d),
        *(_mm(run, x, rows, part, d) for x in ("q", "k", "v")),
        attend,
        _mm(run, "o", rows, d, part),
        *_between(run),
        _light("add", rows, d),
        _light("native_layer_norm", rows, d),
        _mm(run, "up", rows, 4 * part, d),
        _light("gelu", rows, 4 * part),
        _mm(run, "down", rows, d, 4 * part),
        *_between(run),
        _light("add", rows, d),
    ]


def layer_backward(run: ImaginedTransformer) -> list[_ImaginedOp]:
    """Returns the ops of a layer's backward, with two products for each product of forward."""
    rows, d, part = run.rows, run.d, run.d // run.tensor

    def both(name: str, n: int, k: int) -> list[_ImaginedOp]:
        return [_mm(run, f"{name}_dx", rows, k, n), _mm(run, f"{name}_dw", k, n, rows)]

    name, kernel, us, dims = layer_forward(run)[4]
    attend: _ImaginedOp = (f"{name}_backward", kernel.replace("fwd", "bwd"), 2.5 * us, dims)
    return [
        *both("down", d, 4 * part),
        _light("gelu_backward", rows, 4 * part),
        *both("up", 4 * part, d),
        *_between(run),
        _light("native_layer_norm_backward", rows, d),
        *both("o", d, part),
        attend,
        *(op for x in ("v", "k", "q") for op in both(x, part, d)),
        *_between(run),
        _light("native_layer_norm_backward", rows, d),
    ]


def _embedding(run: ImaginedTransformer) -> int:
    """Returns the elements of the tables of words and positions, which are not split."""
    return (run.vocab + run.seq) * run.d


def _head(run: ImaginedTransformer, backward: bool) -> list[_ImaginedOp]:
    rows, d, v = run.rows, run.d, run.vocab
    loss = _light("_log_softmax", rows, v)
    if not backward:
        return [_light("native_layer_norm", rows, d), _mm(run, "logits", rows, v, d), loss]
    return [loss, _mm(run, "logits_dx", rows, d, v), _mm(run, "logits_dw", d, v, rows)]


class _StageClock:
    """The present time of two threads and two streams of one rank of a stage, in µs."""

    def __init__(self, run: ImaginedTransformer, rng: np.random.Generator) -> None:
        self.run, self.rng = run, rng
        self.main = self.auto = 100.0
        self.compute = self.comm = 0.0
        self.number = 0

    def jitter(self) -> float:
        return float(1 + self.run.noise * self.rng.standard_normal()) if self.run.noise else 1.0

    def emit(self, cat: str, name: str, tid: int, at: float, us: float, **args: Any) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": at, "dur": us, "args": args}
        self.run.events.append(event)

    def ops(self, ops: list[_ImaginedOp], tid: int, ready: float = 0.0) -> None:
        """Launches ops from a thread, one after the other; the first waits until ``ready``."""
        run, at = self.run, self.main if tid == 1 else self.auto
        for name, kernel, us, dims in ops:
            began, between = at, run.between_us * self.jitter()
            cost = run.launch_us * self.jitter()
            self.number += 1
            call = at + between
            start = max(call + run.latency_us, self.compute + run.gap_us, ready)
            us, ready = us * self.jitter(), 0.0
            self.emit("cuda_runtime", "cudaLaunchKernel", tid, call, cost, correlation=self.number)
            args: dict[str, Any] = {"stream": 7, "device": 0, "correlation": self.number}
            if kernel.startswith("nccl"):
                args |= _group(dims[0][0], list(range(run.tensor)), "tensor")
            self.emit("kernel", kernel, 7, start, us, **args)
            at = call + cost
            self.emit("cpu_op", name, tid, began, at - began + 0.01, **{"Input Dims": dims})
            at += 0.02
            self.compute = start + us
        if tid == 1:
            self.main = at
        else:
            self.auto = at

    def sum_gradients(self, elements: int) -> None:
        """Simulates the all-reduce of a bucket over the replicas, on its own stream."""
        run, at = self.run, self.auto
        self.number += 1
        self.emit("cuda_runtime", "cudaEventRecord", 2, at, 1.0)
        self.emit("cuda_runtime", "cudaStreamWaitEvent", 2, at + 1.0, 1.0)
        at += 2.0
        start = max(at + run.latency_us, self.comm + run.gap_us, self.compute + run.event_us)
        us = _sum_us(run, 4.0 * elements, run.data) * self.jitter()
        known = {"stream": 20, "device": 0, "correlation": self.number}
        self.emit("cuda_runtime", "cudaLaunchKernelExC", 2, at, run.launch_us, correlation=self.number)
        args = known | _group(elements, list(range(run.data)), "data")
        self.emit("kernel", "ncclDevKernel_AllReduce_Sum_f32", 20, start, us, **args)
        self.comm, self.auto = start + us, at + run.launch_us

    def update(self, sizes: list[int]) -> None:
        """Simulates the optimizer after the gradients are reduced, and a blocking read of the loss. sizes: elements of
        the parameters."""
        run, at = self.run, self.main
        self.emit("cuda_runtime", "cudaStreamWaitEvent", 1, at, 1.0)
        self.main = at + 1.0
        steps: list[_ImaginedOp] = [
            ("aten::_fused_adamw_", "multi_tensor_adam", 2.0 + 28.0 * n / 1.3e6, [[n]]) for n in sizes
        ]
        self.ops(steps, 1, self.comm + run.event_us if run.data > 1 else 0.0)
        at = self.main
        done = max(at + 4.0, self.compute + 6.0)
        self.emit("cuda_runtime", "cudaStreamSynchronize", 1, at, done - at)
        self.main = done + 2.0


def _group(elements: int, ranks: list[int], name: str) -> dict[str, Any]:
    sizes = {"In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float"}
    group = {"Process Group Name": name, "Process Group Ranks": str(ranks)}
    return {"Collective name": "allreduce", **sizes, **group}


def simulate(run: ImaginedTransformer) -> ImaginedTransformer:
    """Simulates the run: fills the events (of the last stage) and the iterations' times (of the slowest stage)."""
    rng = np.random.default_rng(run.seed)
    run.events = []
    walks = [_StageClock(run, rng) for _ in range(run.stages)]
    begun = [[w.main] for w in walks]
    for _ in range(run.iterations):
        _step(run, walks)
        for w, times in zip(walks, begun, strict=True):
            times.append(w.main)
    each = [[b - a for a, b in itertools.pairwise(times)] for times in begun]
    run.iteration_us = [max(of) for of in zip(*each, strict=True)]
    for k, (a, b) in enumerate(itertools.pairwise(begun[-1])):
        walks[-1].emit("user_annotation", f"ProfilerStep#{k}", 1, a, b - a)
    return run


def _step(run: ImaginedTransformer, walks: list[_StageClock]) -> None:
    """Simulates 1F1B; each action runs as soon as its inputs are available."""
    p, m = run.stages, run.micro_batches
    orders = []
    for s in range(p):
        warm = min(p - 1 - s, m)
        order = [("F", i) for i in range(warm)]
        for i in range(m):
            order += [("F", warm + i)] * (warm + i < m) + [("B", i)]
        orders.append(order)
    arrived: dict[tuple[str, int, int], float] = {}
    while any(orders):
        for s, (w, order) in enumerate(zip(walks, orders, strict=True)):
            while order:
                kind, i = order[0]
                needs = s > 0 if kind == "F" else s < p - 1
                if needs and (kind, s, i) not in arrived:
                    break
                order.pop(0)
                _act(run, w, s, kind, i, arrived.get((kind, s, i), 0.0))
                sent_us = run.collective_us + 4.0 * run.rows * run.d / run.link_bytes_per_us
                arrived[kind, s + (1 if kind == "F" else -1), i] = w.compute + sent_us
    for s, w in enumerate(walks):
        w.update([12 * run.d * run.d // run.tensor] * (run.layers // p) + [_embedding(run)] * (s == 0))


def _act(run: ImaginedTransformer, w: _StageClock, s: int, kind: str, i: int, ready: float) -> None:
    each = run.layers // run.stages
    if kind == "F":
        ops = [_light("embedding", run.rows, run.d)] * (s == 0) + layer_forward(run) * each
        w.ops(ops + (_head(run, False) if s == run.stages - 1 else []), 1, ready)
        return
    w.auto = w.main + 20.0
    w.ops(_head(run, True) if s == run.stages - 1 else [], 2, ready)
    ready = ready if s < run.stages - 1 else 0.0
    for _ in range(each):
        w.ops(layer_backward(run), 2, ready)
        ready = 0.0
        if run.data > 1 and i == run.micro_batches - 1:
            w.sum_gradients(12 * run.d * run.d // run.tensor)
    if s == 0 and run.data > 1 and i == run.micro_batches - 1:
        w.sum_gradients(_embedding(run))
    w.main = w.auto + 15.0


def write(run: ImaginedTransformer, folder: Path) -> Path:
    """Writes the trace of one rank of a run without stages as the profiler does."""
    assert run.stages == 1
    folder.mkdir(parents=True, exist_ok=True)
    world = run.data * run.tensor
    info = {"backend": "nccl", "rank": 0, "world_size": world}
    with gzip.open(folder / "rank0.json.gz", "wt", compresslevel=1) as f:
        json.dump({"schemaVersion": 1, "distributedInfo": info, "traceEvents": run.events}, f)
    return folder
