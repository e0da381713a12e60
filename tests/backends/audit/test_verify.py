"""A plan's step compiled in another process for host devices, and for GPUs where XLA's compiler for them is."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import optax
import pytest

import pase
from pase import machine
from pase.backends.audit.xla_memory import compare_memory
from pase.errors import PaseError

W = jax.ShapeDtypeStruct((64, 64), "float32")
X = jax.ShapeDtypeStruct((32, 64), "float32")


def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["up"]) @ params["down"])


@pytest.fixture(scope="module")
def plan():
    return pase.compile(loss_fn, {"up": W, "down": W}, X, devices=4, mesh="2x2", baselines=False)


@pytest.fixture(scope="module")
def found(plan):
    return plan.verify("cpu")


def test_a_step_compiled_elsewhere_is_the_one_compiled_here(plan, found):
    """The same bytes and memory as those of the step that this process lowers and compiles."""
    mesh = plan.jax.mesh(jax.devices()[:4])
    here = plan.jax.lower_train_step(optax.adam(1e-4), mesh, lowering="manual").compile()
    assert found.lowering == "manual" and found.bytes_equal and found.fits
    assert found.peak_bytes == compare_memory(plan, here, "manual").compiled
    workspace = machine.load(plan.machine).device.workspace_bytes  # a CPU has none
    assert found.predicted_peak_bytes == plan.memory.total - workspace
    assert found.predicted_collectives == found.collectives != {}
    assert set(found.overlapped) == set(found.collectives)


def test_the_step_is_priced_from_the_compiled_program(plan, found):
    """It takes at least its products at the machine's rate, and its messages; the prediction is for that machine."""
    device = pase.machine.load("cpu_host").device
    products = 3 * 2 * 2 * 32 * 64 * 64 / 4 / (device.peak("float32") * device.reached("matmul", "float32"))
    assert found.step_s > products + found.waited_s > found.waited_s > 0
    assert found.kernels is not None and found.kernels > 6
    assert found.target == "cpu_host" and found.predicted_step_s != plan.cost
    assert found.remark == ""


def test_it_is_shown_side_by_side(found):
    said = json.loads(json.dumps(found.to_json()))
    assert said["bytes_equal"] is True and said["peak_bytes"] == found.peak_bytes
    assert {"predicted_peak_bytes", "collectives", "predicted_collectives", "overlapped"} <= said.keys()
    assert {"step_s", "predicted_step_s", "kernels"} <= said.keys()
    text = str(found)
    assert max(map(len, text.splitlines())) <= 80
    assert all(kind in text for kind in found.collectives) and "those of the plan" in text


def test_a_compiler_that_is_ended_is_one_error(plan):
    with pytest.raises(PaseError, match=r"did not finish within 0\.01 s"):
        plan.verify("cpu", timeout_s=0.01)


def test_what_cannot_be_verified_is_refused(plan, tmp_path):
    with pytest.raises(PaseError, match="does not say how to compile"):
        plan.verify("mi300x8")
    plan.save(tmp_path / "layout.json")
    with pytest.raises(PaseError, match="without its model"):
        pase.load(tmp_path / "layout.json").verify("cpu")


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("lowering", ["manual", "annotated"])
def test_the_compiler_for_gpus(plan, lowering):
    found = plan.verify("h100x8", lowering=lowering)
    assert found.target == "h100x8" and found.lowering == lowering and found.fits
    assert found.bytes_equal or lowering == "annotated"
    assert "all-reduce-start" in found.text or "all-gather-start" in found.text
