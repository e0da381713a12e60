"""Values without a gradient, buffers that a step writes, and derivatives that the user defines, in PyTorch. Several
steps in float64 equal the unsharded ones, and what a step cannot do is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import pase
from bench.cases.plans import Case
from bench.cases.torch_ranks import on_ranks
from pase import machine
from pase.compiler.problem.problem import SplitProblem
from pase.errors import PaseError
from pase.frontends import registry
from tests.backends.torch.unwatched_models import BUFFERS, KINDS, buffers, refused, unwatched

pytestmark = pytest.mark.torch
RANKS = 4
STRATEGIES = ("data_parallel", "random1@2x2", "random4@2x2")


def whole(t: Any) -> Any:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def state(module: Any) -> dict[str, Any]:
    found = (*module.named_parameters(), *module.named_buffers(remove_duplicate=False))
    return {path: whole(t) for path, t in found}


def agrees(module: Any, steps: int) -> None:
    """Train under each strategy, and compare with one process without pase."""
    import torch

    module.double()
    batches = [torch.randn(16, 16, dtype=torch.float64) for _ in range(steps)]
    alone, losses = copy.deepcopy(module), []
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for x in batches:
        optimizer.zero_grad()
        loss = alone(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    expected = state(alone)
    traced = registry.trace(copy.deepcopy(module), batches[0])
    problem = SplitProblem.of(traced.graph, RANKS, machine.load("h100x8"), "analytic", "adam")
    for strategy in STRATEGIES:
        plan = Case(traced=traced, problem=problem).plan(strategy)
        if plan is None:  # no data parallelism without a batch
            assert strategy == "data_parallel"
            continue
        run = plan.torch
        assert run.program.ops and run.leaves  # computed once here, not once per thread

        def on_rank(rank: int, run: Any = run) -> Any:
            own = copy.deepcopy(module)
            step = run.train_step(own, torch.optim.SGD, lr=0.1)
            return [step(x) for x in batches], state(own)

        for found, after in on_ranks(RANKS, on_rank):
            torch.testing.assert_close(found, losses, rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(after, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_values_without_a_gradient_take_none_from_others(kind: str) -> None:
    import torch

    torch.manual_seed(1)
    agrees(unwatched(kind), 2)


@pytest.mark.parametrize("kind", BUFFERS)
def test_ten_steps_write_the_buffers_of_the_unsharded_ones(kind: str) -> None:
    import torch

    torch.manual_seed(1)
    agrees(buffers(kind), 10)


def test_what_a_step_would_lose_is_refused() -> None:
    import torch

    for message, (module, loss) in refused().items():
        with pytest.raises(PaseError, match=message):
            pase.compile(module, torch.randn(16, 16), devices=2, loss=loss)


def test_autocast_around_a_step_is_refused() -> None:
    import torch

    def loss(module: Any, x: Any) -> Any:
        return module(x).square().mean()

    x, module = torch.randn(16, 16), torch.nn.Linear(16, 8)
    with torch.autocast("cpu"), pytest.raises(PaseError, match=r"Linear is read under torch.autocast"):
        pase.compile(module, x, devices=2, loss=loss)
    plan = pase.compile(module, x, devices=1, loss=loss).torch

    def on_rank(rank: int) -> None:
        with torch.autocast("cpu"), pytest.raises(PaseError, match=r"runs under torch.autocast"):
            plan.parallelize(module)(x)

    on_ranks(1, on_rank)


def test_a_hook_on_a_parameter_is_refused() -> None:
    import torch

    x, module = torch.randn(16, 16), torch.nn.Linear(16, 8)
    plan = pase.compile(module, x, devices=1, loss=lambda m, x: m(x).square().mean()).torch
    module.weight.register_hook(lambda g: 2 * g)

    def on_rank(rank: int) -> None:
        with pytest.raises(PaseError) as e:
            plan.parallelize(module)
        assert e.value.where == "module.weight"

    on_ranks(1, on_rank)
