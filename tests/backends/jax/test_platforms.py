"""Code with a version for each platform (jax.lax.platform_dependent), as in jnp.diagonal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bench.cases.plans import case_of
from pase.backends.audit.xla import sharded_step, unsharded_step
from pase.errors import PaseError


def twice(x, **more):
    return jax.lax.platform_dependent(x, default=lambda x: 2 * x, **more)


def contrastive(p, x):
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(x @ p @ x.T)))


def for_a_kernel(p, x):
    """A branch for Mosaic kernels, which no device takes."""
    return jnp.sum(twice(jnp.sin(x @ p), mosaic=lambda x: x + x) ** 2)


def for_each(p, x):
    return jnp.sum(twice(jnp.sin(x @ p), cpu=lambda x: x + x) ** 2)


def off(loss, strategy, lowering):
    """The largest difference of loss, gradients and parameters from the unsharded step."""
    with jax.enable_x64(True):
        p, x = np.random.default_rng(0).normal(size=(2, 8, 8))
        plan = case_of(loss, p, x).plan(strategy)
        step = sharded_step(plan, optax.sgd(0.1), p, x, lowering=lowering)
        return max(unsharded_step(loss, optax.sgd(0.1), p, x).differences(step).values())


@pytest.mark.parametrize("strategy", ["ours@8", "random1@2x4"])
@pytest.mark.parametrize("loss", [contrastive, for_a_kernel])
def test_a_branch_that_every_device_takes_is_walked(loss, strategy):
    assert off(loss, strategy, "manual") < 1e-12


def test_it_is_annotated_too():
    assert off(contrastive, "ours@8", "annotated") < 1e-12


def test_code_of_each_platform_is_not_run_on_a_part():
    with pytest.raises(PaseError, match=r"'cond' at .*test_platforms\.py:\d+"):
        off(for_each, "ours@8", "manual")
    assert off(for_each, "ours@8", "annotated") < 1e-12
