"""Writes in place without a gradient: the value changes and its gradient passes, as in PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from bench.cases.plans import Case
from bench.cases.torch_ranks import on_processes
from pase import machine
from pase.compiler.problem.problem import SplitProblem
from pase.errors import PaseError
from pase.frontends import registry
from tests.backends.torch.trained import agrees, state

pytestmark = pytest.mark.torch


def model(write: Callable[[Any, Any], Any]) -> Any:
    """A module of [16, 16] inputs that writes into an activation y. What ``write(y, x)`` returns is read, too."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            y = self.a(x) + 0.1
            read = write(y, x)
            return (y * self.b(x)).sin().mean() + (0.0 if read is None else read.square().mean())

    torch.manual_seed(1)
    return Net()


def quietly(write: Callable[[Any, Any], Any]) -> Callable[[Any, Any], object]:
    """``write`` under ``torch.no_grad``, and nothing read of it."""

    def call(y: Any, x: Any) -> None:
        import torch

        with torch.no_grad():
            write(y, x)

    return call


def of_views(y: Any, x: Any) -> Any:
    """Overlapping views are written in two regions, and read without and with a gradient."""
    import torch

    v, w = y[:, :8], y.T[4:]
    with torch.no_grad():
        v.mul_(2)
        w.add_(1)
    with torch.no_grad():
        t = w.sin()
    v.detach()[:, 2] = 0.5
    return v * (w * t).T[:, :8]


def made_without(y: Any, x: Any) -> Any:
    """The memory is made without a gradient and gets one."""
    import torch

    h = torch.zeros_like(y)
    v = h[:, :8]
    with torch.no_grad():
        v.fill_(1.0)
    h[:, 4:12] = y[:, 8:]
    with torch.no_grad():
        h.add_(x)
        h[:, 7:9] = 2.0
    return h * v.sum()


def in_autocast(y: Any, x: Any) -> Any:
    import torch

    v = y[:, :8]
    with torch.autocast("cpu", enabled=False):
        with torch.no_grad():
            v.mul_(2)
        z = y * 2
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            z.clamp_(min=0.1)
    return v * z[:, 8:]


def checkpointed(y: Any, x: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    def clamped(y: Any) -> Any:
        z = y * 2
        quietly(lambda z, x: z.clamp_(-0.3, 0.3))(z, x)
        return z

    return checkpoint(clamped, y, use_reentrant=False)


def infinite(y: Any, x: Any) -> Any:
    """Masked scores, whose gradient passes, and values that are replaced, whose gradient does not."""
    z = y.masked_fill(x > 0.5, float("inf")) + (x < -0.5).to(x.dtype).log().neg()
    quietly(lambda z, x: z.clamp_(-1.0, 1.0))(z, x)
    return z


def apart(y: Any, x: Any) -> Any:
    """What a detached tensor is written with gives a gradient to it alone, and nothing reads it."""
    import torch

    h = torch.zeros_like(y)
    h.detach().mul_(0.9).add_(y)
    y.detach().mul_(y.sigmoid())
    return h


def read_apart(y: Any, x: Any) -> Any:
    d = y.detach()
    d.mul_(y)
    return d


def in_bodies(y: Any, x: Any) -> Any:
    """A branch and a loop write, and read, without a gradient."""
    import torch
    from torch._higher_order_ops import scan

    def body(y: Any) -> Any:
        y = y * 3
        with torch.no_grad():
            y.clamp_(min=-0.5)
            t = y.sin()
        y.detach().add_(0.5)
        return y * t

    z = torch.cond(x.sum() > -1e9, body, lambda y: y.cos(), (y,))
    carried, each = scan(lambda c, s: ((c + body(s)).clone(), c.cos()), torch.zeros_like(y[0]), y)
    return z * carried + each


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "clamp": quietly(lambda y, x: y.clamp_(min=0.1)),
    "mul": quietly(lambda y, x: y.mul_(2)),
    "add": quietly(lambda y, x: y.add_(x)),
    "mask": quietly(lambda y, x: y.masked_fill_(x > 0, 0.0)),
    "by mask": quietly(lambda y, x: y.__setitem__(x > 0.5, 0.1)),
    "by index": quietly(lambda y, x: y.__setitem__((slice(None), [0, 3]), 0.1)),
    "scatter": quietly(lambda y, x: y.scatter_(1, x.argmax(1, keepdim=True), 0.5)),
    "copy": quietly(lambda y, x: y[:, 0].copy_(x[:, 1])),
    "fill": quietly(lambda y, x: y[:, 2:5].fill_(0.3)),
    "normalized": quietly(lambda y, x: y.div_(y.norm(dim=-1, keepdim=True))),
    "detach": lambda y, x: y.detach().mul_(2),
    "data": lambda y, x: y.data[:, 2:].mul_(2),
    "views": of_views,
    "made without": made_without,
    "autocast": in_autocast,
    "checkpoint": checkpointed,
    "infinite": infinite,
    "bodies": in_bodies,
    "apart": apart,
}


