"""Plans of a small PyTorch model for the emitters of PyTorch's own styles."""

from __future__ import annotations

from typing import Any

from tests.backends.torch.models import case

RANKS = 4


def plan_of(model: str, strategy: str) -> Any:
    plan = case(model, RANKS).case.plan(strategy)
    assert plan is not None
    return plan
