"""ByteScheduler does what its paper says."""

from __future__ import annotations

import pytest

from bench.cases.schedules import vgg19
from pase.schedule import (
    Options,
    evaluate,
    get_policy,
)


def test_bytescheduler_partitions_and_is_tuned() -> None:
    plan = get_policy("bytescheduler").make(vgg19(), Options())
    assert plan.dispatch == "priority" and len(plan.messages) > 6
    assert evaluate(vgg19(), plan).iteration_s * 1e3 == pytest.approx(257.99, abs=0.05)
