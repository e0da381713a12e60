"""``pase emit``."""

from __future__ import annotations

import json
import shlex
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


def test_a_refusal_is_a_command_that_writes_the_file(tmp_path: Path) -> None:
    """It compiles the same model on the same devices and machine; spaces in names are quoted."""
    model = "zoo:mlp?batch=64&layers=2&features=64&hidden=64&classes=16"
    whole = {"constraints": {"batch.inputs": (None, "model")}, "mesh": "model=4", "baselines": False}
    plan = pase.compile(model, devices=4, machine="a100x8", **whole)
    plan.save(tmp_path / "layout.json")
    out = tmp_path / "my file.py"
    _, _, error = run("emit", tmp_path / "layout.json", "--to", "ddp", "-o", out)
    command = " ".join(error.split()).partition("compile for it: pase ")[2].partition(" (in Python")[0]
    words = shlex.split(command)
    assert words[:4] == ["compile", plan.model, "--devices", "4"] and words[4:6] == ["--machine", "a100x8"]
    said = printed(*words)
    assert out.exists() and "limited to what DDP can express" in said


def test_a_file_of_no_program_is_refused_before_the_search(tmp_path: Path) -> None:
    code, _, error = run("compile", "zoo:nothing", "--devices", 4, "--emit", tmp_path / "x.py")
    assert code == 2 and "--emit" in error and "--for" in error
