"""The train step from a user's view: any optimizer, donation, auxiliary results, and helpful errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bench.cases.plans import case_of, reduced
from pase.backends.audit.xla import sharded_step, unsharded_step, worst_difference
from pase.errors import PaseError
from tests.backends.jax.steps.trained import PARAMS, X, data_parallel_plan, loss_fn

OPTIMIZERS = {
    "adamw_masked": optax.adamw(
        1e-2, eps=1e-3, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "clipped": optax.chain(
        optax.clip_by_global_norm(1e-3), optax.adam(optax.cosine_decay_schedule(1e-2, 10), eps=1e-6)
    ),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2, eps=1e-3), every_k_schedule=2),
    "partitioned": optax.multi_transform(
        {"slow": optax.sgd(0.1), "fast": optax.adam(1e-2, eps=1e-3)},
        {"norm": "slow", "up": "fast", "down": "fast"},
    ),
    "lion": optax.lion(1e-3),
    # It takes no further arguments, although its type says that it does.
    "sam": optax.contrib.sam(
        optax.sgd(0.1, momentum=0.9), optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    ),
    # It reads the loss. No step gains as much as rtol, so the rate falls at every step after the first.
    "plateau": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(0.5, patience=1, rtol=0.9)),
}


@pytest.mark.some(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    """Three steps with each optimizer. State that mirrors a parameter has the layout of the parameter."""
    optimizer, plan = OPTIMIZERS[name], data_parallel_plan()
    jp = plan.jax
    mesh = jp.mesh()
    params, state = PARAMS, optimizer.init(PARAMS)

    @jax.jit
    def plain(params, state, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        read = {"value": loss} if name == "plateau" else {}
        updates, state = optimizer.update(grads, state, params, **read)
        return optax.apply_updates(params, updates), state, loss

    placed, x = jp.device_put(PARAMS, X, mesh=mesh)
    placed_state = jax.jit(optimizer.init, out_shardings=jp.state_shardings(optimizer, mesh))(placed)
    step = jp.train_step(optimizer, mesh)
    for _ in range(3):
        params, state, loss = plain(params, state, X)
        placed, placed_state, loss_s = step(placed, placed_state, x)
        assert abs(loss_s - loss) <= 1e-5 * abs(loss)
    assert worst_difference(params, placed) < 1e-5
    assert worst_difference(state, placed_state) < 1e-5
    sharded = [s for s in jax.tree.leaves(placed_state) if s.shape == (16, 128)]
    assert all(s.sharding == placed["up"].sharding for s in sharded)
    assert not placed["up"].sharding.is_fully_replicated


def test_errors_of_optimizer_state_and_arguments():
    jp = data_parallel_plan().jax
    with pytest.raises(PaseError, match=r"the optimizer: its state has another structure than one array per"):
        jp.state_shardings(optax.sm3(1e-2))
    step = jp.train_step(optax.sgd(0.1))
    with pytest.raises(PaseError, match=r"argument 1 of the step: .* call plan\.jax\.init"):
        step(PARAMS, {}, X)
    with pytest.raises(PaseError, match=r"argument 2 of the step: .* pass what the plan was compiled for"):
        step(PARAMS, jp.init(optax.sgd(0.1), PARAMS), {"x": X})


def test_auxiliary_results():
    def with_aux(params, x):
        loss = loss_fn(params, x)
        return loss, {"doubled": 2 * loss, "rows": x.sum(-1)}

    plan = case_of(with_aux, PARAMS, X).plan("ours@8")
    step = sharded_step(plan, optax.sgd(0.1), PARAMS, X)
    off = unsharded_step(loss_fn, optax.sgd(0.1), PARAMS, X).differences(step)
    assert max(off.values()) < 1e-5, off
    jp = plan.jax
    loss, aux = jax.jit(jp.loss(jp.mesh()))(*jp.device_put(PARAMS, X))
    np.testing.assert_allclose(aux["doubled"], 2 * loss, rtol=1e-6)
    np.testing.assert_allclose(aux["rows"], X.sum(-1), rtol=1e-5)


def test_scan_and_remat_survive():
    """A rematerialised loop over layers stays a loop and rematerialised: the jaxpr has it once per direction."""
    plan = reduced("gpt2").plan("data_parallel")
    jaxpr = str(jax.make_jaxpr(plan.jax.value_and_grad(plan.jax.mesh()))(*plan.jax._shapes()))
    assert jaxpr.count("scan[") == 2 and "remat" in jaxpr


def test_errors_say_what_to_do():
    jp = data_parallel_plan().jax
    with pytest.raises(PaseError) as e:
        jp.mesh(jax.devices()[:4])
    assert "JAX sees 4" in e.value.what and "device_count=8" in e.value.fix
    for params, x, where, found, compiled in (
        (PARAMS | {"up": jnp.zeros((16, 64))}, X, "'up'", "(16, 64)", "(16, 128)"),
        (PARAMS, X.astype(int), "'x'", "int32", "float32"),
    ):
        with pytest.raises(PaseError) as e:
            jp.loss(jp.mesh())(params, x)
        assert e.value.where == where and found in e.value.what and compiled in e.value.what
    with pytest.raises(PaseError, match=r"it lacks 'down', 'norm\.scale'"):
        jp.loss(jp.mesh())(PARAMS["norm"], X)
