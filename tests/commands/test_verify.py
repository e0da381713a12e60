"""``pase verify``, for host devices."""

from __future__ import annotations

from pathlib import Path

import pase
from tests.command import reported, run


def test_a_layout_is_compiled_and_compared(plan: pase.Plan, tmp_path: Path) -> None:
    layout, text = tmp_path / "layout.json", tmp_path / "step.txt"
    plan.save(layout)
    said = reported("verify", layout, "--target", "cpu", "--lowering", "manual", "--text", text, "--strict")
    assert said["bytes_equal"] and said["fits"] and said["target"] == "cpu_host" and said["devices"] == 4
    assert said["collectives"] == said["predicted_collectives"]
    assert text.read_text().startswith("HloModule")


def test_a_lowering_that_is_none_is_refused(plan: pase.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "layout.json")
    code, _, error = run("verify", tmp_path / "layout.json", "--target", "cpu", "--lowering", "magic")
    assert code == 2 and "'magic'" in error
