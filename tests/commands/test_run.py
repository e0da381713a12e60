"""``pase run``."""

import os
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest

import pase
from pase.errors import PaseError
from tests.command import reported, run


def test_the_readmes_first_command_runs_its_second(tmp_path, monkeypatch):
    """As ``make demo``: a plan of the published size (bfloat16) is run in the reduced size (float32).

    The gradient check is left out, because it would take three times as long as the rest. tests/house runs it with the
    commands of the README.
    """
    layout = tmp_path / "layout.json"
    pase.compile("zoo:gpt2", devices=32).save(layout)
    left_out = Mock(as_json=dict, verdict="undecided")
    monkeypatch.setattr("pase.commands.run.gradient_check", lambda *_: left_out)
    result = reported("run", layout, "--reduced", "--devices", 8)
    assert result["agrees"]
    by_kind = {c["kind"]: c for c in result["collectives"]}
    assert by_kind["all_reduce"]["compiled_bytes"] > 0 < by_kind["reduce_scatter"]["compiled_bytes"]
    assert all(c["compiled_bytes"] == c["predicted_on_cpu"] for c in by_kind.values())


def test_a_step_that_this_machine_cannot_hold_is_refused_before_it_runs(tmp_path):
    """Each device has little enough for an H100, but here all devices share the memory of one host."""
    layout = tmp_path / "layout.json"
    pase.compile("zoo:mlp?batch=16777216", devices=64).save(layout)
    code, _, said = run("run", layout)
    assert code == 1 and "--reduced" in said and "this machine" in said


OWN = """
import jax
import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self, width, layers, rngs):
        self.table = nnx.Embed(16, width, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(layers)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = nnx.gelu(layer(x))
        return self.dropout(x)


def loss(model, tokens, wanted):
    return jnp.mean((model(tokens) - wanted) ** 2)


def of_size(width, layers, batch):
    model = nnx.eval_shape(lambda: Net(width, layers, nnx.Rngs(0)))
    return loss, model, jax.ShapeDtypeStruct((batch,), int), jax.ShapeDtypeStruct((batch, width), float)


def full():
    return of_size(1024, 6, 64)


def small():
    return of_size(32, 2, 16)
"""


def test_a_users_own_model_runs_in_the_smaller_size_that_is_named(tmp_path, monkeypatch):
    """An NNX module given as shapes: random streams, tokens and weights get values, fewer layers keep the splits."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_net.py").write_text(OWN)
    run("compile", "own_net:full", "--devices", 8, "-o", "layout.json")
    code, _, said = run("run", "layout.json", "--reduced", "--devices", 8)
    assert code == 2 and "--model" in said
    result = reported("run", "layout.json", "--model", "own_net:small", "--devices", 8)
    assert result["agrees"] and result["random_values"] and result["model"] == "own_net:small"
    assert result["check"]["verdict"] != "off"


def test_a_plan_of_what_is_no_jax_program_says_how_to_check_it(tmp_path):
    layout = tmp_path / "layout.json"
    run("compile", str(_onnx_file(tmp_path)), "--devices", 2, "-o", layout)
    code, _, said = run("run", layout)
    assert code == 2 and "loss_fn" in said and "--model" in said


def _onnx_file(folder):
    import onnx
    from onnx import TensorProto, helper

    weight = helper.make_tensor("w", TensorProto.FLOAT, [8, 8], [0.0] * 64)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 8]) for n in ("x", "y"))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    onnx.save(helper.make_model(graph), folder / "model.onnx")
    return folder / "model.onnx"


MODULE = """
import torch


class Net(torch.nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.table = torch.nn.Embedding(16, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x


def loss(model, tokens, wanted):
    return torch.nn.functional.mse_loss(model(tokens), wanted)


def of_size(width, layers, batch):
    return Net(width, layers), torch.randint(0, 16, (batch,)), torch.randn(batch, width), loss


def full():
    return of_size(512, 4, 64)


def small():
    return of_size(32, 2, 16)


def other():
    return torch.nn.Linear(8, 8), torch.ones(16, 8), lambda model, x: model(x).sum()
"""


@pytest.mark.torch
def test_a_users_pytorch_module_runs_on_ranks_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_module.py").write_text(MODULE)
    run("compile", "own_module:full", "--devices", 8, "-o", "layout.json")
    result = reported("run", "layout.json", "--model", "own_module:small", "--devices", 2)
    assert (
        result["agrees"] and result["check"]["verdict"] == "agrees" and result["model"] == "own_module:small"
    )
    assert result["check"]["reference"]["loss"] == pytest.approx(result["loss"], rel=1e-5)
    code, _, said = run("run", "layout.json", "--model", "own_module:other", "--devices", 2)
    assert code == 2 and "the graph is not that of the plan" in said


def refuses(words):
    raise PaseError(words, where="a rank", fix="try")


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


HOLDS = """
import multiprocessing
from pase.backends.torch.local_ranks import on_local_ranks
held = []
def run():  # as libraries that show progress do
    held.append(multiprocessing.get_context("spawn").RLock())
    return 7
if __name__ == "__main__":
    print(on_local_ranks(2, run))
"""


@pytest.mark.torch
def test_ranks_leave_nothing_behind(tmp_path):
    (tmp_path / "holds.py").write_text(HOLDS)
    done = subprocess.run([sys.executable, "holds.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("7\n", "")


@pytest.mark.torch
def test_what_a_rank_says_is_the_error():
    from pase.backends.torch.local_ranks import on_local_ranks

    with pytest.raises(PaseError) as raised:
        on_local_ranks(2, refuses, "its own words")
    assert (raised.value.what, raised.value.where, raised.value.fix) == ("its own words", "a rank", "try")
    with pytest.raises(PaseError, match="SIGKILL") as raised:
        on_local_ranks(2, is_killed)
    assert raised.value.fix
