"""CP-SAT on whole buckets."""

from __future__ import annotations

import pytest

from bench.cases.schedules import vgg19
from pase.schedule import (
    Options,
    evaluate,
    get_policy,
)
from pase.schedule.cpsat import best_order


def test_cp_sat_finds_the_optimum_of_whole_buckets() -> None:
    pytest.importorskip("ortools", reason="the extra `ortools` is not installed")
    problem = vgg19()
    plan, bound = best_order(problem, get_policy("fifo").make(problem, Options()))
    assert evaluate(problem, plan).iteration_s * 1e3 == pytest.approx(258.32, abs=0.005)
    assert bound * 1e3 == pytest.approx(258.32, abs=0.01)
