"""PyTorch steps in micro-batches with losses that are not means over the batch: the results are the whole batch's."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import alone_among, on_ranks
from tests.backends.torch.micro_batches import assert_equal_alone, losses, model
from tests.backends.torch.models import case
from tests.backends.torch.steps import BUCKET

pytestmark = pytest.mark.torch
RANKS = 4


KINDS = (
    "counted",
    "summed",
    "weighted",
    "smoothed",
    "both",
    "by hand",
    "by the batch's size",
    "each early",
    "masked",
    "two",
    "decayed",
    "counted and a mean",
    "counted and decayed",
    "summed and a mean",
    "soft",
)
MESHES = {"counted": ("4", "2x2"), "both": ("1", "2x2"), "counted and a mean": ("1", "4", "2x2")}


@pytest.mark.some(8)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_micro_batches_is_the_whole_batchs(kind: str) -> None:
    """Loss and gradients in float64. Exactly the collectives on the plan's list are sent."""
    import torch

    from pase.backends.audit.torch import planned_in_step, sent_by_one_rank

    module, ids, labels = model()
    loss = losses()[kind]
    alone = copy.deepcopy(module)
    whole = loss(alone, ids, labels)
    whole.backward()
    wanted = {k: p.grad for k, p in alone.named_parameters()}
    for mesh in MESHES.get(kind, ("2x2",)):
        ranks = 1 if mesh == "1" else RANKS
        plan = pase.compile(
            module, ids, labels, loss=loss, devices=ranks, mesh=mesh, accumulate=4, memory_limit="none"
        )
        run = replace(plan.torch, bucket_bytes=BUCKET)
        assert run.program.ops and run.leaves and run.sums.outputs

        def on_rank(rank: int, run: Any = run) -> Any:
            mine = copy.deepcopy(module)
            made = run.parallelize(mine).backward(ids, labels)
            return made, {k: p.grad.full_tensor() for k, p in mine.named_parameters()}

        for got, gradients in on_ranks(ranks, on_rank):
            torch.testing.assert_close(got, whole.detach(), rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(gradients, wanted, rtol=1e-11, atol=1e-13)
        with alone_among(ranks, rank=ranks - 1):
            assert sent_by_one_rank(run) == planned_in_step(run)


@pytest.mark.parametrize("kind", ["counted", "summed", "by hand", "counted and a mean"])
def test_micro_batches_may_have_one_example_each(kind: str) -> None:
    module, *batch = model()
    assert_equal_alone(module, tuple(batch), losses()[kind], 16)


def test_a_ratio_of_sums_over_the_batch_is_refused_with_what_to_write() -> None:
    def dice(m: Any, i: Any, y: Any) -> Any:
        q = m(i).softmax(-1)
        return losses()["counted"](m, i, y) - (q[:, 0].sum() / q.sum())

    module, *batch = model()
    with pytest.raises(pase.PaseError, match=r"div at .*, whose divisor is a sum.*each example's own sums"):
        pase.compile(module, *batch, loss=dice, devices=1, accumulate=4)


@pytest.mark.parametrize("accumulate", [4, 8])
def test_tokens_may_be_sorted_by_their_experts(accumulate: int) -> None:
    c = case("experts", 1)
    assert_equal_alone(c.module, c.batch, None, accumulate)


def test_an_input_without_the_batch_is_not_cut() -> None:
    """This holds even if a rank's part of it is as long as its part of a micro-batch would be."""
    import torch
    from torch import nn

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(16, 16)

        def forward(self, x: Any, y: Any, scale: Any) -> Any:
            return nn.functional.mse_loss(self.one(x) * scale, y)

    torch.manual_seed(0)
    module = Scaled().double()
    x, y, scale = torch.randn(8, 16).double(), torch.randn(8, 16).double(), torch.randn(16).double()
    wanted = module(x, y, scale).detach()
    plan = pase.compile(module, x, y, scale, devices=RANKS, mesh="4", accumulate=4, memory_limit="none").torch
    (dim,) = (
        d.name for n in plan._graph.nodes if n.name == "in.scale" and n.kind == "input" for d in n.space
    )
    run = replace(plan, strategy={**{n: {} for n in plan.strategy}, "in.scale": {dim: plan.mesh.names}})
    assert run.program.ops and run.leaves and run.sums and len(run.cut) == 2
    for got in on_ranks(RANKS, lambda rank: run.parallelize(copy.deepcopy(module)).backward(x, y, scale)):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_rank_may_be_given_its_own_examples_of_an_input_that_the_plan_keeps_whole(accumulate: int) -> None:
    """A DistributedSampler cuts all inputs alike, whatever the plan does."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    module = nn.Linear(16, 16).double()
    x, y = torch.randn(16, 16).double(), torch.randn(16, 16).double()

    def loss(m: Any, x: Any, y: Any) -> Any:
        return nn.functional.mse_loss(m(x), y)

    options = {"accumulate": accumulate, "memory_limit": "none"}
    plan = pase.compile(module, x, y, devices=RANKS, mesh="4", loss=loss, **options).torch
    (dim,) = (
        next(d.name for d in n.space if d.size == 16 // accumulate)
        for n in plan._graph.nodes
        if n.name == "in.x"
    )
    whole: dict[str, Any] = {n: {} for n in plan.strategy}
    run = replace(plan, strategy=whole | {"in.x": {dim: plan.mesh.names}})
    assert run.program.ops

    def on_rank(rank: int) -> Any:
        mine = [t[rank * 16 // RANKS : (rank + 1) * 16 // RANKS] for t in (x, y)]
        return run.parallelize(copy.deepcopy(module)).backward(*mine)

    for got in on_ranks(RANKS, on_rank):
        torch.testing.assert_close(got, loss(module, x, y).detach(), rtol=1e-12, atol=1e-14)
