"""The examples run unchanged."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import program

ROOT = Path(__file__).parents[2]


EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("*.py"))


def run(example: str, *options: str, folder: Path = ROOT) -> str:
    """Run an example and return what it prints."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = program.run("python", ROOT / "examples" / example, *options, folder=folder, environment=env)
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
    """After 40 steps the statistics are those of the data, so evaluation with them is close to training."""
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


@pytest.mark.torch
@pytest.mark.parametrize(
    ("ranks", "more"), [(2, ()), pytest.param(4, ("--pipeline", "2"), marks=pytest.mark.release)], ids=str
)
def test_torchrun_starts_processes_that_train_as_one(ranks, more):
    """Gloo processes, with and without stages, have the norms, losses and weights of PyTorch in one process."""
    import torch

    from examples import torch_train

    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(ROOT / "examples" / "torch_train.py"), "--steps", "3", *more]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr[-2000:]

    torch.manual_seed(0)
    module = torch_train.Classifier(layers=4, width=32, hidden=128, classes=8)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    alone = []
    for i in range(3):
        loss = module(*torch_train.examples(i, 64, 32, 8))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        alone += [norm.item(), loss.item()]
    alone.append(module.layers[0].up.weight.norm().item())
    numbers = [float(x) for line in done.stdout.splitlines()[-4:] for x in re.findall(r"\d+\.\d+", line)]
    assert numbers == pytest.approx(alone, rel=1e-5)


def test_an_onnx_file_is_planned_and_annotated(tmp_path):
    pytest.importorskip("onnx")
    printed = run("onnx_file.py", str(tmp_path))
    assert "20 shardings on 32 devices" in printed and "MatMul   3 of its tensors" in printed


@pytest.mark.minutes
def test_a_keras_model_is_planned_and_its_shardings_written(tmp_path):
    pytest.importorskip("tensorflow")
    printed = run("keras_model.py", "-o", str(tmp_path / "s.json"))
    assert "times this plan's step" in printed and printed.splitlines()[-1].startswith("7 kernels")


@pytest.mark.minutes
def test_a_machine_is_measured_planned_for_run_and_replayed(tmp_path):
    printed = run("measure.py", str(tmp_path), "--budget", "1s")
    assert [line.split()[2] for line in printed.splitlines() if line.startswith("$ pase")] == [
        "calibrate",
        "compile",
        "profile",
        "replay",
        "diagnose",
    ]
    assert (tmp_path / "why.html").stat().st_size > 1000


NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.minutes
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(notebook, tmp_path):
    """The cells run in order in one process. The last value of a cell is shown as HTML if it has such a form."""
    code = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    assert code and not any(c["outputs"] for c in code)
    cells = tmp_path / "cells.py"
    cells.write_text(CELLS)
    done = program.run("python", cells, notebook, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


CELLS = """
import ast, json, sys
names = {}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] != "code":
        continue
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is not None:
        shown = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        print(shown._repr_html_() if hasattr(shown, "_repr_html_") else repr(shown))
"""


def test_every_example_has_a_test():
    assert [p.stem for p in NOTEBOOKS] == ["first_plan", "own_model", "slow_trace"]
    assert EXAMPLES == [
        "batch_stats.py",
        "generate.py",
        "keras_model.py",
        "make_onnx.py",
        "measure.py",
        "multi_host.py",
        "onnx_file.py",
        "own_step.py",
        "torch_train.py",
        "train.py",
    ]


@pytest.mark.minutes
def test_a_run_on_several_hosts_goes_on_with_another_number_of_devices(tmp_path):
    """Losses are those of one device that was never stopped, to the last printed digit or one off it."""
    folder = tmp_path / "run"
    first = losses(
        run("multi_host.py", "--local", "4", "--devices-each", "2", "--steps", "3", "--save", str(folder))
    )
    then = losses(
        run("multi_host.py", "--local", "2", "--devices-each", "1", "--steps", "2", "--resume", str(folder))
    )
    alone = losses(run("multi_host.py", "--local", "1", "--devices-each", "1", "--steps", "5"))
    assert len(alone) == 5
    assert [*first, *then] == pytest.approx(alone, abs=2e-6)
