"""``pase compile``: what it prints and writes, and its exit status."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import pase
from pase.commands.compile import summary
from pase.machine import dumps, load
from tests.command import printed, reported, run

MODEL = ("zoo:mlp", "--devices", 4, "--mesh", "2x2")


def test_json_is_the_plans_summary(tmp_path: Path) -> None:
    """It names the layout that was written, which is the plan."""
    out = tmp_path / "layout.json"
    said = reported("compile", *MODEL, "-o", out)
    plan = pase.load(out)
    assert said.pop("layout") == str(out)
    wanted = summary(plan)
    assert said.keys() == wanted.keys()
    assert {k: said[k] for k in ("cost", "memory_bytes", "optimal", "baselines")} == {
        k: wanted[k] for k in ("cost", "memory_bytes", "optimal", "baselines")
    }
    assert said["mesh"] == plan.mesh.by_name and said["nodes"] == len(plan.nodes)


def test_a_bucket_plan_is_scheduled_on_request() -> None:
    assert "bucket plan 'ddp'" in printed("compile", *MODEL, "--schedule", "ddp")
    assert reported("compile", *MODEL, "--schedule", "ddp")["bucket_plan"]["iteration_s"] > 0


def test_constraints_are_kept_and_their_layout_is_explained(tmp_path: Path) -> None:
    layout = tmp_path / "layout.json"
    asked = ("zoo:mlp", "--devices", 4, "--mesh", "data=2,model=2", "--constrain", "batch=data", "-o", layout)
    said = reported("compile", *asked)
    assert any("under your constraint 'batch'" in r["what"] for r in said["remarks"])
    assert all(t.storage[0] == ("data",) for t in pase.load(layout).inputs.values())
    assert "batch" in pase.load(layout).provenance["constraints"]
    assert reported("explain", layout)["cost"] == said["cost"]
    code, _, error = run("compile", "zoo:mlp", "--devices", 4, "--constrain", "batch=data,,")
    assert code == 2 and "--constrain" in error


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A machine whose devices have a kilobyte of memory."""
    m = load("h100x8")
    path = tmp_path / "tiny.toml"
    path.write_text(dumps(replace(m, device=replace(m.device, memory_bytes=1000, reserved_bytes=0))))
    return path


@pytest.mark.parametrize(("strict", "status"), [((), 0), (("--strict",), 1)])
def test_what_does_not_fit_is_a_failure_only_if_asked(
    tiny: Path, strict: tuple[str, ...], status: int
) -> None:
    """The best plan without a limit is printed in any case, with a warning."""
    code, out, _ = run("compile", *MODEL, "--machine", tiny, *strict)
    assert code == status and "WARNING" in out


def test_a_limit_that_nothing_fits_is_a_failure() -> None:
    code, out, error = run("compile", *MODEL, "--memory-limit", "1KiB")
    assert code == 1 and out == "" and error.startswith("Error: ")


def module_and_batch() -> tuple[object, ...]:
    """A PyTorch model, named as users name theirs."""
    import torch

    with torch.device("meta"):
        return torch.nn.Linear(16, 16), torch.empty(8, 16), lambda module, x: module(x).square().mean()


@pytest.mark.torch
def test_a_plan_of_a_pytorch_model_says_what_else_can_run_one(tmp_path: Path) -> None:
    model = ("tests.commands.test_compile:module_and_batch", "--devices", 2, "-o", tmp_path / "layout.json")
    _, _, said = run("compile", *model)
    assert "compile with --for ddp, fsdp2" in " ".join(said.split())
    _, _, said = run("compile", *model, "--for", "ddp", "--emit", tmp_path / "ddp.py")
    assert "--for" not in said and (tmp_path / "ddp.py").exists()
