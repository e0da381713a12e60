"""Loops and branches run by ``plan.torch``: the results are those of the unsharded step, under any split."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import alone_among, on_ranks
from pase.backends.audit.torch import planned_in_step, sent_by_one_rank
from pase.errors import PaseError
from tests.backends.torch.models import case
from tests.backends.torch.steps import assert_unsharded, whole

pytestmark = pytest.mark.torch
RANKS = 4
MANY = 32
TURNS = {"layers": 3, "recurrent": 6, "mapped": 4}
SPLITS = ("fsdp", "zero2", "ours@2x2", "random1@2x2", "random2@2x2", "random5@4")


@pytest.mark.some(8)
@pytest.mark.parametrize("strategy", SPLITS)
@pytest.mark.parametrize("model", [*TURNS, "taken", "untaken"])
def test_the_step_is_the_unsharded_one(model: str, strategy: str) -> None:
    """Loss, gradients and updated parameters. Layers of a branch that is not taken have a gradient of zero, as in
    PyTorch."""
    assert_unsharded(model, strategy)


def gradients_of(model: str, ranks: int, *, compile: bool = False, **options: Any) -> list[Any]:
    c = case(model, RANKS)
    run = pase.compile(c.module, *c.batch, devices=ranks, overlap="none", **options).torch
    assert run.program.ops and run.leaves and run.sums  # computed once here, not once per thread

    def on_rank(rank: int) -> Any:
        module = copy.deepcopy(c.module)
        loss = run.parallelize(module, compile="aot_eager" if compile else False).backward(*c.batch)
        return loss, {k: whole(p.grad) for k, p in module.named_parameters() if p.grad is not None}

    return on_ranks(ranks, on_rank)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("layers", {"accumulate": 2}),
        ("recurrent", {"accumulate": 4}),
        ("layers", {"remat": "all"}),
        ("layers", {"remat": "light"}),
        ("mapped", {"remat": "all"}),
    ],
)
def test_bodies_are_recomputed_and_run_in_micro_batches(model: str, options: Any) -> None:
    import torch

    c = case(model, RANKS)
    for loss, gradients in gradients_of(model, RANKS, mesh="2x2", **options):
        torch.testing.assert_close(loss, c.loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients, c.gradients, rtol=1e-12, atol=1e-12)


def test_loops_are_compiled() -> None:
    import torch

    c = case("layers", RANKS)
    ((loss, gradients),) = gradients_of("layers", 1, compile=True)
    torch.testing.assert_close(loss, c.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, c.gradients, rtol=1e-12, atol=1e-12)
    with pytest.raises(PaseError) as e:
        gradients_of("taken", 1, compile=True)
    assert "branches" in e.value.what and "compile=False" in e.value.fix


def test_a_loop_over_the_batch_is_not_cut_into_micro_batches() -> None:
    with pytest.raises(PaseError, match="unstack"):
        gradients_of("mapped", RANKS, mesh="2x2", accumulate=2)


@pytest.mark.some(1)
@pytest.mark.parametrize("model", TURNS)
def test_what_is_sent_is_the_plans_list(model: str) -> None:
    """One rank of 32, on fake tensors. The plan counts every iteration alike, but the first and the last one send less
    if what enters or leaves the loop has no gradient."""
    c = case(model, MANY)
    for strategy in ("random1@4x8", "random2@4x8", "random3@8x4"):
        plan = c.case.plan(strategy)
        assert plan is not None
        with alone_among(MANY, rank=5):
            sent = sent_by_one_rank(plan.torch)
        listed = planned_in_step(plan.torch)
        assert sent.total() and not sent - listed
        for what, count in (listed - sent).items():
            assert count <= max(2, 2 * listed[what] // TURNS[model]), (strategy, what)


def test_of_branches_the_one_that_is_priced_as_taken_is_counted() -> None:
    c = case("untaken", MANY)
    plan = c.case.plan("random2@4x8")
    assert plan is not None
    with alone_among(MANY, rank=5):
        assert sent_by_one_rank(plan.torch) == planned_in_step(plan.torch)
