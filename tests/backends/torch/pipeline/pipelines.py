"""Small PyTorch models for pipelines, their plans with random stages, and helpers that run ranks as threads."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import pase
from bench.cases.torch_ranks import by_threads, on_ranks
from pase.ir import named, simplify
from pase.ir.blocks import rematerialised
from pase.pipeline.registry import schedule
from pase.plan.pipeline import StagePlan
from pase.tables.itemize import split_of
from pase.tables.layouts import configs

RANKS, MICRO_BATCHES = 2, 4
NORMS = {2.0: 1e-2, np.inf: 1e-4}
"""Kind of norm -> the maximum to which it is clipped. The norms are clipped one after the other."""


def words(layers: int = 4, dropout: float = 0.0) -> tuple[Any, tuple[Any, ...]]:
    """A decoder with tied embeddings, a mask that each layer reads, and labels some of which are ignored."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
    from torch.nn.functional import dropout as dropped

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Any, mask: Any) -> Any:
            q, k, v = (
                t.view(*t.shape[:2], 4, 4).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
            )
            y = scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + self.out(y.transpose(1, 2).reshape(x.shape))
            return x + dropped(self.down(gelu(self.up(x))), dropout, self.training)

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.places = nn.Embedding(24, 16), nn.Parameter(torch.randn(8, 16))
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.head = nn.Linear(16, 24, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Any, labels: Any) -> Any:
            seen = torch.ones(8, 8, dtype=torch.bool).tril() & (ids > 2)[:, None, None, :]
            mask = torch.where(seen, 0.0, -1e9).to(self.places.dtype)
            x = self.table(ids) + self.places
            for layer in self.layers:
                x = layer(x, mask)
            return cross_entropy(self.head(x).view(-1, 24), labels.view(-1))

    torch.manual_seed(0)
    labels = torch.randint(24, (16, 8))
    labels[torch.rand(16, 8) < 0.3] = -100
    labels[::4] = -100  # all of the first micro-batch
    return Words().double(), (torch.randint(24, (16, 8)), labels)


def funnel() -> tuple[Any, tuple[Any, ...]]:
    """Layers that are all different, and a value that the last one reads in addition."""
    import torch
    from torch import nn

    class Funnel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = (12, 16, 20, 24, 16, 8)
            self.layers = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))
            self.again = nn.Linear(12, 8)

        def forward(self, x: Any, y: Any) -> Any:
            first = torch.tanh(x)
            x = first
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return nn.functional.mse_loss(x + self.again(first), y)

    torch.manual_seed(0)
    return Funnel().double(), (torch.randn(16, 12).double(), torch.randn(16, 8).double())


def branching() -> tuple[Any, tuple[Any, ...]]:
    """Layers with a branch each. The plan assumes that the branch with weights is always taken, and it is."""
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            y = torch.tanh(self.one(x))
            return x + torch.cond(self.one.bias.square().sum() > 0, self.two, torch.sin, (y,))

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x: Any, y: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return nn.functional.mse_loss(x, y)

    torch.manual_seed(0)
    return Branching().double(), (torch.randn(16, 8).double(), torch.randn(16, 8).double())


def planned(module: Any, batch: tuple[Any, ...], mesh: str = "2", **options: Any) -> Any:
    """A plan for two pipeline ranks, each with a mesh of this shape."""
    devices = RANKS * int(np.prod([int(n) for n in mesh.split("x")]))
    settled = {"accumulate": MICRO_BATCHES, "memory_limit": "none", "stage_schedule": "1f1b", **options}
    return pase.compile(
        module, *batch, devices=devices, pipeline=RANKS, baselines=False, mesh=mesh, **settled
    )


def staged(plan: Any, name: str, chunks: int, cuts: tuple[int, ...], seed: int) -> Any:
    """The plan with another schedule, other cuts, and a random split of each stage."""
    p, ranks = plan.pipeline, schedule(name, RANKS, MICRO_BATCHES, chunks).rank_of
    rng = np.random.default_rng(seed)
    graph = named(simplify(rematerialised(plan.traced.graph, p.recompute[0])))
    strategies = tuple(
        {n.name: split_of(n, rng.choice(configs(n, plan.mesh)), plan.mesh) for n in graph.nodes} for _ in cuts
    )
    stages = tuple(
        StagePlan(
            rank=rank,
            blocks=n,
            strategy=k,
            recomputes=False,
            weights="hoisted" if k % 2 else "each",
            forward_s=1.0,
            backward_s=2.0,
            memory_bytes=1,
        )
        for k, (rank, n) in enumerate(zip(ranks, cuts, strict=True))
    )
    again = tuple(p.recompute[min(k, len(p.recompute) - 1)] for k in range(len(cuts)))
    made = replace(
        p, schedule=name, chunks=chunks, cuts=cuts, stages=stages, strategies=strategies, recompute=again
    )
    return replace(plan, pipeline=made)


