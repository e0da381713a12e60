"""Masks of attention that are the causal one, or hide nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import on_ranks

pytestmark = pytest.mark.torch


def added(behind: float) -> Any:
    import torch

    return torch.zeros(2, 1, 5, 5).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), behind)


def test_masks_of_a_known_form_are_told_from_others() -> None:
    import torch

    from pase.backends.torch.spmd.masks import mask_form

    ones = torch.ones(5, 5, dtype=torch.bool)
    least = torch.finfo(torch.float32).min
    causal = (ones.tril(), ones.tril().expand(3, 1, 5, 5), added(-math.inf), added(least))
    assert [mask_form(m) for m in causal] == ["causal"] * 4
    whole = (ones, ones[:2].expand(3, 1, 2, 5), torch.zeros(5, 5), ones[:1, :1])
    assert [mask_form(m) for m in whole] == ["whole"] * 4
    others = (ones.tril(1), ones.tril().triu(-2), ones.tril()[:, :4], ones.int(), added(-1e4), ones[0])
    assert [mask_form(m) for m in others] == [None] * 6
    for first in (ones.tril(), ones):
        one_differs = first.repeat(2, 1, 1)
        one_differs[1, 4, 0] = False
        assert mask_form(one_differs) is None


def net(mask: Callable[[Any], Any]) -> Any:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
            self.register_buffer("scale", torch.full((16,), 0.5))

        def forward(self, x: Any) -> Any:
            b, n, _ = x.shape
            q, k, v = (t.view(b, n, 2, 8).transpose(1, 2) for t in self.qkv(x * self.scale).split(16, -1))
            seen = mask(torch.arange(n)).expand(b, 1, n, n)
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            return self.out(y.transpose(1, 2).reshape(b, n, 16)).square().mean()

    torch.manual_seed(0)
    return Net().double()


@pytest.mark.parametrize(
    ("form", "runs"), [("causal", "is_causal = True"), ("whole", "mask = None"), ("window", "")]
)
def test_attention_with_a_mask_of_a_known_form_runs_without_it(form: str, runs: str) -> None:
    """As its eager code would call it; the mask is not computed either. A mask with a window is kept."""
    import torch

    def mask(at: Any) -> Any:
        before = at[None, :] <= at[:, None]
        every = before | (at[None, :] > at[:, None])
        window = before & (at[None, :] > at[:, None] - 3)
        return {"causal": before, "whole": every, "window": window}[form]

    module, x = net(mask), torch.randn(4, 6, 16, dtype=torch.float64)
    run = pase.compile(module, x, devices=2, mesh="2", baselines=False).torch
    code = run.code(rank=0)
    assert runs in code and ("is_causal = True" in code) == (form == "causal")
    assert ("constant" in code) == (form == "window")  # the positions

    def on_rank(rank: int) -> list[float]:
        mine = copy.deepcopy(module)
        step = run.train_step(mine, torch.optim.SGD, lr=0.5)
        return [float(step(x)) for _ in range(3)]

    eager, alone = copy.deepcopy(module), list[float]()
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.5)
    for _ in range(3):
        loss = eager(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        alone.append(float(loss))
    assert run.program.ops and run.leaves
    for found in on_ranks(2, on_rank):
        assert found == pytest.approx(alone, rel=1e-12)


def blind(written: bool) -> tuple[Any, tuple[Any, ...]]:
    """(attention with queries that see no key, by PyTorch's op or written out; its batch)."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)

        def forward(self, x: Any, y: Any, seen: Any) -> Any:
            every = (self.q(x), *self.kv(y).split(16, -1))
            q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in every)
            if written:
                scores = (q @ k.transpose(-1, -2) / 2).masked_fill(~seen, -math.inf)
                o = scores.softmax(-1).nan_to_num() @ v
            else:
                o = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            return self.out(o.transpose(1, 2).flatten(2)).square().mean()

    torch.manual_seed(0)
    seen = torch.rand(4, 1, 8, 6) > 0.5
    seen[0, :, :3] = seen[1] = seen[2, :, :, 3:] = False
    x, y = torch.randn(4, 8, 16, dtype=torch.float64), torch.randn(4, 6, 16, dtype=torch.float64)
    return Net().double(), (x, y, seen)


@pytest.mark.parametrize("written", [False, True])
def test_queries_that_see_nothing_get_zero_on_parts_too(written: bool) -> None:
    """PyTorch's op gives zero there. Each node around the mask is split along each of its dims; keys only if it is
    written out, because the plan keeps them whole for an op with a mask."""
    import numpy as np
    import torch

    from pase import machine
    from pase.api import Plan
    from pase.compiler.meshes.plans import plan_of
    from pase.compiler.problem.problem import SplitProblem
    from pase.frontends import registry
    from pase.machine import mesh_from
    from pase.tables.layouts import configs

    module, batch = blind(written)
    alone = copy.deepcopy(module)
    loss = alone(*batch)
    loss.backward()
    wanted = {k: p.grad for k, p in alone.named_parameters()}
    assert all(torch.isfinite(g).all() for g in wanted.values())
    traced = registry.trace(copy.deepcopy(module), *batch)
    problem, over = (
        SplitProblem.of(traced.graph, 2, machine.load("h100x8"), "analytic", "adam"),
        mesh_from("2", 2),
    )
    rows = {n.name: configs(n, over) for n in problem.graph.nodes}
    whole = {name: r[np.argmax((r == -1).all(1))] for name, r in rows.items()}
    splits = [
        (n, row)
        for n in problem.graph.nodes
        if any(op.kind == "attention" or op.function.name in ("exp", "where") for op in n.ops)
        for row in rows[n.name]
        if row[0] != -1
    ]
    keys = [n for n, row in splits if list(n.space)[row[0]].size == 6]
    assert len(splits) > 2 and bool(keys) == written
    for n, row in splits:
        plan = Plan.of(plan_of(problem, {**whole, n.name: row}, over, "blind", traced)).torch
        assert plan.program.ops and plan.leaves

        def on_rank(rank: int, plan: Any = plan) -> Any:
            mine = copy.deepcopy(module)
            found = plan.parallelize(mine).backward(*batch)
            return found, {k: p.grad.full_tensor() for k, p in mine.named_parameters()}

        for found, gradients in on_ranks(2, on_rank):
            torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=0)
            torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-14)
