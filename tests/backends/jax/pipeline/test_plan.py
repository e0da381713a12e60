"""A plan in stages: values that several stages read, and what it cannot run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pase
from pase.backends.audit.xla import worst_difference
from pase.errors import PaseError
from tests.backends.jax.pipeline.staged import chained, staged
from tests.pipeline.small import MICRO, OPTIMIZER

pytestmark = pytest.mark.usefixtures("double")


def roundabout(params, x):
    """A reverse loop with scaled stacks, a weight that all layers share, and results of every iteration."""
    gate = x @ params["shared"]

    def layer(h, w):
        h = jnp.tanh(h @ w["w"] + h @ params["shared"]) * gate + w["b"]
        return h, jnp.mean(h**2)

    stacks = {"w": params["w"] * 0.5, "b": params["b"]}
    h, norms = jax.lax.scan(layer, x, stacks, reverse=True)
    return jnp.mean(h**2) + jnp.sum(norms * jnp.arange(1.0, 5.0))


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "chunks", "cuts"), [("1f1b", 1, (1, 3)), ("zb-v", 2, (1, 1, 1, 1))])
def test_what_stages_share_and_hand_on(name, chunks, cuts):
    rng = np.random.default_rng(1)
    params = {
        k: jnp.asarray(rng.normal(size=s)) for k, s in {"w": (4, 4, 4), "b": (4, 4), "shared": (4, 4)}.items()
    }
    x = jnp.asarray(rng.normal(size=(16, 4)))
    plan = pase.compile(
        roundabout,
        params,
        x,
        devices=2,
        machine="h100x8",
        pipeline=2,
        baselines=False,
        mesh="1",
        accumulate=MICRO,
    )
    jp = staged(plan, name, chunks, cuts).jax
    loss, grads = jax.value_and_grad(roundabout)(params, x)
    with pytest.warns(UserWarning, match="several stages read shared"):
        got, mine = jp.value_and_grad()(params, x)
    assert abs(float(got - loss)) < 1e-12
    assert worst_difference(grads, jp.gathered(mine)) < 1e-12
    assert [p.shape[0] for p in mine["w"].parts] == list(cuts)[::-1]  # in the order of the layers
    assert mine["shared"].sharding.num_devices == 2 and jp.stages[-1].enters


def test_what_it_cannot_run_is_said():
    plan, w, x, _ = chained()
    with pytest.raises(PaseError) as e:
        plan.jax.train_step(OPTIMIZER, lowering="annotated")
    assert e.value.where == "lowering='annotated'"
    with pytest.raises(PaseError, match="JAX sees 1"):
        plan.jax.mesh(jax.devices()[:1])
    with pytest.raises(PaseError) as e:
        plan.jax.in_shardings()
    assert e.value.where == "plan.jax.in_shardings"
    with pytest.raises(PaseError, match="shape"):
        plan.jax.device_put(w[:3], x)
