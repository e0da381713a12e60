"""US-Byte does what its paper says."""

from __future__ import annotations

import pytest

from bench.cases.schedules import vgg19
from pase.schedule import (
    Options,
    evaluate,
    get_policy,
)


def test_us_byte_fills_gaps_and_keeps_only_swaps_that_pay() -> None:
    problem = vgg19()
    plan = get_policy("us_byte").make(problem, Options())
    cost = evaluate(problem, plan).iteration_s
    assert cost * 1e3 == pytest.approx(257.99, abs=0.2)
    assert cost <= evaluate(problem, get_policy("priority").make(problem, Options())).iteration_s
