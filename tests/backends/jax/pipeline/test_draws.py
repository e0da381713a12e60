"""Random numbers in stages: each micro-batch draws its part of what the whole batch draws, whatever runs it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest

import pase
from pase.backends.audit.xla import worst_difference
from pase.plan.pipeline import ReplicaPlan
from tests.backends.jax.pipeline.staged import staged
from tests.pipeline.small import MICRO

pytestmark = pytest.mark.usefixtures("double")


def _dropped(params, x, seed):
    first, each = jax.random.split(jax.random.key(seed))

    def dropped(h, key):
        return jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h, 0.0)

    h = dropped(x @ params["first"], first)
    h, _ = jax.lax.scan(lambda h, w: (dropped(jnp.tanh(h @ w), each), None), h, params["layers"])
    return jnp.mean(h**2)


def _dropped_first(params, x, seed):
    """The circular schedule runs one program on all ranks, which cannot read keys."""
    h = jnp.where(jax.random.bernoulli(jax.random.key(seed), 0.7, x.shape), x @ params["first"], 0.0)
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["layers"])[0] ** 2)


@cache
def _planned(loss):
    with jax.enable_x64(True):
        first, *layers, x = (jax.random.normal(jax.random.key(i), (16 if i > 4 else 4, 4)) for i in range(6))
        w = {"first": first, "layers": jnp.stack(layers)}
        asked = {"pipeline": 2, "mesh": "2", "accumulate": MICRO, "memory_limit": "none", "remat": "none"}
        given = (w, x, 3)
        plan = pase.compile(loss, *given, devices=4, machine="h100x8", **asked)
        return plan, given, jax.value_and_grad(loss)(*given)


def _over_the_batch(plan):
    """The plan with the mesh's axis splitting the batch, and gradients reduced once per step."""
    p, (axis,) = plan.pipeline, plan.mesh.names
    split = {n.name: {"b": (axis,)} if "b" in {d.name for d in n.space} else {} for n in plan.graph.nodes}
    stages = tuple(replace(s, weights="hoisted", strategy=0) for s in p.stages)
    alike = replace(p, strategies=(split,), stages=stages, recompute=p.recompute[:1])
    return replace(plan, pipeline=alike)


def _replicated(plan):
    """Two replicas of the stages, with three micro-batches and one."""
    mesh = dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    made = tuple(
        ReplicaPlan(
            group=f"group{many}",
            micro_batches=many,
            step_s=1.0,
            mesh=mesh,
            pipeline=replace(plan.pipeline, micro_batches=many),
        )
        for many in (3, 1)
    )
    return replace(plan, pipeline=replace(made[0].pipeline, replicas=made), accumulate=3)


WAYS = {
    "hoisted": lambda plan: _over_the_batch(staged(plan, "1f1b", 1, (1, 3))),
    "replicas": lambda plan: _replicated(staged(plan, "gpipe", 1, (2, 2))),
    "circular": lambda plan: _over_the_batch(staged(plan, "circular", 1, (2, 2))),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("way", WAYS)
def test_stages_draw_what_the_whole_batch_draws(way):
    plan, given, (wanted, by) = _planned(_dropped_first if way == "circular" else _dropped)
    jp = WAYS[way](plan).jax
    value, grads = jp.value_and_grad()(*jp.device_put(*given))
    assert float(value) == pytest.approx(float(wanted), abs=1e-14)
    assert worst_difference(by, jp.gathered(grads)) < 1e-13
