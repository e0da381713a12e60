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


def test_results_are_in_the_order_of_the_program(monkeypatch):
    """Every process compiles these programs. In the order of a set, their results would be at other places in each."""
    from pase.backends.jax.pipeline import distribute

    made, function_of = [], distribute.function_of

    def recorded(closed, equations, reads, makes):
        made.append((equations, makes))
        return function_of(closed, equations, reads, makes)

    monkeypatch.setattr(distribute, "function_of", recorded)
    plan, w, x, _ = chained()
    jp = staged(plan, "1f1b", 1, (2, 2)).jax
    jp.train_step(optax.adamw(1e-3))(w, jp.init(optax.adamw(1e-3), w), x)
    assert any(len(makes) > 3 for _, makes in made)
    for equations, makes in made:
        places = {v: i for i, v in enumerate(v for e in equations for v in e.outvars)}
        assert [places[v] for v in makes] == sorted(places[v] for v in makes)
