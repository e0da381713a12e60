"""Optimizers that would give other numbers in stages are refused."""

from __future__ import annotations

import optax
import pytest

from pase.errors import PaseError
from tests.backends.jax.pipeline.staged import chained, staged

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (optax.lamb(1e-3), "each layer of 'params'"),
        (optax.chain(optax.add_noise(0.1, 0.5, 3), optax.sgd(1e-3)), "random numbers"),
    ],
)
def test_an_optimizer_that_would_give_other_numbers_in_stages_is_refused(optimizer, why):
    plan, w, x, _ = chained()
    jp = staged(plan, "1f1b", 1, (2, 2)).jax
    with pytest.raises(PaseError) as e:
        jp.train_step(optimizer)(w, jp.init(optimizer, w), x)
    assert why in e.value.what and "choose an optimizer" in e.value.fix
