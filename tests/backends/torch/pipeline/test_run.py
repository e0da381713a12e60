"""The stages of a rank, called in the order of a schedule's list."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest

from pase.backends.torch.pipeline.run import _StagesStep, entered_first, weight_groups
from pase.backends.torch.spmd.gathered_again import GatheredAgain
from pase.pipeline.registry import SCHEDULES
from tests.backends.torch.pipeline.pipelines import (
    MICRO_BATCHES,
    check,
    model,
    planned,
    staged,
)

pytestmark = pytest.mark.torch
LAYERS = 4


@pytest.mark.some(4)
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


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["gpipe", "zb-h1"])
def test_no_micro_batch_keeps_weights_that_are_gathered_each_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each had its own from forward to backward, and the account has one for all of them."""
    module, batch, plan, wanted = model()
    run = staged(plan, name, 1, (2, 2), 3)
    run = replace(
        run,
        pipeline=replace(run.pipeline, stages=tuple(replace(s, weights="each") for s in run.pipeline.stages)),
    )
    found: list[tuple[weakref.ref[object], GatheredAgain]] = []
    add, living = GatheredAgain.add, set[int]()
    acts = {what: getattr(_StagesStep, what) for what in ("forward", "backward", "weights")}

    def told(self: GatheredAgain, made: Any, *rest: Any, **more: Any) -> None:
        found.append((weakref.ref(made.untyped_storage()), self))
        add(self, made, *rest, **more)

    def after(act: Any) -> Any:
        def counted(step: Any, *args: Any, **more: Any) -> None:
            act(step, *args, **more)
            mine = {id(again) for again in step.again.values()}
            living.update(i for i, (x, of) in enumerate(found) if id(of) in mine and x() is not None)
            assert not any(of.made for of in step.again.values())

        return counted

    monkeypatch.setattr(GatheredAgain, "add", told)
    for what, act in acts.items():
        monkeypatch.setattr(_StagesStep, what, after(act))
    check(run, module, batch, wanted)
    assert len(found) > 4 * MICRO_BATCHES and not living


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
