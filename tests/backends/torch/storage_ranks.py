"""Runs a small model's DTensors on two ranks: optimizers, clipping, checkpoints, compiled steps. Not a test module."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from tests.backends.torch.models import TorchCase, case
from tests.backends.torch.unwatched_models import unwatched

RANKS = 2
MOVED = (("fsdp", "random1@2"), ("ours@2", "zero2"))
"""The strategies under which a checkpoint is written and then read."""
STRATEGIES = ("fsdp", "zero2", "ours@2", "random1@2")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 1e-2, "eps": 1e-3, "amsgrad": True},
    "AdamW": {"lr": 1e-2, "eps": 1e-3, "fused": True},
    "Adagrad": {"lr": 1e-2, "eps": 1e-3},
    "RMSprop": {"lr": 1e-2, "eps": 1e-3},
    "NAdam": {"lr": 1e-2, "eps": 1e-3, "foreach": True},
}


def _plan(c: TorchCase, strategy: str) -> Any:
    plan = c.case.plan(strategy)
    assert plan is not None, strategy
    return plan.torch


def _apart(module: Any, alone: Any) -> float:
    """The largest difference of a parameter."""
    pairs = zip(module.parameters(), alone.parameters(), strict=True)
    return max(float((p.full_tensor() - q).abs().max()) for p, q in pairs)


def _gradients_apart(module: Any, alone: Any) -> float:
    pairs = [(p.grad, q.grad) for p, q in zip(module.parameters(), alone.parameters(), strict=True)]
    return max(float((g.full_tensor() - h).abs().max()) for g, h in pairs if g is not None or h is not None)


def run(folder: Path, rank: int) -> dict[str, Any]:
    """Run everything on this rank. Returns how far each result is from one process without pase."""
    c = case("block", RANKS)
    return {
        "optimizers": {f"{o} {s}": optimized(c, s, o) for o in OPTIMIZERS for s in ("zero2", "random1@2")},
        "clipped": {s: clipped(c, s) for s in STRATEGIES},
        "scaled": {s: scaled(c, s) for s in ("fsdp", "zero2")},
        "checkpoint": {
            f"{a} to {b}": checkpointed(c, a, b, folder)
            for a, b in (("fsdp", "random1@2"), ("ours@2", "zero2"))
        },
        "compiled": {s: compiled(c, s, "aot_eager") for s in ("fsdp", "random1@2")}
        | {"inductor": compiled(c, "ours@2", True)},
        "unwatched": unwatched_first(),
        "refused": refused(c),
        "stored": {s: stored(c, s) for s in STRATEGIES},
    }


def stored(c: TorchCase, strategy: str) -> dict[str, Any]:
    """Bytes of all storages of this rank's parameters beside the bytes of its parts, and what a copy of the module
    has."""
    module = copy.deepcopy(c.module)
    _plan(c, strategy).parallelize(module)
    parts = [p.to_local() for p in module.parameters()]
    copied = copy.deepcopy(module)
    return {
        "bytes": sum(x.nbytes for x in parts),
        "kept": sum(x.untyped_storage().nbytes() for x in parts),
        "copied": _apart(copied, c.module),
    }


def optimized(c: TorchCase, strategy: str, name: str) -> float:
    """The difference after three steps."""
    import torch

    made = getattr(torch.optim, name)
    module, alone = copy.deepcopy(c.module), copy.deepcopy(c.module)
    step = _plan(c, strategy).train_step(module, made, **OPTIMIZERS[name])
    usual = made(alone.parameters(), **OPTIMIZERS[name])
    for _ in range(3):
        step(*c.batch)
        usual.zero_grad()
        alone(*c.batch).backward()
        usual.step()
    return _apart(module, alone)


def clipped(c: TorchCase, strategy: str) -> dict[str, float]:
    """The differences of the norm and of the clipped gradients."""
    import torch

    module, alone = copy.deepcopy(c.module), copy.deepcopy(c.module)
    _plan(c, strategy).parallelize(module).backward(*c.batch)
    alone(*c.batch).backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)
    usual = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return {
        "norm": float((norm - usual).abs()),
        "gradients": _gradients_apart(module, alone),
        "was": float(usual),
    }


def scaled(c: TorchCase, strategy: str) -> float:
    """The difference after two steps of a user's own loop with a ``GradScaler``, of the gathered state."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    module, alone = copy.deepcopy(c.module), copy.deepcopy(c.module)
    step = _plan(c, strategy).parallelize(module)
    for m, run in ((module, step), (alone, alone)):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for _ in range(2):
            scaler.scale(run(*c.batch)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return max(
        (float((whole[k] - x).abs().max()) for k, x in alone.state_dict().items() if whole), default=0.0
    )


def checkpointed(c: TorchCase, first: str, then: str, folder: Path) -> float:
    """The difference after a step under one plan and a step under another, with a checkpoint between them."""
    import torch
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def state(step: Any) -> dict[str, Any]:
        model, optimizer = get_state_dict(step.module, step.optimizer)
        return {"model": model, "optimizer": optimizer}

    settings = {"lr": 1e-2, "eps": 1e-3}
    at = folder / f"{first} {then}"
    before = _plan(c, first).train_step(copy.deepcopy(c.module), torch.optim.AdamW, **settings)
    before(*c.batch)
    checkpoint.save(state(before), checkpoint_id=at)
    other = copy.deepcopy(c.module)
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(0.5)  # so that a parameter that is not loaded is noticed
    after = _plan(c, then).train_step(other, torch.optim.AdamW, **settings)
    found = state(after)
    checkpoint.load(found, checkpoint_id=at)
    set_state_dict(
        after.module, after.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )
    after(*c.batch)
    alone = copy.deepcopy(c.module)
    usual = torch.optim.AdamW(alone.parameters(), **settings)
    for _ in range(2):
        usual.zero_grad()
        alone(*c.batch).backward()
        usual.step()
    return _apart(other, alone)


def compiled(c: TorchCase, strategy: str, backend: str | bool) -> dict[str, float]:
    """The differences after two backward passes of a compiled step, whose gradients are added."""
    module, alone = copy.deepcopy(c.module), copy.deepcopy(c.module)
    step = _plan(c, strategy).parallelize(module, compile=backend)
    losses = [step.backward(*c.batch) for _ in range(2)]
    for _ in range(2):
        alone(*c.batch).backward()
    return {
        "loss": max(float((x - c.loss).abs()) for x in losses),
        "gradients": _gradients_apart(module, alone),
    }


def unwatched_first() -> float:
    """How far a gradient is off if the first reader of a transfer's result is under ``torch.no_grad``."""
    import torch

    from bench.cases.plans import Case
    from pase import machine
    from pase.compiler.problem.problem import SplitProblem
    from pase.frontends import registry

    torch.manual_seed(0)
    alone, x = unwatched("pseudo labels").double(), torch.randn(16, 16, dtype=torch.float64)
    traced = registry.trace(copy.deepcopy(alone), x)
    problem = SplitProblem.of(traced.graph, RANKS, machine.load("h100x8"), "analytic", "adam")
    plan = Case(traced=traced, problem=problem).plan("random1@2")
    assert plan is not None
    module = copy.deepcopy(alone)
    plan.torch.parallelize(module).backward(x)
    alone(x).backward()
    return _gradients_apart(module, alone)


def refused(c: TorchCase) -> list[dict[str, str]]:
    """The fields of the errors that compiled steps raise."""
    import torch

    import pase
    from pase.errors import PaseError

    said = []

    def tried(what: Any) -> None:
        try:
            what()
        except PaseError as e:
            said.append({"where": e.where, "what": e.what, "fix": e.fix})

    attention = torch.nn.functional.scaled_dot_product_attention
    drops, x = torch.nn.Linear(8, 8), torch.randn(4, 2, 4, 8)
    plan = pase.compile(
        drops, x, devices=RANKS, loss=lambda m, x: attention(m(x), x, x, dropout_p=0.5).mean()
    )
    tried(lambda: plan.torch.parallelize(drops, compile="aot_eager").backward(x))
    step = _plan(c, "fsdp").parallelize(copy.deepcopy(c.module), compile="eager")
    tried(lambda: step(*c.batch))
    tried(lambda: _plan(c, "fsdp").parallelize(copy.deepcopy(c.module), compile="fast").backward(*c.batch))
    return said
