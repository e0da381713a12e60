"""What a JAX plan is made from: the model that was compiled, in micro-batches, with the plan's own layouts."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from bench.cases.plans import case_of
from pase.api import Plan
from pase.backends.jax.make import modules_of, one_program_plan, traced_by_jax
from pase.errors import PaseError
from pase.plan.layout import from_json, to_json


@functools.cache
def planned() -> Plan:
    def loss(p: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)

    params = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8))}
    plan = case_of(loss, params, jnp.ones((16, 8))).plan("zero2")
    assert plan is not None
    return plan


def test_a_plan_that_was_loaded_without_its_model_is_refused() -> None:
    with pytest.raises(PaseError) as e:
        one_program_plan(from_json(to_json(planned())))
    assert "loss_fn, params, batch" in e.value.fix


def test_a_model_of_another_framework_is_refused() -> None:
    with pytest.raises(PaseError, match="not a JAX program"):
        traced_by_jax(replace(planned(), traced=SimpleNamespace(frontend="torch")))


@pytest.mark.parametrize("many", [1, 2, 4])
def test_the_model_takes_one_micro_batch(many: int) -> None:
    for traced in (traced_by_jax(planned(), many), traced_by_jax(replace(planned(), accumulate=many))):
        assert [a.shape for a in traced.jaxpr.in_avals] == [(16, 8), (8, 16), (16 // many, 8)]


def test_a_function_of_arrays_has_no_modules() -> None:
    assert modules_of(planned()) is None


def test_parameters_gradients_and_batch_are_stored_as_the_plan_says() -> None:
    """ZeRO-2: the parameters are whole on each device, and their gradients and the batch are split."""
    plan = planned()
    made = one_program_plan(plan)
    names = {t.path: t.name for t in plan.graph.parameters}
    for path, p in plan.parameters.items():
        assert made.constraints.storage[names[path]] == p.storage == ((), ())
        assert made.constraints.state[names[path]] == p.state != p.storage
    (batch,) = (made.constraints.storage[t.name] for t in plan.graph.inputs)
    assert batch == (plan.mesh.names, ())
    assert made.accumulate == plan.accumulate and made.logical_mesh == plan.mesh


@pytest.mark.parametrize("params", [list, lambda w: dict(enumerate(w))], ids=["list", "dict"])
def test_parameters_without_names_are_not_taken_for_the_batch(params: Any) -> None:
    """Both were called 0 and 1: the plan's parameters had the batch's shapes, and FSDP stored them whole."""
    import jax

    import pase

    def loss(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(jnp.tanh(x @ w[0]) @ w[1] - y))

    w = params([jnp.full((64, 128), 0.1), jnp.full((128, 64), 0.2)])
    x = jnp.linspace(-1.0, 1.0, 256 * 64).reshape(256, 64)
    plan = dict(pase.compare(loss, w, x, x, devices=8, machine="h100x8", mesh="data=8"))["fsdp"]
    assert [t.shape for t in plan.parameters.values()] == [(64, 128), (128, 64)]
    assert [t.shape for t in plan.inputs.values()] == [(256, 64), (256, 64)]
    placed, *_ = plan.jax.device_put(w, x, x)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(placed))
    assert held == plan.memory.parameters == 2 * 64 * 128 * 4 // 8
    value, slopes = plan.jax.value_and_grad()(*plan.jax.device_put(w, x, x))
    alone, there = jax.value_and_grad(loss)(w, x, x)
    assert float(value) == pytest.approx(float(alone), rel=1e-5)
    for mine, theirs in zip(jax.tree.leaves(slopes), jax.tree.leaves(there), strict=True):
        assert jnp.allclose(mine, theirs, atol=1e-5)
