"""Programs other than a plain loss: aux, threaded state, modules, integers, keys, inference, the user's own step."""

from __future__ import annotations

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pase
from pase.errors import PaseError
from tests.command import run

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (32, 16))
PARAMS = {"w": jax.random.normal(KEY, (16, 16)) / 4, "count": jnp.int32(3), "key": jax.random.key(1)}


def with_statistics(p: Any, x: Any, stats: Any) -> Any:
    h = x @ p["w"] + 0.1 * jax.random.normal(p["key"], (16,))
    new = {"mean": 0.9 * stats["mean"] + 0.1 * jnp.mean(h, 0), "steps": stats["steps"] + 1}
    return jnp.mean((h - stats["mean"]) ** 2) / p["count"], {"stats": new, "largest": jnp.max(h)}


def test_statistics_are_threaded_and_what_is_not_trained_is_carried_along() -> None:
    optimizer, stats = optax.adam(1e-2), {"mean": jnp.zeros(16), "steps": jnp.int32(0)}
    plan = pase.compile(with_statistics, PARAMS, X, stats, devices=8, mesh="2x4", carry={1: (1, "stats")})
    step = plan.jax.train_step(optimizer)
    params, x, placed = plan.jax.device_put(PARAMS, X, stats)
    state = plan.jax.init(optimizer, params)
    wanted = []
    mine, kept = {"w": PARAMS["w"]}, {k: PARAMS[k] for k in ("count", "key")}
    plain, mean = optimizer.init(mine), stats
    for _ in range(3):
        (loss, aux), grads = jax.value_and_grad(lambda p, m: with_statistics(p | kept, X, m), has_aux=True)(
            mine, mean
        )
        updates, plain = optimizer.update(grads, plain)
        mine, mean = optax.apply_updates(mine, updates), aux["stats"]
        wanted.append((float(loss), float(aux["largest"])))
    got = []
    for _ in range(3):
        params, state, (loss, aux) = step(params, state, x, placed)
        placed = aux["stats"]
        got.append((float(loss), float(aux["largest"])))
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    np.testing.assert_allclose(params["w"], mine["w"], atol=1e-5)
    np.testing.assert_allclose(placed["mean"], mean["mean"], atol=1e-5)
    assert int(placed["steps"]) == 3 and int(params["count"]) == 3
    assert (jax.random.key_data(params["key"]) == jax.random.key_data(PARAMS["key"])).all()


def test_a_module_as_it_is_in_the_natural_loop() -> None:
    model = eqx.nn.MLP(16, 8, 32, 2, key=KEY)
    optimizer = optax.adam(1e-3)

    def loss(model: Any, x: Any) -> Any:
        return jnp.mean(jax.vmap(model)(x) ** 2)

    plan = pase.compile(loss, model, X, devices=8, mesh="2x4")
    step = plan.jax.train_step(optimizer, donate=False)
    trained, state = model, plan.jax.init(optimizer, model)
    losses = []
    for _ in range(3):
        trained, state, value = step(trained, state, X)
        losses.append(float(value))
    assert trained.activation is model.activation and losses[0] == pytest.approx(
        float(loss(model, X)), rel=1e-5
    )
    assert float(loss(trained, X)) < losses[-1] < losses[0]


@pytest.mark.parametrize("zero", [False, True])
def test_state_made_on_sharded_parameters(zero: bool) -> None:
    """optimizer.init(params) works on placed parameters, whether the plan splits state like them or further."""
    from bench.cases.plans import case_of

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)

    params = {"up": jnp.ones((16, 128)) / 9, "down": jnp.ones((128, 16)) / 7}
    plan = case_of(loss, params, X).plan("zero2" if zero else "ours@2x4")
    assert plan is not None
    optimizer = optax.adam(1e-2)
    step = plan.jax.train_step(optimizer)
    placed, x = plan.jax.device_put(params, X)
    state = optimizer.init(placed)
    for _ in range(2):
        placed, state, value = step(placed, state, x)
    assert float(value) < float(loss(params, X))


def decode(p: Any, cache: Any, token: Any) -> Any:
    cache = jnp.roll(cache, 1, 1).at[:, 0].set(token @ p["k"])
    weights = jax.nn.softmax(jnp.einsum("bd,btd->bt", token @ p["q"], cache))
    return jnp.einsum("bt,btd->bd", weights, cache) @ p["o"], cache


