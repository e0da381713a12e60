"""A check puts back what it changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from bench.cases.torch_ranks import on_ranks
from tests.backends.torch.checked import run_of

pytestmark = pytest.mark.torch
RANKS = 4


def state(step: Any) -> dict[str, Any]:
    import torch

    both = (*step.module.named_parameters(), *step.module.named_buffers())
    held = {path: getattr(x, "_local_tensor", x).detach().clone() for path, x in both}
    return {**held, "random": torch.get_rng_state(), "steps": torch.tensor(step.steps)}


@pytest.mark.parametrize("strategy", ["random1@2x2"])
def test_a_right_step_agrees_and_nothing_is_changed(given: Any, strategy: str) -> None:
    import torch

    module, x, case = given
    run = run_of(case, strategy)

    def on_rank(rank: int) -> Any:
        step = run.parallelize(copy.deepcopy(module))
        step.backward(x)  # so that there are gradients
        before = state(step), {path: p.grad for path, p in step.module.named_parameters()}
        values = {path: g.to_local().clone() for path, g in before[1].items() if g is not None}
        found = step.check(x, most_lines=6)
        torch.testing.assert_close(state(step), before[0], rtol=0, atol=0)
        for path, p in step.module.named_parameters():
            assert p.grad is before[1][path]
            assert path not in values or torch.equal(p.grad.to_local(), values[path])
        return found

    ranks = on_ranks(RANKS, on_rank)
    found = ranks[0]
    assert found.verdict == "agrees", str(found)
    names = ["unused", "enc.weight", "enc.bias", "norm.weight", "norm.bias", "head.weight", "head.bias"]
    assert [p.name for p in found.parameters] == names
    assert found.reference.kind == "the unsharded module" and found.reference.loss_agrees
    assert all(r.parameters == found.parameters and r.loss == found.loss for r in ranks)
