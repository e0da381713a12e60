"""``plan.jax.check`` on 8 host devices: right gradients agree, and planted errors are found by name."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import pase
from bench.audit.check_faults import gradient_fault, planted, state_fault
from bench.cases.plans import case_of
from pase.backends.jax.spmd.lower import Manual
from pase.errors import PaseError

B, D, F = 16, 8, 16
KEYS = jax.random.split(jax.random.key(0), 6)
PARAMS = {
    "b": jnp.zeros(F),
    "c": 0.3 * jax.random.normal(KEYS[0], (F,), jnp.complex64),
    "n": jnp.arange(F),
    "w1": 0.3 * jax.random.normal(KEYS[1], (D, F)),
    "w2": 0.3 * jax.random.normal(KEYS[2], (F, D)),
}
BATCH = {"x": jax.random.normal(KEYS[3], (B, D)), "y": jax.random.normal(KEYS[4], (B, D))}


def loss(p, batch):
    """A complex parameter, one of integers, and a second result."""
    h = jax.nn.relu(batch["x"] @ p["w1"] + p["b"])[:, p["n"]]
    y = jnp.real(h * p["c"]) @ p["w2"]
    return jnp.mean((y - batch["y"]) ** 2), {"largest": y.max()}


@pytest.fixture(scope="module")
def plan():
    made = case_of(loss, PARAMS, BATCH).plan("random1@2x4")
    assert made is not None and made.collectives
    return made.jax


@pytest.fixture(scope="module")
def agreed(plan):
    return plan.check(PARAMS, BATCH)


def test_a_right_step_agrees(agreed):
    assert agreed.verdict == "agrees", str(agreed)
    assert [p.name for p in agreed.parameters] == ["b", "c", "w1", "w2"]
    assert agreed.reference.kind == "the unsharded step" and agreed.reference.loss_agrees
    assert agreed.reference.loss == pytest.approx(agreed.loss)
    assert max(p.difference for p in agreed.parameters) < 1e-5
    assert max(map(len, str(agreed).splitlines())) <= 80


def off_by(name, how):
    """Make one gradient of plans in the manual lowering wrong."""
    right = Manual.gradients
    return patch.object(
        Manual, "gradients", lambda self, grads: (g := right(self, grads)) | {name: how(g[name])}
    )


@pytest.mark.parametrize("name", ["w1", "c"])
def test_an_error_is_found_without_another_program(plan, name):
    """One device's part counts twice, like a gradient that was not reduced over one of two devices."""
    with off_by(
        name, lambda g: jnp.where(jnp.arange(g.shape[0]).reshape(-1, *[1] * (g.ndim - 1)) < 4, 2 * g, g)
    ):
        found = plan.check(PARAMS, BATCH, against="none")
    assert [p.name for p in found.by("off")] == [name] and found.no_reference == "not asked for"


def test_the_other_lowering_tells_which_is_off(plan):
    with off_by("w2", lambda g: 0 * g):
        found = plan.check(PARAMS, BATCH, against="lowering")
    assert [p.name for p in found.by("off")] == ["w2"]
    assert "annotated lowering" in found.by("off")[0].why


def test_a_checked_step_trains_or_names_what_is_off(plan):
    optimizer = optax.sgd(0.1)
    step = plan.train_step(optimizer, check=True)
    params, batch = plan.device_put(PARAMS, BATCH)
    state = plan.init(optimizer, params)
    with off_by("w1", lambda g: -g), pytest.raises(PaseError, match="OFF w1"):
        step(params, state, batch)
    assert step.result is None and not params["w1"].is_deleted()


