"""Updates of this rank's parts of parameters."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import alone_among, on_ranks
from pase.backends.torch import local_update
from pase.backends.torch.local_update import on_local_parts

pytestmark = pytest.mark.torch

SETTINGS: dict[str, dict[str, Any]] = {
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"maximize": True},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"momentum": 0.5, "centered": True},
}


def net() -> tuple[Any, Any]:
    """A model whose parameters are split under FSDP, with one that is a single number, and its batch."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
            self.scale = torch.nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Any) -> Any:
            return (self.b(self.a(x).tanh()) * self.scale).square().mean()

    torch.manual_seed(0)
    return Net().double(), torch.randn(8, 8, dtype=torch.float64)


@pytest.mark.parametrize("name", local_update._ELEMENTWISE)
def test_the_update_is_that_of_the_unsharded_module(name: str) -> None:
    """After three steps, parameters are equal, and the state is that of an optimizer of DTensors: DTensors of
    parameters' layouts, and numbers. (PyTorch's Rprop does not run on DTensors.)"""
    import torch
    from torch.distributed.tensor import DTensor

    module, x = net()
    run = pase.compile(module, x, devices=2, mesh="2", target="fsdp2", baselines=False).torch
    make, settings = getattr(torch.optim, name), SETTINGS.get(name, {})

    alone = copy.deepcopy(module)
    usual = make(alone.parameters(), **settings)
    for _ in range(3):
        usual.zero_grad()
        alone(x).backward()
        usual.step()

    def on_rank(rank: int) -> tuple[dict[str, Any], bool]:
        mine, theirs = copy.deepcopy(module), copy.deepcopy(module)
        step, other = run.train_step(mine, make, **settings), run.parallelize(theirs)
        plain = make([p for p in theirs.parameters()], **settings)
        for _ in range(3):
            step(x)
            plain.zero_grad()
            other.backward(x)
            if name != "Rprop":
                plain.step()
        kinds = []
        for of, state in ((mine, step.optimizer.state), (theirs, plain.state)):
            assert set(state) <= set(of.parameters())
            kinds.append(
                [
                    {
                        k: v.placements if isinstance(v, DTensor) else type(v)
                        for k, v in state.get(p, {}).items()
                    }
                    for p in of.parameters()
                ]
            )
        return {k: p.full_tensor() for k, p in mine.named_parameters()}, kinds[0] == kinds[
            1
        ] or name == "Rprop"

    for found, alike in on_ranks(2, on_rank):
        assert alike
        torch.testing.assert_close(found, dict(alone.named_parameters()), rtol=1e-12, atol=1e-13)


def test_no_op_of_an_update_is_one_of_dtensors() -> None:
    """Unless the optimizer has a hook, or is of another class: those get the parameters themselves."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class OfDTensors(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.found += any(issubclass(t, DTensor) for t in types)
            return func(*args, **(kwargs or {}))

    class Mine(torch.optim.Adam):
        pass

    module, x = net()
    run = pase.compile(module, x, devices=2, mesh="2", target="fsdp2", baselines=False).torch
    with alone_among(2, rank=0):
        for make, hook, none in (
            (torch.optim.Adam, False, True),
            (torch.optim.Adam, True, False),
            (Mine, False, False),
        ):
            step = run.train_step(copy.deepcopy(module), make)
            step(x)
            if hook:
                step.optimizer.register_step_post_hook(lambda *given: None)
            with OfDTensors() as ops, on_local_parts(step.optimizer):
                step.optimizer.step()
            assert (ops.found == 0) == none


def test_as_many_are_joined_as_are_no_larger_than_the_largest() -> None:
    """The update's temporary arrays are then no larger. What the user says is kept."""
    import torch

    module, x = net()
    run = pase.compile(module, x, devices=2, mesh="2", target="fsdp2", baselines=False).torch
    with alone_among(2, rank=0):
        for settings in ({}, {"foreach": True}, {"fused": True}):
            step = run.train_step(copy.deepcopy(module), torch.optim.Adam, **settings)
            step(x)
            groups = step.optimizer.param_groups
            (given,) = [[tuple(p.to_local().shape) for p in g["params"]] for g in groups]
            with on_local_parts(step.optimizer):
                found = [[tuple(p.shape) for p in g["params"]] for g in step.optimizer.param_groups]
            assert step.optimizer.param_groups is groups
            if settings:
                assert found == [given]
                continue
            assert sorted(s for some in found for s in some) == sorted(given)
            sizes = [sum(math.prod(s) for s in some) for some in found]
            assert max(sizes) == max(map(math.prod, given)) and len(found) < len(given)
