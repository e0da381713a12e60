"""Compares the peak memory that a plan predicts for a PyTorch step with what a rank's step keeps on fake tensors.

    python -m bench audit.torch_memory                  # twelve models, four strategies, 8 and 32 devices; 20 minutes
    python -m bench audit.torch_memory --only "GPT-2"   # or " 8": all models on 8 devices

Each row is one model under one strategy on 8 or 32 devices: ``plan.torch.memory(rank=0)``, with Adam. ``ratio``:
predicted / tracked peak, without the workspace of products, which fake tensors do not have. ``tracked`` and
``predicted``: bytes by kind, each at its own worst moment. Writes bench/results/torch_memory.json.
"""

from __future__ import annotations

from typing import Any

from bench.cases.plans import Case
from bench.cases.torch_models import MODELS, in_float32
from bench.runner import Benchmark, OwnProcess

STRATEGIES = {
    "data parallel": "data_parallel",
    "FSDP": "fsdp",
    "Megatron": "megatron/megatron_2x",
    "ours": "ours",
}
"""Strategy -> its name as in ``bench.cases.plans.Case``; one that ends with "x" takes the other devices as well."""
DEVICES = (8, 32)
APART = OwnProcess(
    preloaded=("torch.export", "bench.cases.torch_models", "pase.frontends.torch.frontend"),
    cpu_s=300,
    memory=24 << 30,
)


def measured(model: str, strategy: str, devices: int) -> dict[str, Any]:
    """Returns the row of a model under a strategy."""
    import torch

    from pase import machine
    from pase.compiler.problem.problem import SplitProblem
    from pase.frontends import registry

    torch.set_num_threads(1)
    module, batch = in_float32(model, 4 * devices)
    traced = registry.trace(module, batch)
    problem = SplitProblem.of(traced.graph, devices, machine.load("h100x8"), "analytic", "adam")
    label = STRATEGIES[strategy]
    plan = Case(traced=traced, problem=problem).plan(label + str(devices // 2) * label.endswith("x"))
    if plan is None:
        return {"refused": True}
    return peaks(plan, problem.machine.device.workspace_bytes)


def peaks(plan: Any, workspace: float) -> dict[str, Any]:
    """Returns the tracked and the predicted peak of a plan's rank 0, by kind, without the workspace of
    products (bytes)."""
    found = plan.torch.memory(rank=0).to_json()
    predicted = found.pop("predicted")
    predicted |= {k: predicted[k] - workspace for k in ("buffers", "total")}
    return {
        "ratio": round(predicted["total"] / found["total"], 3),
        "phase": found["phase"],
        "tracked": {k: v for k, v in found.items() if isinstance(v, int) and k not in ("rank", "devices")},
        "predicted": predicted,
    }


BENCH = Benchmark(
    "torch_memory",
    {f"{m} {s} {n}": (m, s, n) for m in MODELS for s in STRATEGIES for n in DEVICES},
    measured,
    "{model} {strategy} {devices}",
    apart=APART,
)
