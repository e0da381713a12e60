"""`pase scale`: one plan for each number of devices, its cost, and the reason if there is none."""

from __future__ import annotations

import pytest

import pase
from pase.compiler.problem.options import CompileOptions
from pase.errors import PaseError
from pase.questions.scale import parse_devices, scale

MODEL = "zoo:mlp"


def test_each_point_is_what_compile_finds():
    points = scale(MODEL, (2, 8), CompileOptions(devices=1, baselines=False))
    for p in points:
        plan = pase.compile(MODEL, devices=p.devices, baselines=False)
        assert p.plan is not None and p.plan.cost == plan.cost and p.device_s == plan.cost * p.devices
    few = scale(MODEL, (2,), CompileOptions(devices=1, memory_limit="1KiB", time_limit=5.0))
    assert few[0].plan is None and "fits" in (few[0].why_not or "")


@pytest.mark.parametrize("text", ["8..", "x", "0..8", "8..4", "8,,9", "-8", "9999999999"])
def test_what_is_no_range_is_refused(text):
    with pytest.raises(PaseError) as e:
        parse_devices(text)
    assert e.value.where == "--devices" and f"'{text}'" in e.value.what
