"""Replicas of a pipeline on several groups of devices give the unsharded step's numbers, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest

import pase
from pase.backends.audit.xla import worst_difference
from pase.errors import PaseError
from pase.plan.pipeline import ReplicaPlan
from tests.backends.jax.pipeline.staged import chained, staged
from tests.pipeline.small import MICRO, OPTIMIZER, arguments, gpt, reference

pytestmark = pytest.mark.usefixtures("double")


@cache
def on_four(scan):
    with jax.enable_x64(True):
        asked = {"pipeline": 2, "mesh": "2", "accumulate": MICRO, "memory_limit": "none", "remat": "none"}
        return pase.compile(gpt, *arguments(scan), devices=4, machine="h100x8", **asked)


def replicas(plan, *of):
    """A plan of replicas on groups of four devices, with the given (micro-batches, schedule, cuts) of each."""

    def replica(many, name, cuts):
        p = staged(plan, name, 1, cuts).pipeline
        mesh = dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
        stages = replace(p, micro_batches=many)
        return ReplicaPlan(group=f"group{many}", micro_batches=many, step_s=1.0, mesh=mesh, pipeline=stages)

    made = tuple(replica(*r) for r in of)
    return replace(plan, pipeline=replace(made[0].pipeline, replicas=made), accumulate=made[0].micro_batches)


def test_replicas_with_unequal_shares_equal_the_unsharded_step(scan=True):
    """One group has three micro-batches. Another has one, and its stages have other cuts."""
    jp = replicas(on_four(scan), (3, "1f1b", (1, 3)), (1, "gpipe", (3, 1))).jax
    params, batch = arguments(scan)
    whole = reference(scan)
    placed, there = jp.device_put(params, batch)
    loss, grads = jp.value_and_grad()(params, batch)
    assert abs(float(loss) - whole.loss) < 1e-12 and abs(float(jp.loss()(placed, there)) - whole.loss) < 1e-12
    step, state = jp.train_step(OPTIMIZER), jp.init(OPTIMIZER, placed)
    updated, state, loss = step(placed, state, there)
    assert abs(float(loss) - whole.loss) < 1e-12
    for r, mine, theirs in zip(jp.replicas, updated.parts, grads.parts, strict=True):
        assert worst_difference(whole.gradients, r.gathered(theirs)) < 1e-12
        assert worst_difference(whole.parameters, r.gathered(mine)) < 1e-12
    devices = [{d for x in jax.tree.leaves(part) for d in x.devices()} for part in updated.parts]
    assert [len(d) for d in devices] == [4, 4] and not devices[0] & devices[1]
    *_, second = step(updated, state, batch)
    assert float(second) < float(loss)
    with pytest.raises(PaseError, match=r"8 devices \(4 \+ 4\), but JAX sees 7"):
        jp.mesh(jax.devices()[:7])


def test_what_a_loss_returns_besides_is_stacked_over_the_replicas():
    plan, w, x, ((loss, aux), grads) = chained()
    jp = replicas(plan, (3, "1f1b", (1, 3)), (1, "1f1b", (2, 2))).jax
    (got, mine), found = jp.value_and_grad()(w, x)
    assert abs(float(got - loss)) < 1e-14 and mine["x"].shape == (MICRO,)
    assert float(jnp.sum(mine["x"]) - aux["x"]) == pytest.approx(0, abs=1e-12)
    assert worst_difference(grads, jp.gathered(found)) < 1e-14
