"""`pase scale`: one plan for each number of devices, its cost, and the reason if there is none."""

from __future__ import annotations

import json

import pytest

import pase
from pase.compiler.problem.options import CompileOptions
from pase.errors import PaseError
from pase.questions.scale import parse_devices, scale
from tests.command import printed

MODEL = "zoo:mlp"


def test_each_point_is_what_compile_finds():
    points = scale(MODEL, (2, 8), CompileOptions(devices=1, baselines=False))
    for p in points:
        plan = pase.compile(MODEL, devices=p.devices, baselines=False)
        assert p.plan is not None and p.plan.cost == plan.cost and p.device_s == plan.cost * p.devices
    few = scale(MODEL, (2,), CompileOptions(devices=1, memory_limit="1KiB", time_limit=5.0))
    assert few[0].plan is None and "fits" in (few[0].why_not or "")


def test_the_command_prints_a_table_and_json():
    shown = printed("scale", MODEL, "--devices", "2..8")
    assert "device-seconds" in shown and "█" in shown
    found = json.loads(printed("scale", MODEL, "--devices", "2,8", "--json"))["points"]
    assert [p["devices"] for p in found] == [2, 8]
    assert all(p["device_s"] == p["cost"] * p["devices"] and 0 < p["mfu"] < 1 for p in found)


def test_nothing_is_cut_at_eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    wide = "scale", MODEL, "--devices", "2..8"
    priced = (
        "price",
        "zoo:llama3_8b?batch=8&seq=256&layers=2&vocab=512",
        "--devices",
        "4",
        "--as",
        "fsdp=2,tp=2",
    )
    for shown in (printed(*wide), printed(*priced)):
        assert "…" not in shown and max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("text", ["8..", "x", "0..8", "8..4", "8,,9", "-8", "9999999999"])
def test_what_is_no_range_is_refused(text):
    with pytest.raises(PaseError) as e:
        parse_devices(text)
    assert e.value.where == "--devices" and f"'{text}'" in e.value.what