def test_inference_threads_its_cache() -> None:
    params = {n: jax.random.normal(jax.random.key(i), (64, 64)) / 8 for i, n in enumerate("kqo")}
    cache, token = jnp.zeros((16, 32, 64)), jax.random.normal(KEY, (16, 64))
    plan = pase.compile(decode, params, cache, token, devices=8, mode="inference", carry={0: 1})
    assert plan.memory.gradients == plan.memory.optimizer == 0
    assert not [c for c in plan.collectives if c.phase != "forward"]
    _, placed, _ = plan.jax.device_put(params, cache, token)
    plain = cache
    for _ in range(2):
        out, placed = plan.jax.apply(params, placed, token)
        wanted, plain = decode(params, plain, token)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    np.testing.assert_allclose(placed, plain, atol=1e-5)
    assert placed.sharding.is_equivalent_to(plan.jax.in_shardings()[1], 3)
    with pytest.raises(PaseError, match="mode='inference'"):
        plan.jax.train_step(optax.sgd(0.1))


def test_a_train_step_of_ones_own() -> None:
    optimizer = optax.adam(1e-2, eps=1e-3)

    def step(p: Any, state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2))(p)
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state, value

    params = {"up": jax.random.normal(KEY, (16, 64)) / 4, "down": jax.random.normal(KEY, (64, 16)) / 8}
    state = optimizer.init(params)
    plan = pase.compile(step, params, state, X, devices=8, mode="step", mesh="2x4")
    sharded = plan.jax.step(donate=False)
    got = wanted = (params, state)
    for _ in range(2):
        *got, value = sharded(*got, X)
        *wanted, plain = step(*wanted, X)
    assert float(value) == pytest.approx(float(plain), rel=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    with pytest.raises(PaseError, match="mode='step'"):
        pase.compile(step, params, state, X, devices=8)


def test_in_shardings_warn_where_they_stand_alone() -> None:
    params = {"up": jax.random.normal(KEY, (16, 64)) / 4, "down": jax.random.normal(KEY, (64, 16)) / 8}
    plan = pase.compile(
        lambda p, x: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2), params, X, devices=8, mesh="2x4"
    )
    with pytest.warns(UserWarning, match=r"plan\.jax\.value_and_grad\(\)"):
        stored, _ = plan.jax.in_shardings()
    plan.jax.device_put(params, X)  # says nothing
    graded = plan.jax.value_and_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan.jax.in_shardings()[0] == stored
        jax.jit(graded, in_shardings=plan.jax.in_shardings())(params, X)


def test_carry_and_chances_on_the_command_line() -> None:
    def compiled(carry: str, chance: str) -> tuple[int, str]:
        told = "compile tests.backends.jax.test_plan:made --devices 8 --mode inference --json"
        code, _, error = run(*told.split(), "--carry", carry, "--chance", chance)
        return code, error

    assert compiled("0=1", "cond0=0.9,0.1") == (0, "")
    for given, said in (
        (("0=1", "cond0=0.9"), "one chance per branch, 2 numbers"),
        (("0", "cond0=0.9,0.1"), "--carry 1=1"),
        (("0=0", "cond0=0.9,0.1"), "at (0,), is"),
    ):
        code, error = compiled(*given)
        assert code == 2 and said in error


def made() -> Any:
    def either(p: Any, cache: Any, token: Any) -> Any:
        return jax.lax.cond(token.sum() > 0, decode, lambda p, cache, token: (token, cache), p, cache, token)

    params = {n: jax.ShapeDtypeStruct((64, 64), "float32") for n in "kqo"}
    return (
        either,
        params,
        jax.ShapeDtypeStruct((16, 32, 64), "float32"),
        jax.ShapeDtypeStruct((16, 64), "float32"),
    )


