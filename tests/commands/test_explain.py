"""``pase explain``."""

from __future__ import annotations

from pathlib import Path

import pytest

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
