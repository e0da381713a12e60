"""The Python state of a module and the values of a batch that are not tensors. A plan's step contains the values with
which the model was compiled, so other values are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import on_ranks
from pase.errors import PaseError

pytestmark = pytest.mark.torch


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


def test_what_the_step_does_not_read_may_change() -> None:
    def change(m: Any) -> None:
        m.epoch, m.config.seen, m.config.scale = 3, 1, float("2.0")
        m.lin.eval()

    before, after = stepped(change)
    assert before == after


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("temperature", r"'temperature', which was 1\.0 .* is 2\.0 now"),
        ("weights", r"'weights\[0\]', which was 1\.0"),
        ("config", r"'config.scale', which was 2\.0 .* is 5\.0"),
        ("rate", r"'drop.p', which was 0\.0 .* is 0\.5"),
        ("mode", r"^drop: .* in evaluation mode, .*; call module.train"),
    ],
)
def test_what_the_step_reads_may_not(name: str, says: str) -> None:
    def change(m: Any) -> None:
        match name:
            case "temperature":
                m.temperature = 2.0
            case "weights":
                m.weights[0] = 3.0
            case "config":
                m.config.scale = 5.0
            case "rate":
                m.drop.p = 0.5
            case "mode":
                m.eval()

    with pytest.raises(PaseError, match=says):
        stepped(change)


def test_another_module_than_the_one_that_was_compiled_is_refused() -> None:
    import torch

    batch = {"a": torch.randn(16, 16), "b": torch.randn(16, 16)}
    plan, other = pase.compile(model(), batch, devices=1).torch, model()
    other.temperature = 0.5

    def on_rank(rank: int) -> None:
        step = plan.parallelize(other)
        with pytest.raises(PaseError, match=r"'temperature', which was 1\.0"):
            step(batch)

    on_ranks(1, on_rank)


def test_values_of_the_batch_that_are_no_tensors_may_not_change() -> None:
    import torch

    for other, where, texts in (
        ({"scale": 3.0}, "['scale']", ("3.0", "1.0")),
        ({"last": True}, "['last']", ("True",)),
        ({"scale": torch.tensor(1.0)}, "['scale']", ("tensor",)),
        ({"a": torch.randn(16, 16).double()}, "['a']", ("float64", "float32")),
        ({"more": 1}, "batch", ("'more'",)),
    ):
        with pytest.raises(PaseError) as e:
            stepped(lambda m: None, **other)
        assert e.value.where.endswith(where) and all(t in e.value.what for t in texts)


def test_keys_of_a_batch_may_come_in_any_order() -> None:
    import torch

    torch.manual_seed(1)
    a, b, module = torch.randn(16, 16), torch.randn(16, 16), model()
    plan = pase.compile(module, {"a": a, "b": b}, devices=2, mesh="2").torch

    def on_rank(rank: int) -> list[float]:
        step = plan.parallelize(copy.deepcopy(module))
        return [float(step({"a": a, "b": b})), float(step({"b": b, "a": a}))]

    for first, second in on_ranks(2, on_rank):
        assert first == second == pytest.approx(float(module(a, b)), rel=1e-5)