def test_a_custom_rule_is_no_false_alarm():
    """The gradient of a straight-through estimator is intentionally not the slope of the loss."""

    def quantized(p, batch):
        w = p["w1"] + jax.lax.stop_gradient(jnp.round(4 * p["w1"]) / 4 - p["w1"])
        return jnp.mean((batch["x"] @ w @ p["w2"] - batch["y"]) ** 2)

    params = {k: PARAMS[k] for k in ("w1", "w2")}
    plan = case_of(quantized, params, BATCH).plan("random1@2x4").jax
    assert plan.check(params, BATCH).verdict == "agrees"
    with pytest.raises(PaseError, match="mode='inference'"):
        replace(plan, traced=replace(plan.traced, mode="inference")).check(params, BATCH)


def test_the_unsharded_step_is_run_where_it_fits(plan):
    with patch("pase.backends.jax.check_reference._free_bytes", lambda device: 100.0):
        found = plan.check(PARAMS, BATCH, against="unsharded", most_lines=0)
    assert found.reference is None and "one device has 100 B free" in found.no_reference


def test_products_of_bfloat16_round_by_more_than_their_parameters_do():
    """The reference's own rounding is that of the dtype in which the program computes."""

    def narrow(p, batch):
        h = jnp.tanh(batch["x"].astype(jnp.bfloat16) @ p["w1"].astype(jnp.bfloat16))
        return jnp.mean((h @ p["w2"].astype(jnp.bfloat16) - batch["y"]) ** 2)

    params = {k: PARAMS[k] for k in ("w1", "w2")}
    found = case_of(narrow, params, BATCH).plan("random1@2x4").jax.check(params, BATCH, most_lines=0)
    assert not found.by("off") and max(p.difference for p in found.parameters) > 1e-4, str(found)


def test_devices_whose_copies_differ(plan):
    """Only one device, not the first one, has a wrong copy of the gradient. JAX reads the right copy of the first."""
    with planted(lambda program, _: gradient_fault(program, "one device's copy", program.names.index("w2"))):
        found = plan.check(PARAMS, BATCH, against="none", most_lines=0)
    assert [p.name for p in found.by("off")] == ["w2"] and "devices that hold the same part" in found.by(
        "off"
    )[0].why


class Drops(nnx.Module):
    """Draws random numbers, and counts its calls."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.w1, self.w2 = nnx.Linear(D, F, rngs=rngs), nnx.Linear(F, D, rngs=rngs)
        self.dropout, self.calls = nnx.Dropout(0.5, rngs=rngs), nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return self.w2(self.dropout(jnp.tanh(self.w1(x))))


def test_state_and_random_numbers_in_micro_batches():
    """The reference runs micro-batches too. The whole batch would draw other numbers and count one call."""
    plan = pase.compile(
        lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2),
        Drops(),
        BATCH,
        devices=4,
        accumulate=2,
        memory_limit="none",
        baselines=False,
    )
    found = plan.jax.check(Drops(), BATCH, most_lines=0)
    assert found.reference.kind == "the unsharded step in 2 micro-batches" and found.reference.loss_agrees
    assert found.verdict == "agrees" and len(found.reference.state) >= 2, str(found)
    assert "2 micro-batches" in found.remarks[0]
    with planted(state_fault):
        off = plan.jax.check(Drops(), BATCH, most_lines=0)
    assert off.verdict == "off" and not off.by("off") and "OFF state" in str(off)
    with pytest.raises(PaseError, match="state"):
        off.raise_if_off()


def test_micro_batches_and_stages():
    """A plan with two stages and two micro-batches has the whole batch's gradients."""

    def layers(p, batch):
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), batch["x"], p["layers"])
        return jnp.mean((h @ p["head"] - batch["y"]) ** 2)

    params = {"layers": 0.3 * jax.random.normal(KEYS[5], (4, D, D)), "head": 0.1 * jnp.eye(D)}
    plan = pase.compile(layers, params, BATCH, devices=4, pipeline=2, accumulate=2, memory_limit="none")
    found = plan.jax.check(params, BATCH)
    assert found.verdict == "agrees" and found.lowering == "in stages" and found.devices == 4, str(found)
    assert [p.name for p in found.parameters] == ["head", "layers"]
    assert np.asarray(params["layers"]).shape == (4, D, D)
