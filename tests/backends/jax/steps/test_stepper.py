"""A compiled step reuses the memory of its arguments, and leaves the caller's own arrays alone."""

import jax
import numpy as np
import optax
import pytest

import pase
from pase.backends.jax.steps.stepper import Stepper
from pase.errors import PaseError
from tests.backends.jax.steps.trained import PARAMS, X, data_parallel_plan


def test_step_donates():
    """A step reuses the memory of its parameters and state, but not that of the caller's own arrays."""
    plan, optimizer = data_parallel_plan(), optax.adam(1e-3)
    jp = plan.jax
    params, x = jp.device_put(PARAMS, X)
    state = jax.jit(optimizer.init, out_shardings=jp.state_shardings(optimizer))(params)
    jp.train_step(optimizer)(params, state, x)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((PARAMS, X, x)))
    sizes = jp.lower_train_step(optimizer).compile().memory_analysis()
    stored = sum(
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(jp.device_put(PARAMS, X)[0])
    )
    assert sizes.alias_size_in_bytes >= 3 * stored
    kept, x = jp.device_put(PARAMS, X)
    state = jax.jit(optimizer.init, out_shardings=jp.state_shardings(optimizer))(kept)
    jp.train_step(optimizer, donate=False)(kept, state, x)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((kept, state)))


def test_a_loop_checks_its_arguments_once(monkeypatch):
    """Arguments in other layouts, on the host or with another structure are looked at again."""
    plan, optimizer = data_parallel_plan(), optax.adam(1e-3)
    jp = plan.jax
    step = jp.train_step(optimizer, donate=False)
    looked = []
    slow = Stepper._placed
    monkeypatch.setattr(Stepper, "_placed", lambda self, args: looked.append(1) or slow(self, args))

    def loss(*args):
        looked.clear()
        *_, found = step(*args)
        return float(found), bool(looked)

    params, x = jp.device_put(PARAMS, X)
    state = jp.init(optimizer, params)
    expected, first = loss(params, state, x)
    assert first and loss(params, state, x) == (expected, False)
    alone = jax.device_put(x, jax.devices()[1])
    for other in (alone, jax.device_put(x, jax.sharding.NamedSharding(jp.mesh(), jax.P())), np.asarray(x)):
        found, again = loss(params, state, other)
        assert again and np.isclose(found, expected)
        assert loss(params, state, other) == (found, False)  # a batch that must be moved at each call
    assert loss(params, state, np.asarray(x))[1] is False  # jit itself places arrays of NumPy
    params, state, _ = step(params, state, x)
    loss(params, state, x)
    assert loss(*step(params, state, x)[:2], x)[1] is False
    with pytest.raises(PaseError, match="argument 1 of the step"):
        step(params, (), x)
    traced = jax.jit(lambda *args: step(*args)[-1])
    assert np.isclose(traced(params, state, x), step(params, state, x)[-1])


def test_static_leaves_are_left_out_of_each_call():
    equinox = pytest.importorskip("equinox")

    class Layer(equinox.Module):
        w: jax.Array
        function: object

    layer = Layer(jax.numpy.full((8, 8), 0.1), jax.numpy.tanh)
    plan = pase.compile(lambda m, x: m.function(x @ m.w).mean(), layer, jax.numpy.ones((8, 8)), devices=2)
    mesh = plan.jax.mesh(jax.devices()[:2])
    step = plan.jax.train_step(optax.sgd(0.1), mesh, donate=False)
    layer, x = plan.jax.device_put(layer, jax.numpy.ones((8, 8)), mesh=mesh)
    state = plan.jax.init(optax.sgd(0.1), layer, mesh)
    losses = []
    for _ in range(4):
        layer, state, value = step(layer, state, x)
        losses.append(float(value))
        assert layer.function is jax.numpy.tanh
    assert losses == sorted(set(losses), reverse=True)
    assert step._last[0].taken == [True, False, True]
