"""``plan.jax`` is one interface, however the plan runs: what every plan has, and what only one program can have."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pase
from pase.backends.jax.plan import JaxPlan
from pase.errors import PaseError
from tests.backends.jax.nnx_models import BATCH, assert_alike, rngs, squares, variables
from tests.backends.jax.pipeline.staged import chained
from tests.backends.jax.pipeline.test_modules import Stack
from tests.backends.jax.pipeline.test_replicas import replicas
from tests.compiler.test_uneven import arguments, planned

pytestmark = pytest.mark.usefixtures("double")
OPTIMIZER = optax.adam(1e-2)
ONE_PROGRAM = (
    "program",
    "specs",
    "in_shardings",
    "gradient_shardings",
    "step",
    "apply",
    "restore",
    "unpadded",
)
ONE_PROGRAM += ("lower_train_step", "state_shardings", "prefill", "decode")


def in_replicas() -> tuple[JaxPlan[Any, Any], Any, Any]:
    plan, w, x, _ = chained()
    return replicas(plan, (3, "1f1b", (1, 3)), (1, "1f1b", (2, 2))).jax, w, x


def in_stages() -> tuple[JaxPlan[Any, Any], Any, Any]:
    plan, w, x, _ = chained()
    return plan.jax, w, x


def in_one_program() -> tuple[JaxPlan[Any, Any], Any, Any]:
    params = {"w": jnp.arange(128.0).reshape(8, 16), "key": jax.random.key(3), "count": jnp.int32(2)}
    x = jnp.ones((16, 8))
    plan = pase.compile(lambda p, x: jnp.mean((x @ p["w"]) ** 2), params, x, devices=8, mesh="2x4")
    return plan.jax, params, x


@pytest.mark.parametrize("made", [in_one_program, in_stages, in_replicas])
def test_what_was_placed_comes_back_whole(made: Any) -> None:
    jp, params, batch = made()
    assert isinstance(jp, JaxPlan)
    placed, *_ = jp.device_put(params, batch)
    back = jp.gathered(placed)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        else:
            assert isinstance(a, np.ndarray)
        np.testing.assert_array_equal(a, b)


def test_a_key_among_the_parameters_of_stages_comes_back() -> None:
    def loss(p: Any, x: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])
        return jnp.mean(h**2) + 0 * jax.random.normal(p["key"], ())

    given = {"w": jnp.ones((4, 8, 8)), "key": jax.random.key(3)}, jnp.ones((16, 8))
    jp = pase.compile(loss, *given, devices=4, pipeline=2, accumulate=4, baselines=False).jax
    placed, *_ = jp.device_put(*given)
    assert jax.random.key_data(jp.gathered(placed)["key"]).tolist() == [0, 3]


@pytest.mark.parametrize("made", [in_one_program, in_stages, in_replicas])
def test_what_was_placed_can_be_placed_with_the_next_batch(made: Any) -> None:
    jp, params, batch = made()
    placed, first = jp.device_put(params, batch)
    loss = jp.loss()
    again, second = jp.device_put(placed, batch * 0.5)
    for mine, x in ((first, batch), (second, batch * 0.5)):
        value, wanted = (jax.tree.leaves(loss(*given))[0] for given in ((again, mine), (params, x)))
        np.testing.assert_allclose(value, wanted, rtol=1e-6)


@pytest.mark.filterwarnings("error:Some donated buffers")
@pytest.mark.parametrize("made", ["none", 2, "replicas"])
def test_a_model_that_a_step_returns_is_placed_with_the_next_batch(made: Any) -> None:
    model, pipeline = Stack(rngs()), "none" if made == "none" else 2
    plan = pase.compile(squares, model, BATCH, devices=4, pipeline=pipeline, baselines=False, accumulate=4)
    jp = plan.jax if made != "replicas" else replicas(plan, (3, "1f1b", (2, 4)), (1, "1f1b", (3, 3))).jax
    placed, batch = jp.device_put(model, BATCH)
    step, state = jp.train_step(OPTIMIZER), jp.init(OPTIMIZER, placed)
    placed, state, first = step(placed, state, batch)
    placed, batch = jp.device_put(placed, BATCH)
    placed, state, second = step(placed, state, batch)
    _, _, third = step(placed, state, BATCH)
    assert float(third) < float(second) < float(first)


@pytest.mark.parametrize("pipeline", ["none", 2])
def test_a_module_and_its_state_come_back_whole(pipeline: Any) -> None:
    model = Stack(rngs())
    plan = pase.compile(squares, model, BATCH, devices=4, pipeline=pipeline, baselines=False, accumulate=2)
    (placed, *_) = plan.jax.device_put(model, BATCH)
    assert_alike(variables(plan.jax.gathered(placed)), variables(model))
    state = plan.jax.gathered(plan.jax.init(OPTIMIZER, placed))
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(state))


@pytest.mark.parametrize("made", [in_stages, in_replicas])
@pytest.mark.parametrize("name", ONE_PROGRAM)
def test_what_only_one_program_has_is_refused_by_name(made: Any, name: str) -> None:
    jp, params, _ = made()
    given = {"state_shardings": (OPTIMIZER,), "lower_train_step": (OPTIMIZER,), "restore": ("here",)}
    with pytest.raises(PaseError, match=rf"plan\.jax\.{name}: a plan in stages has none"):
        member = getattr(jp, name)
        member(*given.get(name, (params,) if name == "unpadded" else ()))


@pytest.mark.parametrize("made", [in_stages, in_replicas])
@pytest.mark.parametrize("what", ["loss", "value_and_grad", "check"])
def test_stages_have_one_lowering(made: Any, what: str) -> None:
    jp, params, batch = made()
    with pytest.raises(PaseError, match="stages are lowered manually"):
        if what == "check":
            jp.check(params, batch, lowering="annotated")
        else:
            getattr(jp, what)(lowering="annotated")


def test_padding_is_taken_away_from_parameters_and_from_nothing_else() -> None:
    params, *batch = arguments(62, 31, 61)
    plan = planned((params, *batch), uneven="padded", accumulate=2)
    assert plan.padding
    placed, *_ = plan.jax.device_put(params, *batch)
    back = plan.jax.gathered(placed)
    for name, mine in params.items():
        np.testing.assert_array_equal(back[name], mine)
    with pytest.raises(
        PaseError, match="takes padding away from trees with the structure of the parameters only"
    ):
        plan.jax.gathered(plan.jax.init(OPTIMIZER, placed))
