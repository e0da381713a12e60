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


def losses(printed):
    return [float(x.rpartition("loss")[2]) for x in printed.splitlines() if "loss" in x]


def test_a_step_of_ones_own_learns():
    first, *_, last = losses(run("own_step.py", "--steps", "6"))
    assert last < first


@pytest.mark.parametrize("library", ["linen", pytest.param("haiku", marks=pytest.mark.corpus("haiku"))])
def test_batch_statistics_are_kept(library):
    """After 40 steps the statistics are those of the data: evaluation by them is close to training's own."""
    printed = run("batch_stats.py", "--library", library, "--steps", "40")
    first, *_, last = losses(printed)
    assert last < first
    assert float(printed.split()[-1]) < 0.5 < first


def test_decoding_gives_the_tokens_of_the_unsharded_functions():
    printed = run("generate.py", "--tokens", "3").splitlines()
    assert printed[-1] == "the same tokens as without a plan"
    assert sum(line.startswith("token ") for line in printed) == 3


def test_an_onnx_file_is_written(tmp_path):
    pytest.importorskip("onnx")
    run("make_onnx.py", folder=tmp_path)
    assert (tmp_path / "model.onnx").stat().st_size > 1000


def test_every_example_has_a_test():
    assert EXAMPLES == ["batch_stats.py", "generate.py", "make_onnx.py", "own_step.py", "train.py"]
