"""Flax NNX modules under a plan: over ten steps, parameters and all other Variables are those of nnx.jit."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import pase
from bench.cases.plans import case_of
from pase.errors import Infeasible, PaseError
from tests.backends.jax.nnx_models import (
    BATCH,
    HIDDEN,
    OPTIMIZER,
    PROGRAMS,
    WIDTH,
    Dropped,
    Layer,
    Recomputed,
    X,
    assert_alike,
    rngs,
    squares,
    unsharded,
    variables,
)

STEPS = 10


@cache
def wanted(name: str) -> tuple[list[float], dict[str, np.ndarray]]:
    """(losses, all Variables after the last step)."""
    loss, make = PROGRAMS[name]
    args = make()
    losses = unsharded(loss, args, STEPS)
    return losses, variables(*args[:-1])


def stepped(plan: Any, args: tuple[Any, ...], steps: int = STEPS, **how: Any) -> tuple[Any, list[float]]:
    """(arguments after the steps, losses) of steps under the plan."""
    step = plan.jax.train_step(OPTIMIZER, **how)
    model, *rest = plan.jax.device_put(*args)
    state = plan.jax.init(OPTIMIZER, model)
    losses = []
    for _ in range(steps):
        model, state, value = step(model, state, *rest)
        losses.append(float(value[0] if isinstance(value, tuple) else value))
    return (model, *rest), losses


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("name", "strategy", "lowering"),
    [
        ("everything", "ours@2x4", "manual"),
        ("everything", "ours@2x4", "annotated"),
        ("everything", "random1@2x2x2", "manual"),
        ("everything", "data_parallel", "manual"),
        ("decoder", "random2@2x4", "manual"),
        ("distilled", "random3@2x4", "auto"),
        pytest.param("decoder", "ours@2x4", "annotated", marks=pytest.mark.release),
        pytest.param("scanned", "ours@2x4", "manual", marks=pytest.mark.release),
        pytest.param("scanned", "random4@2x4", "annotated", marks=pytest.mark.release),
    ],
)
def test_ten_steps_are_those_of_nnx_jit(name: str, strategy: str, lowering: str) -> None:
    loss, make = PROGRAMS[name]
    plan = case_of(loss, *make()).plan(strategy)
    assert plan is not None and any(c.nbytes > 4 for c in plan.collectives), "this plan moves no data"
    args, losses = stepped(plan, make(), lowering=lowering)
    expected, state = wanted(name)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert_alike(variables(*args[:-1]), state)


@pytest.mark.some(1)
@pytest.mark.parametrize("lowering", ["manual", "annotated"])
def test_state_goes_through_micro_batches_in_order(lowering: str) -> None:
    args = Dropped(rngs()), BATCH
    expected = unsharded(squares, args, 3, parts=2)
    plan = pase.compile(squares, Dropped(rngs()), BATCH, devices=8, mesh="2x4", accumulate=2)
    got, losses = stepped(plan, (Dropped(rngs()), BATCH), 3, lowering=lowering)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert_alike(variables(got[0]), variables(args[0]))


def test_layers_that_a_loop_hands_on_run_in_micro_batches() -> None:
    args = Recomputed(rngs()), BATCH
    expected = unsharded(squares, args, 3)
    plan = pase.compile(squares, Recomputed(rngs()), BATCH, devices=8, mesh="2x4", accumulate=2)
    got, losses = stepped(plan, (Recomputed(rngs()), BATCH), 3)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert_alike(variables(got[0]), variables(args[0]))


def test_batch_statistics_are_not_those_of_parts_of_the_batch() -> None:
    with pytest.raises(PaseError, match="micro-batches"):
        pase.compile(squares, Layer(rngs()), BATCH, devices=8, accumulate=2)


def test_a_step_as_the_guides_write_it() -> None:
    """plan.jax.value_and_grad() in place of nnx.value_and_grad, with nnx.Optimizer, under nnx.jit."""
    loss, make = PROGRAMS["everything"]
    model, batch = make()
    plan = case_of(loss, *make()).plan("ours@2x4")
    assert plan is not None
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    graded = plan.jax.value_and_grad()

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        value, grads = graded(model, batch)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer, batch)) for _ in range(STEPS)]
    expected, state = wanted("everything")
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert_alike(variables(model), state)


def test_the_model_is_updated_in_place_and_the_plan_keeps_no_state(tmp_path: Path) -> None:
    """A saved and loaded plan accepts the user's model and an optimizer state that was made from its Variables."""
    args = Dropped(rngs()), BATCH
    expected = unsharded(squares, args, 4)
    plan = pase.compile(squares, Dropped(rngs()), BATCH, devices=8, mesh="2x4")
    plan.save(tmp_path / "layout.json")
    model = Dropped(rngs())
    state = OPTIMIZER.init(nnx.state(model, nnx.Param))
    losses = []
    for _ in range(2):
        plan = pase.load(tmp_path / "layout.json").bind(squares, model, BATCH)
        step = plan.jax.train_step(OPTIMIZER)
        (model,) = plan.jax.device_put(model)
        for _ in range(2):
            same, state, value = step(model, state, BATCH)
            losses.append(float(value))
            assert same is model
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert_alike(variables(model), variables(args[0]))
    assert jax.tree.structure(state) == jax.tree.structure(OPTIMIZER.init(nnx.state(model, nnx.Param)))


