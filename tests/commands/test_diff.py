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


def test_what_another_machine_changes_is_told_from_the_split(tmp_path: Path) -> None:
    """On the faster machine the old split is faster, and the plan that was searched there is at least as fast."""
    for machine in ("h100x8", "b200x8"):
        pase.compile("zoo:mlp", devices=8, machine=machine, baselines=False).save(
            tmp_path / f"{machine}.json"
        )
    both = [str(tmp_path / f"{m}.json") for m in ("h100x8", "b200x8")]
    found = reported("diff", *both)
    (old, new), between = found["cost"], found["cost_of_old_on_new_machine"]
    assert new <= between * (1 + 1e-9) < old
    assert f"the machine changes the step by {between / old - 1:+.1%}" in " ".join(
        printed("diff", *both).split()
    )
    pase.compile("zoo:mlp", devices=4, machine="b200x8", baselines=False).save(tmp_path / "fewer.json")
    said = " ".join(printed("diff", both[0], str(tmp_path / "fewer.json")).split())
    assert "on b200x8 with its 8 devices: the machine" in said and "then the split for 4 devices by" in said
    back = reported("diff", *reversed(both))["cost_of_old_on_new_machine"]
    assert back >= old * (1 - 1e-9)


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