def test_a_step_of_one_train_state_is_the_unsharded_one():
    """Flax's TrainState has parameters, optimizer state and a counter in one."""
    import flax.linen as nn
    from flax.training.train_state import TrainState

    model, x = nn.Dense(16), jnp.linspace(-1, 1, 32 * 16).reshape(32, 16)
    params = model.init(jax.random.key(0), x)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

    def step(state, x):
        def loss(p):
            return jnp.mean((state.apply_fn({"params": p}, x) - x) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    plan = pase.compile(step, state, x, devices=8, mode="step", mesh="data=4,model=2", baselines=False)
    assert {"params.kernel", "opt_state.0.mu.kernel", "step"} <= plan.parameters.keys()
    sharded, got, wanted = plan.jax.step(donate=False), state, state
    for _ in range(2):
        (got, value), (wanted, plain) = sharded(got, x), step(wanted, x)
    assert isinstance(got, TrainState) and int(got.step) == 2
    assert float(value) == pytest.approx(float(plain), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got.params, wanted.params)
    alone = pase.compile(lambda s, x: step(s, x)[0], state, x, devices=8, mode="step", baselines=False)
    assert isinstance(alone.jax.step(donate=False)(state, x), TrainState)
    with pytest.raises(PaseError) as e:
        pase.compile(lambda s, x: step(s, x)[1], state, x, devices=8, mode="step")
    assert "TrainState" in e.value.what and "step(state" in e.value.fix


@pytest.mark.parametrize("form", ["dict", "pair", "alone"])
def test_a_step_with_one_state_of_any_structure(form: str) -> None:
    """A dict of the user's own, a pair, as of a split NNX model and optimizer, and a state that is all it returns."""
    tx = optax.adam(1e-2)
    w, x, y = jnp.full((8, 4), 0.1), jnp.ones((16, 8)), jnp.zeros((16, 4))

    def opened(state: Any) -> tuple[Any, Any]:
        return (state["w"], state["opt"]) if form == "dict" else state

    def step(state: Any, x: Any, y: Any) -> Any:
        w, opt = opened(state)
        loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        updates, opt = tx.update(g, opt, w)
        w = optax.apply_updates(w, updates)
        new = {"w": w, "opt": opt} if form == "dict" else (w, opt)
        return new if form == "alone" else (new, {"loss": loss})

    state: Any = {"w": w, "opt": tx.init(w)} if form == "dict" else (w, tx.init(w))
    plan = pase.compile(step, state, x, y, devices=8, mode="step", mesh="data=8")
    run, want, got = plan.jax.step(), state, state
    for _ in range(2):
        want = step(want, x, y) if form == "alone" else step(want, x, y)[0]
        got = run(got, x, y) if form == "alone" else run(got, x, y)[0]
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert sum(t.role == "parameter" for t in plan.graph.tensors.values()) == len(jax.tree.leaves(state))


def test_an_optimizer_state_that_changes_is_no_batch() -> None:
    """The second argument is no batch although its next value differs, because what is returned is no scalar."""

    def step(w: Any, opt: Any, x: Any) -> Any:
        return w - opt * jnp.mean(x), (opt * 2).astype(jnp.bfloat16), jnp.mean(x)

    with pytest.raises(pase.PaseError, match="its next value, which the function returns at"):
        pase.compile(step, jnp.ones((8, 4)), jnp.ones((8, 4)), jnp.ones((16,)), devices=8, mode="step")


def test_a_wrong_number_in_carry_is_named() -> None:
    """The state is argument 0 after the parameters, not 1."""
    with pytest.raises(pase.PaseError) as e:
        pase.compile(
            lambda p, state, x: (jnp.mean(x @ p) + state["sum"], {"sum": state["sum"] + 1}),
            *(jnp.ones((8, 8)), {"sum": jnp.float32(0)}, jnp.ones((8, 8))),
            devices=8,
            carry={1: 1},
        )
    assert e.value.where == "argument 2" and "it counts arguments after the parameters, from 0" in e.value.fix


def test_on_one_device_the_step_is_the_program_as_it_is_written() -> None:
    """It has the equations of the plain step and gives its numbers; a recomputed or a placed program is walked."""

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ p["w"]) ** 2)

    w = {"w": PARAMS["w"]}
    plan = pase.compile(loss, w, X, devices=1)
    assert plan.jax.as_written
    mine = jax.make_jaxpr(plan.jax.value_and_grad())(w, X)
    plain = jax.make_jaxpr(jax.value_and_grad(loss))(w, X)
    assert len(mine.jaxpr.eqns) == len(plain.jaxpr.eqns)
    optimizer, state, plain_w, plain_state = optax.adam(1e-2), plan.jax.init(optax.adam(1e-2), w), w, None
    step, params = plan.jax.train_step(optimizer), plan.jax.device_put(w, X)[0]
    plain_state = optimizer.init(plain_w)
    for _ in range(3):
        params, state, value = step(params, state, X)
        wanted, grads = jax.value_and_grad(loss)(plain_w, X)
        updates, plain_state = optimizer.update(grads, plain_state)
        plain_w = optax.apply_updates(plain_w, updates)
        assert float(value) == pytest.approx(float(wanted), rel=1e-6)
    assert not pase.compile(loss, w, X, devices=8).jax.as_written

    mesh = jax.make_mesh((1,), ("mine",), axis_types=(jax.sharding.AxisType.Auto,))

    def placed(p: Any, x: Any) -> Any:
        there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("mine"))
        return loss(p, jax.lax.with_sharding_constraint(x, there))

    assert not pase.compile(placed, w, X, devices=1).jax.as_written
