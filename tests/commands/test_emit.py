"""``pase emit``."""

from __future__ import annotations

import json
from pathlib import Path

import pase
from pase.backends.registry import BACKENDS
from pase.plan.targets import TARGETS
from tests.command import printed, reported, run


def test_a_layout_is_written_in_another_format(plan: pase.Plan, tmp_path: Path) -> None:
    layout, out = tmp_path / "layout.json", tmp_path / "names.json"
    plan.save(layout)
    said = reported("emit", layout, "--to", "names", "-o", out)
    assert said["layout"] == str(layout) and said["to"] == "names" and said["file"] == str(out)
    assert all(path in out.read_text() for path in plan.parameters)
    written = json.loads(out.read_text())
    assert said["written"] in printed("emit", layout, "--to", "names", "-o", out)
    assert json.loads(out.read_text()) == written


def test_the_help_lists_every_format() -> None:
    text = printed("emit", "--help")
    assert all(f"--to {name}" in text for name in BACKENDS)
    # Those for which a plan can be compiled are listed there and in the help of compile.
    for command in ("emit", "compile"):
        said = " ".join(printed(command, "--help").partition("--for")[2].split()).replace("- ", "-")
        assert all(name in said for name in TARGETS)


def test_an_unknown_format_is_refused(plan: pase.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "layout.json")
    code, _, error = run("emit", tmp_path / "layout.json", "--to", "fortran", "-o", tmp_path / "x")
    assert code == 2 and "'fortran'" in error and not (tmp_path / "x").exists()
