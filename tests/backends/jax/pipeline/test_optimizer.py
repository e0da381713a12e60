"""The state of an optimizer in stages."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from tests.backends.jax.pipeline.staged import chain, chained, staged

pytestmark = pytest.mark.usefixtures("double")


def test_constants_in_an_optimizers_state_are_on_every_rank():
    plan, w, _, _ = chained()
    state = staged(plan, "1f1b", 1, (2, 2)).jax.init(optax.contrib.muon(1e-3), w)
    (coefficients,) = (x for x in jax.tree.leaves(state) if x.shape == (3,))
    np.testing.assert_allclose(coefficients, (3.4445, -4.775, 2.0315))


def test_an_optimizer_may_read_the_loss():
    """With a plateau of two steps: the rate is halved on all ranks as without stages."""
    plan, w, x, _ = chained()
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.9)
    optimizer = optax.chain(optax.adam(0.1), plateau)
    jp = staged(plan, "1f1b", 1, (1, 3)).jax
    step, (params, there) = jp.train_step(optimizer), jp.device_put(w, x)
    state, alone, own = jp.init(optimizer, params), w, optimizer.init(w)
    for _ in range(4):
        params, state, _ = step(params, state, there)
        (loss, _), grads = jax.value_and_grad(chain, has_aux=True)(alone, x)
        updates, own = optimizer.update(grads, own, alone, value=loss)
        alone = optax.apply_updates(alone, updates)
    assert float(own[1].scale) < 1
    np.testing.assert_allclose(jp.gathered(params), alone, rtol=0, atol=1e-12)
