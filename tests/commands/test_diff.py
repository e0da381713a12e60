"""``pase diff``."""

from __future__ import annotations

from pathlib import Path

import pytest

import pase
from bench.cases.timelines import ImaginedRun, simulate, write
from tests.command import printed, reported


def test_diff(layouts: tuple[str, str]) -> None:
    assert "mesh:" in printed("diff", *layouts)
    same = printed("diff", layouts[0], layouts[0])
    assert "the layouts are the same" in same and Path(layouts[0]).exists()


def test_json_has_both_costs(layouts: tuple[str, str]) -> None:
    found = reported("diff", *layouts)
    plans = [pase.load(path) for path in layouts]
    assert found["cost"] == [p.cost for p in plans] and found["memory"] == [p.memory.total for p in plans]
    assert found["differences"] and not reported("diff", layouts[0], layouts[0])["differences"]


def test_two_traced_runs(tmp_path: Path) -> None:
    runs = [
        write(simulate(ImaginedRun(ranks=1, kernel_us=us)), tmp_path / name)
        for us, name in ((50.0, "old"), (80.0, "new"))
    ]
    found = reported("diff", *map(str, runs))
    assert found["difference_s"] > 0
    parts = [x["difference_s"] for x in (*found["kinds"], *found["idle"])]
    assert sum(parts) == pytest.approx(found["difference_s"], abs=1e-9)
    assert "the ops that differ most" in printed("diff", *map(str, runs))
