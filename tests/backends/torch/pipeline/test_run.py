"""The stages of a rank, called in the order of a schedule's list."""

from __future__ import annotations

import pytest

from pase.backends.torch.pipeline.run import entered_first, weight_groups
from pase.pipeline.registry import SCHEDULES
from tests.backends.torch.pipeline.pipelines import (
    check,
    model,
    planned,
    staged,
)

pytestmark = pytest.mark.torch
LAYERS = 4


@pytest.mark.some(5)
@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_under_any_schedule_are_the_model_alone(name: str) -> None:
    """A step of AdamW. Labels are counted over all micro-batches, and embeddings are tied (zb-v and dualpipev have the
    first and the last stage on one rank). Each stage is split at random, and sums gradients either per micro-batch or
    once per step. Within stages, exactly the collectives on the plan's list are sent."""
    module, batch, plan, wanted = model()
    chunks, seed = max(SCHEDULES[name].chunks[0], 1), list(SCHEDULES).index(name)
    cuts = (1,) * LAYERS if chunks == 2 else ((1, 3), (2, 2), (3, 1))[seed % 3]
    check(staged(plan, name, chunks, cuts, seed), module, batch, wanted)


def test_recomputed_stages_are_the_model_alone() -> None:
    module, batch, _, wanted = model()
    plan = planned(module, batch, remat="all")
    assert plan.torch.splits[0].blocks
    check(staged(plan, "zb-h1", 1, (1, 3), 5), module, batch, wanted)


def shared(width: int = 4):
    """A stage whose weights' ways leave those to the input at different nodes: one at the first, one at both."""
    import torch

    torch.manual_seed(0)
    x, first, both = (torch.randn(width, width, dtype=torch.float64, requires_grad=True) for _ in range(3))
    here = x @ (first * both)
    return x, [first, both], [(torch.tanh(here) @ both).sum(), here.pow(2).sum()]


def test_the_two_parts_of_a_backward_are_the_whole_and_divide_in_the_same_way_each_time() -> None:
    """PyTorch's own division of such a graph depends on the addresses of its nodes: ranks would disagree."""
    import torch

    x, weights, outs = shared()
    wanted = torch.autograd.grad(outs, [x, *weights])
    divisions = set()
    for _ in range(20):
        x, weights, outs = shared()
        gradients = [torch.ones_like(y) for y in outs]
        groups = weight_groups(outs, [x], weights)
        assert groups is not None
        divisions.add(tuple((len(g["params"]), len(g["intermediates"])) for g in groups))
        rest = entered_first(outs, gradients, [x], weights)
        assert torch.equal(x.grad, wanted[0]) and all(w.grad is None for w in weights)
        rest()
        for w, g in zip(weights, wanted[1:], strict=True):
            torch.testing.assert_close(w.grad, g, rtol=1e-12, atol=1e-12)
    assert divisions == {((2, 2),)}


def test_a_weight_with_a_way_of_its_own_to_the_results_is_computed_at_once() -> None:
    import torch

    x, weights, outs = shared()
    alone = torch.ones(3, dtype=torch.float64, requires_grad=True)
    outs = [*outs, alone.pow(2).sum()]
    assert weight_groups(outs, [x], [*weights, alone]) is None
    entered_first(outs, [torch.ones_like(y) for y in outs], [x], [*weights, alone])()
    assert torch.equal(alone.grad, 2 * alone.detach()) and all(w.grad is not None for w in weights)
