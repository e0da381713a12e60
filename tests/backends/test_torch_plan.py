"""A plan run by PyTorch: loss, every gradient, updated parameters and buffers are the unsharded step's; what is sent is
the plan's list, exactly."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.backends.torch_models import TorchCase, case, optimizer
from tests.backends.torch_ranks import alone_among, on_ranks

pytestmark = pytest.mark.torch
RANKS = 4
MANY = 32
BLIND = ("random1@2x2", "random4@2x2")
STRATEGIES = {
    "block": (
        "data_parallel",
        "fsdp",
        "zero2",
        "megatron/megatron_2x2",
        "megatron/megatron_sp_2x2",
        "ours@2x2",
        *BLIND,
    ),
    "pixels": ("data_parallel", "random3@2x2"),
    "llama": ("fsdp", "megatron/megatron_sp_2x2", "random1@2x2"),
    "gpt2": ("zero2", "megatron/megatron_sp_2x2"),
    "bert": ("fsdp", "random2@2x2"),
}
BLIND_AMONG_MANY = {"llama": ("random1@4x8",), "gpt2": ("random2@4x8",)}
PAIRS = [(m, s) for m, every in STRATEGIES.items() for s in every]


def whole(t: Any) -> Any:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def one_step(c: TorchCase, strategy: str) -> list[Any]:
    """Per rank: loss, gradients, and all of the state after an update."""
    plan = c.case.plan(strategy)
    assert plan is not None, f"no strategy {strategy}"
    run = plan.torch
    assert run.program.ops and run.leaves  # worked out once, not once on each thread

    def on_rank(rank: int) -> Any:
        module = copy.deepcopy(c.module)
        step = run.parallelize(module)
        loss = step(*c.batch)
        loss.backward()
        gradients = {k: whole(p.grad) for k, p in module.named_parameters() if p.grad is not None}
        optimizer(module.parameters()).step()
        return loss.detach(), gradients, {k: whole(t) for k, t in module.state_dict().items()}

    return on_ranks(RANKS, on_rank)


@pytest.mark.parametrize(("model", "strategy"), PAIRS)
def test_the_step_is_the_unsharded_one(model: str, strategy: str) -> None:
    """In float64. Models of transformers compute norms and losses in float32, whatever they are in."""
    import torch

    c = case(model, RANKS)
    near = 2e-6 if model in ("llama", "gpt2", "bert") else 1e-12
    for loss, gradients, after in one_step(c, strategy):
        torch.testing.assert_close(loss, c.loss, rtol=near, atol=near)
        torch.testing.assert_close(gradients, c.gradients, rtol=near, atol=near)
        torch.testing.assert_close(after, c.after, rtol=near, atol=near)


@pytest.mark.parametrize("model", STRATEGIES)
def test_what_is_sent_is_the_plans_list(model: str) -> None:
    """Every collective of a step, by kind, axes and bytes: one rank of 32, on fake tensors."""
    from pase.backends.torch_truth import planned, sent_by_one_rank

    c = case(model, MANY)
    for strategy in (
        "data_parallel",
        "fsdp",
        "zero2",
        "megatron/megatron_sp_8x4",
        *BLIND_AMONG_MANY.get(model, ()),
    ):
        plan = c.case.plan(strategy)
        if plan is None:
            continue
        with alone_among(MANY, rank=5):
            sent = sent_by_one_rank(plan.torch)
        assert sent == planned(plan.torch.program), strategy
