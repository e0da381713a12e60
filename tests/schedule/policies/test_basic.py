"""DDP and Horovod do what their papers say."""

from __future__ import annotations

import pytest

from bench.cases.schedules import chain, link
from pase.schedule import (
    Options,
    evaluate,
    get_policy,
)
from pase.schedule.registry import MIB


def test_ddp_closes_a_bucket_once_it_is_full() -> None:
    sizes = [10, 20, 4, 8, 2, 1, 3]  # MiB, last layer first
    problem = chain([1.0] * 7, [1.0] * 7, [s * MIB for s in reversed(sizes)])
    plan = get_policy("ddp").make(problem, Options())
    buckets = [[sizes[6 - p.tensor] for p in m.pieces] for m in plan.messages]
    assert buckets == [[10], [20, 4, 8], [2, 1, 3]]
    assert plan.barrier


def test_horovod_sends_at_ticks() -> None:
    problem = chain([1e-3] * 4, [0.4e-3] * 4, [MIB] * 4, link(beta=1e-10))
    plan = get_policy("horovod").make(problem, Options())
    cycle = plan.detail["cycle_s"]
    starts = evaluate(problem, plan).starts_s
    assert starts is not None
    ready = [4e-3 + 0.4e-3 * (4 - min(p.tensor for p in m.pieces)) for m in plan.messages]
    for m, r in zip(plan.messages, ready, strict=True):
        ticks = (r + m.hold_s) / cycle
        assert ticks == pytest.approx(round(ticks), abs=1e-6)
        assert 0 <= m.hold_s < cycle + 1e-12
