"""Blocks that backward recomputes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import alone_among, on_ranks
from tests.backends.torch.micro_batches import assert_equal_on_ranks
from tests.backends.torch.models import case, tower_of
from tests.backends.torch.steps import whole

pytestmark = pytest.mark.torch
RANKS = 4


@pytest.mark.some(3)
@pytest.mark.parametrize("marked", [False, True], ids=["plain", "marked"])
@pytest.mark.parametrize(
    "less", [{"remat": "all"}, {"accumulate": 4, "remat": "all"}, {"accumulate": 2}], ids=str
)
def test_micro_batches_and_recomputation_change_nothing(less: dict[str, Any], marked: bool) -> None:
    """The same holds if the model itself uses torch.utils.checkpoint. Recomputed collectives are on the plan's list."""
    import torch

    from pase.backends.audit.torch import planned_in_step, sent_by_one_rank

    torch.manual_seed(0)
    module, batch = tower_of(3, marked=marked)
    alone = copy.deepcopy(module)
    loss = alone(*batch)
    loss.backward()
    plan = pase.compile(module, batch, devices=RANKS, mesh="2x2", memory_limit="none", **less)
    run = plan.torch
    assert (plan.accumulate, len(run.traced.marked) + len(run.blocks)) == (
        less.get("accumulate", 1),
        3 if marked or "remat" in less else 0,
    )
    assert run.program.ops and run.leaves

    def on_rank(rank: int) -> Any:
        mine = copy.deepcopy(module)
        return run.parallelize(mine).backward(*batch), {k: whole(p.grad) for k, p in mine.named_parameters()}

    for got, gradients in on_ranks(RANKS, on_rank):
        torch.testing.assert_close(got, loss.detach())
        torch.testing.assert_close(gradients, {k: p.grad for k, p in alone.named_parameters()})
    with alone_among(RANKS, rank=1):
        assert sent_by_one_rank(run) == planned_in_step(run)


@pytest.mark.some(3)
@pytest.mark.parametrize("what", ["light", "all"])
@pytest.mark.parametrize(
    "strategy", ["fsdp", "megatron/megatron_2x2", "megatron/megatron_sp_2x2", "random1@2x2"]
)
def test_light_work_is_computed_again_beside_biases(strategy: str, what: str) -> None:
    """Products keep their results, with or without an added bias. Loss, gradients and collectives are the plan's."""

    from pase.backends.audit.torch import planned_in_step, sent_by_one_rank
    from pase.compiler.problem.variants import recomputed

    c = case("tower", RANKS)
    plan = c.case.plan(strategy)
    assert plan is not None
    run = replace(plan.torch, blocks=recomputed(c.case.traced, what))
    products = [op.op.remat for op in run.program.ops if op.op.kind == "matmul"]
    assert len(run.blocks) == 3 and any(products) == (what == "all")
    assert run.leaves

    assert_equal_on_ranks(c, run)
    with alone_among(RANKS, rank=1):
        assert sent_by_one_rank(run) == planned_in_step(run)