def test_the_loss_updates_the_model_and_can_be_differentiated_by_nnx() -> None:
    model, other = Dropped(rngs()), Dropped(rngs())
    plan = case_of(squares, model, BATCH).plan("ours@2x4")
    assert plan is not None
    value, grads = nnx.value_and_grad(squares)(other, BATCH)
    got, mine = nnx.value_and_grad(plan.jax.loss())(model, BATCH)
    assert float(got) == pytest.approx(float(value), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), mine, grads)
    assert jax.tree.structure(mine) == jax.tree.structure(grads)
    assert_alike(variables(model), variables(other))


def test_what_is_not_trained_has_no_gradient_and_no_decay() -> None:
    """Batch statistics are floats but not parameters. Evaluation writes nothing."""

    def loss(model: Any, x: Any) -> Any:
        return jnp.mean(model(x) ** 2)

    model = Layer(rngs())
    plan = pase.compile(loss, model, X, devices=8, mesh="8")
    assert "norm.mean" not in plan.parameters and "inner.kernel" in plan.parameters
    optimizer = optax.adamw(1e-2, eps=1e-3, weight_decay=0.5)
    (placed,) = plan.jax.device_put(model)
    step, state = plan.jax.train_step(optimizer), plan.jax.init(optimizer, placed)
    step(placed, state, X)
    other, tx = Layer(rngs()), nnx.Optimizer(Layer(rngs()), optimizer, wrt=nnx.Param)
    _, grads = nnx.value_and_grad(loss)(other, X)
    tx.update(other, grads)
    assert_alike(variables(placed), variables(other))
    assert int(model.count[...]) == 0, "device_put makes a new model"


class Decoding(nnx.Module):
    """A model with a cache, which each call advances."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(HIDDEN, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=True, rngs=rngs)

    def __call__(self, token: Any) -> Any:
        return self.embed.attend(self.attention(self.embed(token)))


def test_a_cache_is_advanced_by_inference() -> None:
    def made() -> Any:
        model = Decoding(nnx.Rngs(0))
        model.attention.init_cache((8, 6, WIDTH))
        return model

    def decode(model: Any, token: Any) -> Any:
        return model(token)

    plan = pase.compile(decode, made(), jnp.zeros((8, 1), jnp.int32), devices=8, mesh="2x4", mode="inference")
    model, other = made(), made()
    token = jnp.arange(8, dtype=jnp.int32)[:, None]
    for _ in range(3):
        got, expected = plan.jax.apply(model, token), other(token)
        np.testing.assert_allclose(got, expected, atol=1e-5)
        token = expected.argmax(-1).astype(jnp.int32)
    assert_alike(variables(model), variables(other))


def test_a_checkpoint_of_the_model_is_read_into_the_layouts(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    plan = pase.compile(squares, Dropped(rngs()), BATCH, devices=8, mesh="2x4")
    (model, _), _ = stepped(plan, (Dropped(rngs()), BATCH), 2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.state(model))
    assert_alike(variables(plan.jax.restore(tmp_path / "model")), variables(model))


def _mode(model: Any, batch: Any) -> Any:
    model.eval()
    return squares(model, batch)


def _sown(model: Any, batch: Any) -> Any:
    model.sow(nnx.Intermediate, "seen", batch["x"].mean())
    return squares(model, batch)


def _widened(model: Any, batch: Any) -> Any:
    model.count.set_value(model.count[...] + 0.5)
    return squares(model, batch)


def _returned(model: Any, batch: Any) -> Any:
    return squares(model, batch), model


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (_mode, "_mode.*deterministic"),
        (_sown, "_sown.*seen"),
        (_widened, "count.*int32.*float32"),
        (_returned, "_returned"),
    ],
)
def test_what_a_plan_cannot_hand_on_is_refused(loss: Any, named: str) -> None:
    with pytest.raises(PaseError, match=named):
        pase.compile(loss, Dropped(rngs()), BATCH, devices=8)


def test_a_model_in_another_mode_is_refused() -> None:
    model = Dropped(rngs())
    plan = pase.compile(squares, model, BATCH, devices=8, mesh="8")
    model.eval()
    with pytest.raises(PaseError, match="deterministic"):
        plan.jax.train_step(OPTIMIZER)(model, plan.jax.init(OPTIMIZER, Dropped(rngs())), BATCH)
    with pytest.raises(PaseError) as e:
        plan.jax.train_step(nnx.Optimizer(Dropped(rngs()), OPTIMIZER, wrt=nnx.Param))
    assert e.value.where == "optimizer" and "give tx" in e.value.fix
    with pytest.raises(Infeasible, match="stages"):
        pase.compile(squares, model, BATCH, devices=8, pipeline=2, baselines=False)


def test_a_train_step_of_modules_updates_model_and_optimizer() -> None:
    """As Flax documents it: step(model, optimizer, batch). The reference is nnx.jit of the same step."""

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

    def made() -> tuple[Any, Any]:
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        def loss(m: Any) -> Any:
            return jnp.mean((m.down(nnx.relu(m.up(x))) - x) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    x, (model, optimizer), (alone, its) = jnp.linspace(-1, 1, 32 * 16).reshape(32, 16), made(), made()
    plan = pase.compile(step, model, optimizer, x, devices=8, mode="step", baselines=False)
    model, optimizer, x = plan.jax.device_put(model, optimizer, x)
    for _ in range(3):
        assert float(plan.jax.apply(model, optimizer, x)) == pytest.approx(
            float(nnx.jit(step)(alone, its, x))
        )
    assert int(optimizer.step[...]) == 3
    for a, b in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(alone)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    with pytest.raises(PaseError, match="writes no Variable"):
        pase.compile(lambda m, x: jnp.mean(m.up(x) ** 2), alone, x, devices=8, mode="step")
