"""A process that compiles: what it is given, and how it may end."""

from __future__ import annotations

import dataclasses
import json
import sys

import jax
import pytest
from flax import nnx

import pase
from pase.backends.audit import ahead
from pase.errors import PaseError
from pase.machine import load

W, X = (jax.ShapeDtypeStruct(s, "float32") for s in ((16, 16), (8, 16)))


@pytest.fixture(scope="module")
def plan():
    return pase.compile(lambda w, x: (x @ w).mean(), W, X, devices=2, baselines=False)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV"),
        ("import sys; print('broken'); sys.exit(3)", "ended with status 3: broken"),
    ],
)
def test_a_crash_of_the_compiler_is_one_error(plan, monkeypatch, program, said):
    started = ahead.subprocess.Popen
    monkeypatch.setattr(
        ahead.subprocess, "Popen", lambda command, **how: started([sys.executable, "-c", program], **how)
    )
    with pytest.raises(PaseError, match=said):
        ahead.compiled_ahead(plan, load("cpu_host"))


def test_a_program_that_the_compiler_refuses_is_its_message(plan, monkeypatch):
    """A program for 2 devices, with a mesh of 3."""
    run = ahead._run

    def on_another_mesh(folder, *rest):
        job = json.loads((folder / "job.json").read_text())
        (folder / "job.json").write_text(json.dumps(job | {"sizes": [3]}))
        run(folder, *rest)

    monkeypatch.setattr(ahead, "_run", on_another_mesh)
    with pytest.raises(PaseError, match="the compiler refuses the program: ValueError"):
        ahead.compiled_ahead(plan, load("cpu_host"))


def test_a_step_that_is_not_one_program_is_refused(plan):
    with pytest.raises(PaseError, match="many programs"):
        ahead.compiled_ahead(dataclasses.replace(plan, pipeline="two stages"), load("cpu_host"))


def test_inference_is_compiled_too():
    plan = pase.compile(lambda w, x: x @ w, W, X, devices=2, mode="inference", baselines=False)
    found = ahead.compiled_ahead(plan, load("cpu_host"))
    assert found.peak > 0 and found.text.startswith("HloModule")


@pytest.mark.parametrize("masked", [False, True])
def test_a_kernel_of_cudnn_is_exported_without_devices_and_without_cudnn(masked):
    """On a machine with neither, the step calls the kernel that a GPU would run, also with a part of a mask."""
    q = jax.ShapeDtypeStruct((4, 64, 2, 64), "bfloat16")
    m = jax.ShapeDtypeStruct((4, 1, 64, 64), "bool")

    def loss_fn(w, x, m):
        mask = m if masked else None
        return jax.nn.dot_product_attention(x * w, x, x, mask=mask, implementation="cudnn").mean()

    w = jax.ShapeDtypeStruct((64,), "bfloat16")
    plan = pase.compile(loss_fn, w, q, m, devices=2, baselines=False)
    target = ahead.devices_of(load("h100x8"), 2)
    made = ahead._exported(ahead.one_program_plan(plan), plan, target, "manual", None)
    assert (b"fmhaScaleBiasSoftmaxBackward" if masked else b"fmhaSoftmaxBackward") in made.data


def test_state_that_is_not_trained_has_no_place_in_the_optimizers():
    """The optimizer of a Flax NNX model with dropout has None where the model has the state of its generator."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first, self.drop = nnx.Linear(16, 16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.first(x))

    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    plan = pase.compile(lambda m, x: (m(x) ** 2).mean(), model, X, devices=2, baselines=False)
    found = ahead.compiled_ahead(plan, load("cpu_host"))
    assert found.peak > 0 and found.text.startswith("HloModule")
