"""A small plan, and a pipeline of two stages with round numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pase
from pase.api import Plan
from pase.plan.pipeline import PipelinePlan, StagePlan


@cache
def mlp() -> Plan:
    return pase.compile("zoo:mlp", devices=4, mesh="2x2", baselines=False)


def stage(rank: int, **changed: Any) -> StagePlan:
    given = {"blocks": 3, "strategy": 0, "recomputes": False, "weights": "each", "memory_bytes": 1000}
    given |= {"forward_s": 1.0, "backward_s": 2.0, "weight_s": 1.0, "recompute_s": 0.0, "send_s": 0.5}
    given |= {"kept_bytes": 100, "waiting_bytes": 0, "send_bytes": 8}
    return StagePlan(rank=rank, **given | changed)


def pipeline(**changed: Any) -> PipelinePlan:
    """Return 1F1B with two micro-batches on two ranks. The first rank gathers weights, the last one sums gradients."""
    made = PipelinePlan(
        degree=2,
        chunks=1,
        micro_batches=2,
        schedule="1f1b",
        cuts=(3, 3),
        bubble=0.4,
        imbalance=0.0,
        cuts_bound=10.0,
        stages=(stage(0), stage(1)),
        strategies=({},),
        others={},
        scope="these cuts",
        before_s=(0.25, 0.0),
        after_s=(0.0, 0.5),
    )
    return replace(made, **changed)


def staged(**changed: Any) -> Plan:
    return replace(mlp(), pipeline=pipeline(**changed))
