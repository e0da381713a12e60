"""Equations that read one value several times, each time in another layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bench.cases.plans import case_of
from pase.backends.audit.xla import compare, sharded_step, unsharded_step


def gram(y):
    return jnp.einsum("si,sj->ij", y, y)


@jax.custom_vjp
def product(a, b):
    return a.T @ b


product.defvjp(lambda a, b: (a.T @ b, (a, b)), lambda kept, g: (kept[1] @ g.T, kept[0] @ g))


def of_a_rule(y):
    return product(y, y)


def over_a_loop(y):
    """Rows that each iteration reads twice."""
    return jax.lax.scan(
        lambda total, rows: (total + jnp.outer(rows[0], rows[1]), None), jnp.zeros((8, 8)), (y, y)
    )[0]


def in_a_branch(y):
    return jax.lax.cond(y.sum() > 0, lambda a, b: a.T @ b, lambda a, b: -a.T @ b, y, y)


def stacked(y):
    return jnp.concatenate([y, y, y]) @ y.T


@pytest.mark.some(5)
@pytest.mark.parametrize("lowering", ["auto", "annotated"])
@pytest.mark.parametrize("pattern", [gram, of_a_rule, over_a_loop, in_a_branch, stacked])
def test_each_operand_has_its_own_layout(pattern, lowering):
    def loss(p, x):
        made = pattern(x @ p)
        return jnp.mean(jnp.sin(made) * jnp.arange(made.size).reshape(made.shape))

    with jax.enable_x64(True):
        p, x = np.random.default_rng(0).normal(size=(2, 8, 8))
        case, whole = case_of(loss, p, x), unsharded_step(loss, optax.sgd(0.1), p, x)
        for strategy in ("random1@2x4", "random2@2x4"):
            step = sharded_step(case.plan(strategy), optax.sgd(0.1), p, x, lowering=lowering)
            assert max(whole.differences(step).values()) < 1e-12, strategy


@pytest.mark.some(1)
@pytest.mark.parametrize("lowering", ["auto", "annotated"])
def test_a_network_with_one_output_is_called_twice(lowering):
    """As critics are: its last bias has one element and is viewed by each call. One call's result is not needed."""

    def net(p, x):
        return (jnp.tanh(x @ p["w"] + p["c"]) @ p["v"] + p["b"].reshape(1, 1))[:, 0]

    def critic(p, x):
        return jnp.mean(net(p, x) ** 2) - jnp.mean(jnp.sin(net(p, -x)))

    def penalised(p, x):
        slopes = jax.vmap(jax.grad(lambda row: net(p, row[None])[0]))(x)
        return jnp.mean(net(p, x) ** 2) + jnp.mean((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2)

    def unused(p, x):
        jnp.sin(net(p, -x))
        return jnp.mean(net(p, x) ** 2)

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        p = {
            "w": rng.normal(size=(4, 8)),
            "c": rng.normal(size=8),
            "v": rng.normal(size=(8, 1)),
            "b": np.ones(1),
        }
        x = rng.normal(size=(16, 4))
        for loss in (critic, penalised, unused):
            case, whole = case_of(loss, p, x), unsharded_step(loss, optax.sgd(0.1), p, x)
            for strategy in ("ours@8", "random1@2x4", "random2@2x4"):
                step = sharded_step(case.plan(strategy), optax.sgd(0.1), p, x, lowering=lowering)
                assert max(whole.differences(step).values()) < 1e-12, (loss.__name__, strategy)


def test_a_gram_matrix_is_lowered_by_hand():
    def loss(p, x):
        return jnp.sum(jnp.sin(gram(x @ p)))

    with jax.enable_x64(True):
        p, x = np.random.default_rng(0).normal(size=(2, 8, 8))
        case, right = case_of(loss, p, x), loss(p, x)
        for seed in range(1, 6):
            got = case.plan(f"random{seed}@2x4").jax.loss(lowering="manual")(p, x)
            assert abs(got - right) < 1e-12, seed


@pytest.mark.parametrize("strategy", ["data_parallel", "fsdp"])
def test_gradients_of_a_value_and_of_its_cast_are_summed_once(strategy):
    """A tied embedding: the look-up reads it as it is, the logits read it cast. Both lowerings keep the numbers, and
    the manual one sends exactly the plan's list."""

    def loss(p, ids):
        logits = jnp.sin(p[ids]).astype(jnp.float32) @ p.astype(jnp.float32).T
        return -jnp.mean(jax.nn.log_softmax(logits) * (ids[..., None] == jnp.arange(len(p))))

    with jax.enable_x64(True):
        p, ids = np.random.default_rng(0).normal(size=(16, 8)), np.arange(32).reshape(8, 4) % 16
        plan, whole = case_of(loss, p, ids).plan(strategy), unsharded_step(loss, optax.sgd(0.1), p, ids)
        (back,) = [c for c in plan.collectives if c.nbytes == p.nbytes and c.phase == "backward"]
        assert back.kind in ("all_reduce", "reduce_scatter")
        for lowering in ("manual", "annotated"):
            step = sharded_step(plan, optax.sgd(0.1), p, ids, lowering=lowering)
            assert max(whole.differences(step).values()) < 1e-6
            if lowering == "manual":
                assert all(row.compiled == row.predicted for row in compare(plan, step.compiled, lowering))
