"""The examples run as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_example_runs_and_learns(example):
    command = [sys.executable, example, "--steps", "6"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [
        float(line.rpartition("loss")[2])
        for line in done.stdout.splitlines()
        if line.startswith("step ") and "loss" in line
    ]
    assert losses[-1] < losses[0]
