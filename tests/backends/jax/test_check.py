"""``plan.jax.check`` on 8 host devices: right gradients agree, and planted errors are found by name."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from bench.audit.check_faults import gradient_fault, planted
from bench.cases.plans import case_of
from pase.errors import PaseError
from tests.backends.jax.checked import BATCH, PARAMS, off_by, random_plan


@pytest.fixture(scope="module")
def plan():
    return random_plan()


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


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["w1", "c"])
def test_an_error_is_found_without_another_program(plan, name):
    """One device's part counts twice, like a gradient that was not reduced over one of two devices."""
    with off_by(
        name, lambda g: jnp.where(jnp.arange(g.shape[0]).reshape(-1, *[1] * (g.ndim - 1)) < 4, 2 * g, g)
    ):
        found = plan.check(PARAMS, BATCH, against="none")
    assert [p.name for p in found.by("off")] == [name] and found.no_reference == "not asked for"


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


def test_devices_whose_copies_differ(plan):
    """Only one device, not the first one, has a wrong copy of the gradient. JAX reads the right copy of the first."""
    with planted(lambda program, _: gradient_fault(program, "one device's copy", program.names.index("w2"))):
        found = plan.check(PARAMS, BATCH, against="none", most_lines=0)
    assert [p.name for p in found.by("off")] == ["w2"] and "devices that hold the same part" in found.by(
        "off"
    )[0].why
