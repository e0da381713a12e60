"""The model of ``buckets`` in PyTorch: plain DistributedDataParallel over gloo, and under each policy's plan."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from bench.netlab.buckets import (
    DDP_CAP,
    DEPTH,
    HOSTS,
    ROWS,
    SIZES,
    TAIL,
    WIDTH,
    chosen,
    parameters,
)

__all__ = ["run_cells"]

_SAMPLES = 8


def _tower() -> Any:
    import torch

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in parameters(0).items():
                self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(value.copy())))

        def forward(self, x: Any) -> Any:
            for i in range(DEPTH):
                x = x + 0.5 * torch.tanh(x @ getattr(self, f"a{i:02}"))
            h = x.mean(dim=1)
            for i in range(len(TAIL)):
                h = h @ getattr(self, f"b{i}")
                h = torch.tanh(h) if i + 1 < len(TAIL) else h
            return h

    return Tower()


def _data(rank: int, count: int) -> list[tuple[Any, Any]]:
    import torch

    random = np.random.default_rng(100 + rank)
    teacher = np.random.default_rng(2).normal(size=(WIDTH, TAIL[-1][1]))
    out = []
    for _ in range(count):
        means = random.normal(size=(_SAMPLES, 1, WIDTH))
        x = (means + 0.3 * random.normal(size=(_SAMPLES, ROWS // _SAMPLES, WIDTH))).astype(np.float32)
        y = np.tanh(means[:, 0] @ teacher / np.sqrt(WIDTH)).astype(np.float32)
        out.append((torch.from_numpy(x), torch.from_numpy(y)))
    return out


def run_cells(job: dict[str, Any], say: Callable[[dict[str, Any]], None], rank: int) -> None:
    """Runs on every host, like ``buckets.run_cells``; "ddp itself" is DDP with its own buckets, without our hook."""
    import torch
    import torch.distributed as dist

    address = job["coordinator"]
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}", rank=rank, world_size=HOSTS, timeout=timedelta(seconds=120)
    )
    torch.set_num_threads(1)
    data = _data(rank, 8)

    def agreed(seconds: float) -> float:
        slowest = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest[0])

    for cell in job["cells"]:
        key = cell["key"]
        say({"key": key, "begun": time.time()})
        if cell["what"] == "compute":
            alone, _ = _train(_tower(), None, data, cell["repeats"], job["learning_rate"])
            say({"key": key, "compute_s": agreed(statistics.median(alone))})
            continue
        if cell["what"] == "traced":
            say({"key": key, "steps_s": [agreed(s) for s in _traced(cell, job, data)]})
            continue
        say({"key": key, "rows": _under_policies(cell, job, data, agreed)})
    dist.barrier()
    # Gloo's threads sometimes outlive the group, and the interpreter's shutdown then aborts; the results are written.
    os._exit(0)


def _problem_for(params: Any, compute_s: float, nbytes: list[float], seconds: list[float]) -> Any:
    """Returns the problem: blocks by FLOPs, of which a third is forward, and one link with the measured curve."""
    from pase.schedule import SendTime
    from pase.schedule.pipedream import Layer, problem_from_layers
    from pase.schedule.types import Link

    rows = {k: ROWS if k.startswith("a") else ROWS // 128 for k in params}
    work = {k: float(p.size * rows[k]) for k, p in params.items()}
    total = sum(work.values())
    layers = [
        Layer(
            name=k,
            forward_s=compute_s / 3 * work[k] / total,
            backward_s=compute_s * 2 / 3 * work[k] / total,
            parameters=((k, p.size * 4),),
        )
        for k, p in params.items()
    ]
    link = Link(name="network", curve=SendTime.table(nbytes, seconds))
    return problem_from_layers(layers, (link,), name="tower")


def _under_policies(
    cell: Mapping[str, Any], job: Mapping[str, Any], data: list[Any], agreed: Callable[[float], float]
) -> list[dict[str, Any]]:
    """Returns a row for each policy's plan, predicted and measured, and for plain DDP. agreed: takes the seconds of the
    slowest host."""
    from pase.schedule import evaluate

    seconds = [agreed(s) for s in _curve()]
    problem = _problem_for(
        parameters(0), job["compute_s"], list(map(float, SIZES)), np.maximum.accumulate(seconds).tolist()
    )
    iterations, rate = cell["iterations"], job["learning_rate"]
    plans = chosen(problem, job["policies"])
    itself, losses = _train(_tower(), (None, None), data, iterations, rate)
    rows: list[dict[str, Any]] = [
        {
            "policy": "ddp itself",
            "measured_s": agreed(statistics.median(itself)),
            "losses": losses,
            "staleness": 0,
            "messages": 0,
            "updates_per_iteration": 1.0,
            "spread": 0.0,
            "predicted_s": None,
        }
    ]
    for outcome, name in plans:
        times, losses = _train(_tower(), (problem, outcome.plan), data, iterations, rate)
        low, middle, high = np.percentile(times, [25, 50, 75])
        # DDP waits for every message before the optimizer's step: no message overlaps with the next forward.
        e = (
            evaluate(problem, replace(outcome.plan, barrier=True))
            if not outcome.plan.staleness
            else outcome.evaluation
        )
        rows.append(
            {
                "policy": name,
                "measured_s": agreed(float(middle)),
                "spread": float((high - low) / middle),
                "predicted_s": e.iteration_s,
                "staleness": e.staleness,
                "messages": e.messages,
                "updates_per_iteration": e.updates_per_iteration,
                "losses": losses,
                "period": outcome.plan.period,
            }
        )
    return rows


def _traced(cell: Mapping[str, Any], job: Mapping[str, Any], data: list[Any]) -> list[float]:
    """Returns the seconds of traced steps under a policy whose buckets depend only on sizes and order, with its own
    limits, as in ``pase replay --what-if bucket-plan=``."""
    from pase.schedule.registry import Options, get_policy

    problem = _problem_for(parameters(0), job["compute_s"], [1e3, 1e9], [1e-4, 40.0])
    given = problem, get_policy(cell["policy"]).make(problem, Options())
    rate, traces = job["learning_rate"], Path(cell["traces"])
    return _train(_tower(), given, data, cell["iterations"], rate, traces)[0]


def _curve() -> list[float]:
    import torch
    import torch.distributed as dist

    out = []
    for n in SIZES:
        x = torch.zeros(n // 4)
        times = []
        for _ in range(9):
            began = time.perf_counter()
            dist.all_reduce(x)
            times.append(time.perf_counter() - began)
        out.append(statistics.median(times[2:]))
    return out


def _train(
    model: Any, given: Any, data: list[Any], iterations: int, rate: float, traces: Path | None = None
) -> tuple[list[float], list[float]]:
    """Returns (seconds per iteration, averaged over the plan's period; losses). given: None: no communication;
    (None, None): plain DDP; (problem, plan): DDP under the plan. traces: the folder for the profiler's traces of the
    timed iterations."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from pase.backends.emit.ddp_hook import attach
    from pase.replay import profile

    hook, period, net = None, 1, model
    if given is not None:
        if given[1] is None:
            net = DistributedDataParallel(model, bucket_cap_mb=DDP_CAP / 2**20)
        else:
            net = DistributedDataParallel(model, bucket_cap_mb=0.001)
            hook, period = attach(net, *given), given[1].period
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    times, losses = [], []
    warm, whole = 3 * period, max(2, -(-iterations // period)) * period

    def step(i: int) -> None:
        began = time.perf_counter()
        x, y = data[i % len(data)]
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        if hook is None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            hook.step(optimizer)
        times.append(time.perf_counter() - began)
        losses.append(float(loss.detach()))

    for i in range(warm):
        step(i)
    with profile(traces, framework="torch") if traces else nullcontext() as run:
        for i in range(warm, warm + whole):
            with run.step() if run is not None else nullcontext():
                step(i)
    steady = times[warm:]
    return [statistics.fmean(steady[i : i + period]) for i in range(0, whole, period)], losses