@pytest.mark.some(9)
@pytest.mark.parametrize("kind", WRITES)
def test_the_gradient_passes_a_write_without_one(kind: str) -> None:
    agrees(model(WRITES[kind]), 2)


def cached(given: bool, part: slice) -> Any:
    """A module that writes part of its batch or of a buffer with a gradient, and then another part without one."""
    import torch

    class Net(torch.nn.Module):
        cache: Any

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
            self.register_buffer("cache", torch.zeros(16, 16))

        def forward(self, x: Any) -> Any:
            y, held = (self.a.weight, x) if given else (self.a(x), self.cache)
            held[:, part] = y[:, part]
            with torch.no_grad():
                held[:, 4:].mul_(2.0)
            return (held * self.b.weight).sin().mean()

    torch.manual_seed(1)
    return Net()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("part", [slice(None), slice(8)])
def test_the_gradient_of_memory_that_had_none_passes_too(given: bool, part: slice) -> None:
    """PyTorch runs one step only on a buffer, which then has a gradient."""
    agrees(cached(given, part), 2 if given else 1)


def test_compiled_plans_pass_it() -> None:
    """On processes: the ranks of other tests are threads, which must not compile at once."""
    assert max(on_processes(2, differences_of_compiled, "forkserver", seconds=300.0)) < 1e-10


def differences_of_compiled(rank: int) -> float:
    """The largest difference of a parameter on a rank after two steps, under any of the strategies."""
    import torch

    batches, worst = [torch.full((16, 16), float(i), dtype=torch.float64).tril() for i in (1, 2)], 0.0
    for made in (model(of_views), cached(True, slice(8))):
        module = made.double()
        alone, traced = copy.deepcopy(module), registry.trace(copy.deepcopy(module), batches[0])
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for x in batches:
            optimizer.zero_grad()
            alone(x.clone()).backward()
            optimizer.step()
        problem = SplitProblem.of(traced.graph, 2, machine.load("h100x8"), "analytic", "adam")
        for strategy in ("data_parallel", "fsdp", "random1@2"):
            plan, own = Case(traced=traced, problem=problem).plan(strategy), copy.deepcopy(module)
            if plan is None:  # no data parallelism without a batch
                continue
            step = plan.torch.train_step(own, torch.optim.SGD, lr=0.1, compile="aot_eager")
            for x in batches:
                step(x.clone())
            after, expected = state(own), state(alone)
            worst = max(
                worst, *(float((after[k] - v).abs().max()) for k, v in expected.items() if k != "cache")
            )
    return worst


@pytest.mark.parametrize("kind", ["through a detached one", "data of a result", "data of an operand"])
def test_a_write_whose_gradient_is_not_known_is_refused(kind: str) -> None:
    import torch

    writes: dict[str, Callable[[Any, Any], Any]] = {
        "through a detached one": read_apart,
        "data of a result": lambda y, x: y.sigmoid_().data.mul_(
            2
        ),  # PyTorch's backward would read what is written
        "data of an operand": lambda y, x: (y.sin(), y.data.mul_(2))[0],
    }
    with pytest.raises(PaseError, match="writes ") as e:
        registry.trace(model(writes[kind]), torch.randn(16, 16))
    assert "test_writes.py" in str(e.value) and ".detach()" in e.value.fix


def test_other_writes_run() -> None:
    import torch

    class Net(torch.nn.Module):
        seen: Any
        teacher: Any

        def __init__(self) -> None:
            super().__init__()
            self.a, self.teacher = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16).requires_grad_(False)
            self.register_buffer("seen", torch.zeros(16))

        def forward(self, x: Any) -> Any:
            y, mask = self.a(x), torch.zeros_like(x)
            with torch.no_grad():
                mask.scatter_(1, y.argmax(1, keepdim=True), 1.0)
                soft = y.double().clone().mul_(2).softmax(-1)
                self.seen.mul_(0.9).add_(y.mean(0), alpha=0.1)
                self.teacher.weight.lerp_(self.a.weight, 0.1)
                target = torch.relu_(self.teacher(x))
            out = torch.zeros_like(y)
            out[:, :8] = y[:, 8:]
            y.mul_(1.5)
            return ((y * mask).sum(1) + (out - soft).square().mean(1) + (y - target).square().mean(1)).mean()

    torch.manual_seed(1)
    agrees(Net(), 2)
