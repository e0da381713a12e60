"""Plans under any mesh in the user's context, and with arrays over it: the numbers are those of one device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pase
from pase.backends.jax.spmd.lower import Lowering
from pase.errors import PaseError

PARAMS = {"w": jnp.eye(16) * 2, "v": jnp.ones((16, 4))}
X = jax.random.normal(jax.random.key(0), (8, 16))
OPTIMIZER = optax.sgd(0.1)


def loss(p: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] + jnp.ones(4)) ** 2)


WANTED, GRADS = jax.device_get(jax.value_and_grad(loss)(PARAMS, X))
UPDATED = np.asarray(PARAMS["w"]) - 0.1 * GRADS["w"]


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind, kind))


def context(name: str) -> tuple[AbstractContextManager[Any], jax.sharding.Mesh]:
    how, _, axes = name.partition(" ")
    mesh = mesh_of(AxisType.Explicit if axes == "explicit" else AxisType.Auto)
    if how == "set":
        return jax.set_mesh(mesh), mesh
    return (jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if how == "use" else nullcontext()), mesh


@pytest.mark.some(3)
@pytest.mark.parametrize("lowering", ["manual", "annotated"])
@pytest.mark.parametrize("name", ["set explicit", "set auto", "use explicit"])
def test_a_plan_compiled_and_run_under_a_mesh(name: str, lowering: Lowering) -> None:
    entered, mesh = context(name)
    with entered:
        x = jax.device_put(X, NamedSharding(mesh, P("a", "b")))
        params = jax.device_put(PARAMS, NamedSharding(mesh, P("b")))
        plan = pase.compile(loss, params, x, devices=8, mesh="2x4", baselines=False)
        placed, y = plan.jax.device_put(params, x)
        state = plan.jax.init(OPTIMIZER, params)
        step = plan.jax.train_step(OPTIMIZER, lowering=lowering, donate=False)
        plan.jax.lower_train_step(OPTIMIZER, lowering=lowering)
        for given in ((params, state, x), (placed, state, y), (PARAMS, OPTIMIZER.init(PARAMS), X)):
            new, _, value = step(*given)
            np.testing.assert_allclose(float(value), float(WANTED), rtol=1e-5)
            np.testing.assert_allclose(np.asarray(new["w"]), UPDATED, atol=1e-5)
        value, grads = plan.jax.value_and_grad(lowering=lowering)(params, x)
        np.testing.assert_allclose(np.asarray(grads["v"]), GRADS["v"], atol=1e-5)
        assert float(plan.jax.loss(lowering=lowering)(params, x)) == pytest.approx(float(WANTED), rel=1e-5)
    assert float(step(*given)[2]) == pytest.approx(float(WANTED), rel=1e-5)  # the same step outside of it


def test_inside_of_ones_own_jit() -> None:
    """Values that are typed with an Explicit mesh are refused; others are not."""
    plan = pase.compile(loss, PARAMS, X, devices=8, mesh="2x4", baselines=False)
    own = jax.jit(lambda p, x: plan.jax.value_and_grad()(p, x)[0])
    for kind in AxisType.Explicit, AxisType.Auto:
        mesh = mesh_of(kind)
        with jax.set_mesh(mesh):
            assert float(own(PARAMS, X)) == pytest.approx(float(WANTED), rel=1e-5)
            typed = jax.device_put(X, NamedSharding(mesh, P("a")))
            if kind == AxisType.Auto:
                assert float(own(PARAMS, typed)) == pytest.approx(float(WANTED), rel=1e-5)
                continue
            with pytest.raises(PaseError, match=r"inside jax.jit .* Explicit") as e:
                own(PARAMS, typed)
            assert "call it outside jit" in e.value.fix


def test_a_program_that_names_axes_of_the_mesh_around_it() -> None:
    def constrained(p: Any, x: Any) -> Any:
        return loss(p, jax.lax.with_sharding_constraint(x, P("a")))

    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        plan = pase.compile(constrained, PARAMS, X, devices=8, mesh="2x4", baselines=False)
        value, _ = plan.jax.value_and_grad(lowering="annotated")(PARAMS, X)
    assert float(value) == pytest.approx(float(WANTED), rel=1e-5)


def test_a_generation_and_a_pipeline() -> None:
    def prefill(p: Any, x: Any) -> Any:
        h = jnp.tanh(x @ p["w"])
        return jnp.argmax(h @ p["v"], -1), h

    def decode(p: Any, token: Any, h: Any) -> Any:
        return prefill(p, h + token[:, None])

    def layers(p: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0] ** 2)

    stack = jnp.stack([jnp.eye(16)] * 4)
    wanted = jax.grad(layers)(stack, X)
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        two = pase.Generation(prefill=prefill, decode=decode, tokens=2)
        plan = pase.compile(two, PARAMS, X, devices=8, mesh="8", baselines=False)
        token, held = plan.jax.prefill(PARAMS, X)
        after, _ = plan.jax.decode(PARAMS, token, held)
        staged = pase.compile(layers, stack, X, devices=8, pipeline=2, baselines=False, accumulate=2)
        placed, x = staged.jax.device_put(stack, X)
        _, grads = staged.jax.value_and_grad()(placed, x)
    np.testing.assert_array_equal(after, decode(PARAMS, *prefill(PARAMS, X))[0])
    np.testing.assert_allclose(staged.jax.gathered(grads), wanted, atol=1e-5)
