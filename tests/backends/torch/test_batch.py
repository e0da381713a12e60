"""A step's batch has the leaves of the batch with which the plan was compiled."""

from __future__ import annotations

import copy

import pytest

import pase
from bench.cases.torch_ranks import on_ranks
from pase.errors import PaseError
from tests.backends.torch.settings import model, stepped

pytestmark = pytest.mark.torch


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
