"""The recorded program of a rank: what it dispatches and saves besides PyTorch's own step."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from bench.audit.torch_dispatch import dispatched, saved
from bench.cases.torch_ranks import alone_among
from tests.backends.torch.models import case

pytestmark = pytest.mark.torch


def counts(model: str, devices: int, strategy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(ours, PyTorch's): dispatched ops and saved bytes of a second step, in float64."""
    c = case(model, devices)
    plan = c.case.plan(strategy)
    assert plan is not None
    alone, mine = copy.deepcopy(c.module), copy.deepcopy(c.module)

    def eager() -> None:
        alone(*c.batch).backward()

    with alone_among(devices, rank=0):
        step = plan.torch.parallelize(mine)
        local = [x.to_local() if hasattr(x, "to_local") else x for x in (*mine.parameters(), *mine.buffers())]
        found = []
        for run, own in (
            (lambda: step.backward(*c.batch), local),
            (eager, [*alone.parameters(), *alone.buffers()]),
        ):
            run()
            found.append({"ops": dispatched(run), "saved": saved(run, own)})
    return found[0], found[1]


@pytest.mark.parametrize("model", ["block", "pixels"])
def test_one_rank_dispatches_and_saves_what_pytorch_does(model: str) -> None:
    ours, eager = counts(model, 1, "ours")
    assert sum(ours["ops"].values()) <= 1.1 * sum(eager["ops"].values()), ours["ops"] - eager["ops"]
    assert ours["saved"] <= 1.02 * eager["saved"]


def test_a_split_batch_adds_its_messages_alone() -> None:
    """Three views a parameter (its edge, and into and out of a message), the messages, and the count of the loss."""
    ours, eager = counts("tower", 2, "data_parallel")
    sent = sum(n for op, n in ours["ops"].items() if "c10d" in op and "wait" not in op)
    parameters = len(list(case("tower", 2).module.parameters()))
    assert sent == 2  # the loss, and one message
    assert sum(ours["ops"].values()) <= sum(eager["ops"].values()) + 3 * parameters + 5 * sent, (
        ours["ops"] - eager["ops"]
    )


def test_it_is_recorded_once_for_each_mode_of_gradients() -> None:
    import torch

    c = case("tower", 1)
    plan = c.case.plan("ours")
    assert plan is not None
    with alone_among(1, rank=0):
        step = plan.torch.parallelize(copy.deepcopy(c.module))
        losses = [step.backward(*c.batch) for _ in range(2)]
        (first,) = step.programs.made.values()
        with torch.no_grad():
            losses.append(step(*c.batch))
        assert first in step.programs.made.values() and len(step.programs.made) == 2
    torch.testing.assert_close(losses, [losses[0]] * 3)


def test_gradients_are_added_to_those_that_are_there() -> None:
    """They are added in place, as PyTorch does; a hook on a parameter sees the gradient of each step."""
    import torch

    c = case("tower", 1)
    plan = c.case.plan("ours")
    assert plan is not None
    with alone_among(1, rank=0):
        module = copy.deepcopy(c.module)
        step = plan.torch.parallelize(module)
        step.backward(*c.batch)
        p, *_ = module.parameters()
        first, grad = p.grad.to_local().clone(), p.grad
        seen: list[Any] = []
        step.backward(*c.batch)
        assert p.grad is grad
        torch.testing.assert_close(p.grad.to_local(), 2 * first)
        p.register_hook(seen.append)
        step.backward(*c.batch)
        torch.testing.assert_close(p.grad.to_local(), 3 * first)
        torch.testing.assert_close(seen[0].to_local(), first)
