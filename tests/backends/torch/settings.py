"""A model with Python state, and losses of a step before and after the state or the batch changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pase
from bench.cases.torch_ranks import on_ranks


class Configuration:
    """A model's configuration. Nothing reads ``seen``."""

    def __init__(self) -> None:
        self.scale, self.seen = 2.0, 0


def model() -> Any:
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.drop = nn.Linear(16, 16), nn.Dropout(0.0)
            self.temperature, self.weights, self.epoch = 1.0, [1.0, 2.0], 0
            self.config = Configuration()

        def forward(self, a: Any, b: Any, scale: float = 1.0, last: bool = False) -> Any:
            y = self.drop(self.lin(a)) / self.temperature * self.config.scale * self.weights[0] * scale
            return (y * b)[-1 if last else 0].square().mean()

    torch.manual_seed(0)
    return Model()


def stepped(change: Callable[[Any], object], *batch: Any, **other: Any) -> list[float]:
    """The losses of a step before and after a change of the module, and of the batch by ``other``."""
    import torch

    torch.manual_seed(0)
    given = {"a": torch.randn(16, 16), "b": torch.randn(16, 16), "scale": 1.0, "last": False}
    module = model()
    plan = pase.compile(module, given, devices=1).torch

    def on_rank(rank: int) -> list[float]:
        own = copy.deepcopy(module)
        step = plan.parallelize(own)
        before = float(step(given))
        change(own)
        return [before, float(step({**given, **other}))]

    return on_ranks(1, on_rank)[0]
