"""Numbers of devices that divide few of a model's sizes: the plan for fewer of them is taken where it is faster."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pase
from pase.compiler.idle import ALL_DEVICES, repeated_work

W = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
X = jax.ShapeDtypeStruct((256, 64, 2048), jnp.bfloat16)


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(x @ w @ w @ w))


def compiled(devices: int, **options: object) -> pase.Plan:
    return pase.compile(loss, W, X, devices=devices, machine="a100x8", baselines=False, **options)


@pytest.mark.parametrize("devices", [7, 12])
def test_no_smaller_number_of_devices_is_much_faster(devices: int) -> None:
    """Oracle: every smaller number of devices, each with all of them in use."""
    plan = compiled(devices)
    least = min(compiled(n, idle="none").cost for n in range(1, devices + 1))
    assert plan.cost <= least / 0.95
    assert plan.devices + plan.idle == devices and plan.idle


def test_the_plan_says_what_is_idle_and_which_batch_would_divide(tmp_path) -> None:
    plan = compiled(7)
    assert (plan.devices, plan.idle) == (4, 3)
    assert plan.baselines[ALL_DEVICES] > 2 * plan.cost
    (said,) = plan.remarks
    assert (
        said.startswith("3 of the 7 devices are left idle") and "a batch of 252 or 259 instead of 256" in said
    )
    plan.save(tmp_path / "layout.json")
    assert pase.load(tmp_path / "layout.json").idle == 3


@pytest.mark.parametrize("options", [{"idle": "none"}, {"mesh": "7"}])
def test_a_plan_for_all_of_them_says_what_is_repeated(options: dict[str, str]) -> None:
    plan = compiled(7, **options)
    assert (plan.devices, plan.idle) == (7, 0)
    assert repeated_work(plan) == pytest.approx(7)
    assert "do 7 times the step's work; a batch of 252 or 259" in plan.remarks[0]


def test_nothing_is_said_where_the_devices_divide_the_work() -> None:
    plan = compiled(8)
    assert (plan.devices, plan.idle, plan.remarks) == (8, 0, ())
    assert repeated_work(plan) == pytest.approx(1)
