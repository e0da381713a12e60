"""``pase diff``."""

from __future__ import annotations

from pathlib import Path

import pase
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
