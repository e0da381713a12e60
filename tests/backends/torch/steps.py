"""Steps of a plan on all ranks, for tests that compare them with the unsharded step."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from bench.cases.torch_ranks import on_ranks
from tests.backends.torch.models import TorchCase, case, optimizer

RANKS = 4
BUCKET = 600.0
"""Bytes of a message of gradients. A step of a small model has several."""


def whole(t: Any) -> Any:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def one_step(c: TorchCase, strategy: str, *, at_once: bool = True) -> list[Any]:
    """On each rank: loss, gradients, and the whole state after an update.

    at_once: ``step.backward(*batch)``, with several messages of gradients; otherwise, ``step(*batch).backward()``.
    """
    plan = c.case.plan(strategy)
    assert plan is not None, f"no strategy {strategy}"
    run = replace(plan.torch, bucket_bytes=BUCKET)
    assert run.program.ops and run.leaves  # computed once here, not once per thread

    def on_rank(rank: int) -> Any:
        module = copy.deepcopy(c.module)
        step = run.parallelize(module)
        if at_once:
            loss = step.backward(*c.batch)
        else:
            loss = step(*c.batch)
            loss.backward()
        gradients = {k: whole(p.grad) for k, p in module.named_parameters() if p.grad is not None}
        optimizer(module.parameters()).step()
        return loss.detach(), gradients, {k: whole(t) for k, t in module.state_dict().items()}

    return on_ranks(RANKS, on_rank)


def assert_unsharded(model: str, strategy: str) -> None:
    """Loss, gradients and updated parameters are those of the unsharded step, in float64."""
    import torch

    c = case(model, RANKS)
    for loss, gradients, after in one_step(c, strategy):
        torch.testing.assert_close(loss, c.loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients, c.gradients, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(after, c.after, rtol=1e-12, atol=1e-12)
