"""Ops that do something else on a part than on the whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import on_ranks

pytestmark = pytest.mark.torch


def test_what_is_random_is_one_draw() -> None:
    """A dropout's mask does not depend on how the model is split, nor on the ranks' own random states."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.drop, self.b = nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 16)

        def forward(self, x: Any) -> Any:
            return self.b(self.drop(self.a(x))).square().mean()

    torch.manual_seed(0)
    module, x = Net(), torch.randn(8, 16)

    def losses(mesh: str, ranks: int) -> list[float]:
        run = pase.compile(module, x, devices=ranks, mesh=mesh).torch
        assert run.program.ops and run.leaves

        def on_rank(rank: int) -> list[float]:
            step = run.parallelize(copy.deepcopy(module))
            step.seed = 7
            return [float(step(x)) for _ in range(2)]

        first, *others = on_ranks(ranks, on_rank)
        assert all(o == first for o in others)
        return first

    alone = losses("1", 1)
    assert alone[0] != alone[1]
    assert losses("2x2", 4) == pytest.approx(alone, rel=1e-5)