def optimizer(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def on_rank(run: Any, module: Any, batch: tuple[Any, ...], counted: bool = True) -> dict[str, Any]:
    """One step on this rank: the loss, the gradients, the parameters after it, the norms of all gradients, and this
    rank's clipped gradients. counted: whether to compare what is sent with the plan's list."""
    from pase.backends.audit.torch import recorded
    from tests.backends.torch.pipeline.stage_counts import planned_in_stages

    mine = copy.deepcopy(module)
    step = run.train_step(mine, lambda p, **_: optimizer(p))
    with recorded(step.parallel.links.groups) as found:
        loss = step(*batch)
    assert not counted or found.sent == planned_in_stages(run, step.parallel.links.rank)
    out = {"loss": float(loss)}
    for k, p in mine.named_parameters():
        out[f"gradient {k}"] = p.grad.full_tensor().numpy().copy()
        out[f"after {k}"] = p.detach().full_tensor().numpy()
    out["norms"] = [float(step.parallel.clip_grad_norm_(most, n)) for n, most in NORMS.items()]
    return out | {f"clipped {k}": p.grad.full_tensor().numpy() for k, p in mine.named_parameters()}


def resumed(before: Any, after: Any, module: Any, batch: tuple[Any, ...], folder: Path) -> dict[str, Any]:
    """The parameters on this rank after a step by one plan, a checkpoint, and a step by another plan. The second plan
    loads the checkpoint into a module that has only shapes."""
    import torch
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    flat = StateDictOptions(flatten_optimizer_state_dict=True)

    def state(step: Any) -> dict[str, Any]:
        model, of = get_state_dict(step.module, step.optimizer, options=flat)
        return {"model": model, "optimizer": of}

    step = before.train_step(copy.deepcopy(module), lambda p, **_: optimizer(p))
    step(*batch)
    checkpoint.save(state(step), checkpoint_id=folder)
    shapes = {id(p): torch.nn.Parameter(torch.empty_like(p, device="meta")) for p in module.parameters()}
    other = copy.deepcopy(module, shapes)
    step = after.train_step(other, lambda p, **_: optimizer(p), device="cpu")
    found = state(step)
    checkpoint.load(found, checkpoint_id=folder)
    set_state_dict(
        other,
        step.optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
        options=flat,
    )
    step(*batch)
    return {f"after {k}": p.detach().full_tensor().numpy() for k, p in other.named_parameters()}


def alone(module: Any, batch: tuple[Any, ...], steps: int = 1) -> dict[str, Any]:
    """The results of PyTorch alone, for the last of ``steps`` steps."""
    import torch

    mine = copy.deepcopy(module)
    by = optimizer(mine.parameters())
    for _ in range(steps):
        by.zero_grad()
        loss = mine(*batch)
        loss.backward()
        by.step()
    out: dict[str, Any] = {"loss": loss.item()}
    for k, p in mine.named_parameters():
        out[f"gradient {k}"], out[f"after {k}"] = p.grad.numpy().copy(), p.detach().numpy()
    clip = torch.nn.utils.clip_grad_norm_
    out["norms"] = [float(clip(mine.parameters(), most, n)) for n, most in NORMS.items()]
    assert all(norm > most for norm, most in zip(out["norms"], NORMS.values(), strict=True))
    return out | {f"clipped {k}": p.grad.numpy() for k, p in mine.named_parameters()}


def check(
    plan: Any, module: Any, batch: tuple[Any, ...], wanted: dict[str, Any], counted: bool = True
) -> None:
    """Run all ranks as threads. The loss is on every rank, and each parameter on the ranks of one stage. All equal the
    results of PyTorch alone."""
    run = plan.torch
    assert (
        run.stages
        and run.stage_of_parameter
        and all(s.program.ops and s.leaves and s.sums for s in run.splits)
    )
    with by_threads():
        compared(on_ranks(plan.mesh.devices * RANKS, lambda r: on_rank(run, module, batch, counted)), wanted)


def compared(ranks: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    found = set()
    for made in ranks:
        assert made.keys() - {"loss", "norms"}
        for k, v in made.items():
            np.testing.assert_allclose(v, wanted[k], rtol=1e-10, atol=1e-13, err_msg=k)
        found |= made.keys()
    assert found == wanted.keys()


@cache
def model() -> tuple[Any, ...]:
    """(module, batch, plan, the results of PyTorch alone)."""
    module, batch = words()
    return module, batch, planned(module, batch), alone(module, batch)
