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
