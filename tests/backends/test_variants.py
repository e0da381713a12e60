"""Steps in micro-batches and with blocks computed again give the numbers, the bytes and the memory of the plan."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

import pase
from bench.cases.plans import ExpensiveCompute, case_of, reduced, total_error
from pase.api import Plan
from pase.backends.truth import compare as compare_bytes
from pase.backends.truth import sharded_step, unsharded_step
from pase.compiler.mesh_search import search_meshes
from pase.compiler.plans import plan_of
from pase.compiler.variants import Variant
from pase.frontends.jax_blocks import blocks_of
from pase.machine import mesh_from

KEYS = jax.random.split(jax.random.key(0), 4)
LAYERS = {
    "up": jax.random.normal(KEYS[0], (4, 16, 64)) / 4,
    "down": jax.random.normal(KEYS[1], (4, 64, 16)) / 8,
}
X = jax.random.normal(KEYS[2], (32, 16))


def layer(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def looped(params, x):
    return jnp.mean(jax.lax.scan(lambda h, w: (layer(h, w), None), x, params)[0] ** 2)


def unrolled(params, x):
    for i in range(4):
        x = layer(x, jax.tree.map(lambda p, i=i: p[i], params))
    return jnp.mean(x**2)


def plan_for(case, shape, variant):
    """The cheapest plan where compute is expensive, priced as usual."""
    p = case.problem.varied(case.traced, variant)
    mesh = mesh_from(shape, p.devices)
    found = search_meshes(replace(p, model=ExpensiveCompute(p.model)), [mesh])
    return Plan.of(plan_of(p, found.configs, mesh, case.traced.graph.name, case.traced))


@pytest.mark.parametrize("fn", [looped, unrolled])
@pytest.mark.parametrize(("shape", "k", "again"), [("8", 4, False), ("2x4", 1, True), ("4x2", 2, True)])
def test_numbers_and_bytes(fn, shape, k, again, tmp_path):
    case = case_of(fn, LAYERS, X, name=fn.__name__)
    blocks = blocks_of(case.traced)
    assert len(blocks) == (1 if fn is looped else 4)
    plan = plan_for(case, shape, Variant(accumulate=k, blocks=blocks if again else ()))
    optimizer = optax.adam(1e-2, eps=1e-3)
    step = sharded_step(plan, optimizer, LAYERS, X)
    off = unsharded_step(fn, optimizer, LAYERS, X).differences(step)
    assert max(off.values()) < 1e-5, off
    rows = compare_bytes(plan, step.compiled)
    assert sum(r.compiled for r in rows) > 1000
    assert abs(total_error(rows)) < 0.15  # XLA moves a kilobyte more
    jaxpr = str(jax.make_jaxpr(plan.jax.value_and_grad(plan.jax.mesh()))(*plan.jax._shapes()))
    assert ("remat" in jaxpr) is again
    plan.save(tmp_path / "layout.json")
    again_plan = pase.load(tmp_path / "layout.json").bind(fn, LAYERS, X)
    assert again_plan == plan and again_plan.jax.blocks == plan.jax.blocks


def test_a_transformer_in_micro_batches_moves_what_is_predicted():
    """Gathers and sums of gradients once for each micro-batch, to the byte."""
    case = reduced("gpt2")
    plan = plan_for(case, "2x4", Variant(accumulate=2))
    optimizer = optax.adam(1e-2, eps=1e-3)
    params, batch = case.model.init(0)
    step = sharded_step(plan, optimizer, params, batch)
    off = unsharded_step(case.model.loss_fn, optimizer, params, batch).differences(step)
    assert max(off.values()) < 5e-5, off
    assert abs(total_error(compare_bytes(plan, step.compiled))) < 0.01
