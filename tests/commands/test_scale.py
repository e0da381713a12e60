"""``pase scale``."""

from __future__ import annotations

import json

import pytest

from tests.command import printed

MODEL = "zoo:mlp"


def test_the_command_prints_a_table_and_json():
    shown = printed("scale", MODEL, "--devices", "2..8")
    assert "device-seconds" in shown and "█" in shown
    found = json.loads(printed("scale", MODEL, "--devices", "2,8", "--json"))["points"]
    assert [p["devices"] for p in found] == [2, 8]
    assert all(" ".join(p["split"].split()[:2]) in shown for p in found)
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


def test_a_whole_run_fits_eighty_columns_and_is_in_the_json(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    run = "scale", "zoo:gpt2?batch=8&layers=1&seq=64", "--devices", "8", "--tokens", "15T", "--price", "2.5"
    shown = printed(*run)
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    (point,) = json.loads(printed(*run, "--json"))["points"]
    assert point["run"]["cost"] == 2.5 * point["run"]["device_hours"] and point["run"]["failures"] > 0


def test_runs_are_compared_without_failures_if_those_of_a_machine_are_unknown():
    run = (
        "scale",
        "zoo:gpt2?batch=8&layers=1&seq=64",
        "--devices",
        "8",
        "--machine",
        "h100x8,b200x8",
        "--tokens",
        "15T",
    )
    h100, b200 = (p["run"] for p in json.loads(printed(*run, "--json"))["points"])
    assert h100["wall_s"] > h100["compute_s"] and b200["wall_s"] is None
    for r in (h100, b200):
        assert r["device_hours"] == pytest.approx(8 * r["compute_s"] / 3600)
    said = " ".join(printed(*run).split())
    assert "b200x8 has no rate of failures" in said and "run in which none fails, for every machine" in said
    known, _ = (p["run"] for p in json.loads(printed(*run, "--failures", "2e-5", "--json"))["points"])
    assert known["device_hours"] == pytest.approx(8 * known["wall_s"] / 3600)


def test_several_machines_are_one_table_and_one_chart():
    run = "scale", MODEL, "--devices", "2,4", "--machine", "h100x8,tpu_v5p"
    points = json.loads(printed(*run, "--json"))["points"]
    rows = [line.split() for line in printed(*run).splitlines()]
    for p in points:
        (figures, chart) = (r for r in rows if r[:2] == [p["machine"], str(p["devices"])])
        assert figures != chart and f"×{points[0]['cost'] / p['cost']:.2f}" in chart
