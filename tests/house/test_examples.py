"""The examples run as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("*.py"))


def run(example: str, *options: str, folder: Path = ROOT) -> str:
    """What an example prints."""
    command = [sys.executable, str(ROOT / "examples" / example), *options]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_training_learns():
    printed = run("train.py", "--steps", "6").splitlines()
    losses = [float(x.rpartition("loss")[2]) for x in printed if x.startswith("step ") and "loss" in x]
    assert losses[-1] < losses[0]


def test_an_onnx_file_is_written(tmp_path):
    pytest.importorskip("onnx")
    run("make_onnx.py", folder=tmp_path)
    assert (tmp_path / "model.onnx").stat().st_size > 1000


def test_every_example_has_a_test():
    assert EXAMPLES == ["make_onnx.py", "train.py"]
