"""``pase explain``."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import pase
from pase.api import Plan
from tests.command import printed, reported, run


def test_the_program(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    plan.save(path)
    layer = next(n.name for n in plan.nodes if n.op == "matmul")
    found = reported("explain", path)
    assert sum(c["cost"] for c in found["causes"]) == pytest.approx(found["cost"])
    said = printed("explain", path, "--layer", layer)
    assert "(chosen)" in said and layer in said
    assert run("explain", path, "--layer", "no")[0] == 2


def test_equal_layers_are_one_row_and_the_costliest_are_tried_first(tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    pase.compile("zoo:gpt2?layers=3&batch=8&seq=64&vocab=256&scan=0", devices=2, baselines=False).save(path)
    found = reported("explain", path)
    equal = [
        x["next_best"] for x in found["layers"] if x["name"].startswith("blocks.") and "w1:dot" in x["name"]
    ]
    assert len(equal) == 3 and len(set(equal)) == 1 and equal[0] is not None
    said = printed("explain", path)
    assert "blocks.*.ff.w1:dot ×3" in said and "blocks.0.ff.w1:dot" not in said
    found = reported("explain", path, "--time-limit", "0.001")
    tried = {x["name"].split(".", 2)[-1] for x in found["layers"] if x["next_best"] is not None}
    rows: Counter[tuple[str, float]] = Counter()  # (layer, cost of one) -> the cost of all that are equal
    for x in found["layers"]:
        cost = x["compute"] + x["communication"] + x["update"]
        rows[x["name"].split(".", 2)[-1], cost] += cost
    assert not tried or max(rows, key=rows.__getitem__)[0] in tried


def test_a_model_that_is_not_of_the_zoo_is_named_by_the_user(tmp_path: Path, plan: Plan) -> None:
    """A layout may come from anyone, so what it names is not imported."""
    path = tmp_path / "layout.json"
    replace(plan, model="mine:model").save(path)
    assert "--model mine:model" in printed("explain", path)
