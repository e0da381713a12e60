"""Stages read sums over the whole batch that depend on no parameter, such as the number of tokens that count."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pase
from pase.errors import PaseError
from pase.frontends.registry import NotInParts
from pase.plan.pipeline import ReplicaPlan
from tests.compiler.stages.groups import machine

RNG = np.random.default_rng(0)
WORDS, WIDTH, LAYERS = 12, 8, 4
PARAMS = {
    "table": RNG.normal(size=(WORDS, WIDTH)),
    "layers": RNG.normal(size=(LAYERS, WIDTH, WIDTH)) / 3,
    "out": RNG.normal(size=(WIDTH, WORDS)) / 3,
}
IDS = RNG.integers(0, WORDS, (16, 6))
LABELS = np.where(np.random.default_rng(1).random((16, 6)) < 0.4, -100, RNG.integers(0, WORDS, (16, 6)))
SCHEDULES = {
    "1f1b": {"stage_schedule": "1f1b"},
    "zb-h1": {"stage_schedule": "zb-h1"},
    "circular": {"stage_schedule": "circular"},
    "recomputed": {"stage_schedule": "gpipe", "remat": "all"},
}

pytestmark = pytest.mark.usefixtures("double")


def layer(x, w):
    return x + jnp.tanh(x @ w)


def losses(params, x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["out"], jnp.maximum(labels, 0))


def scanned(params, ids):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), params["table"][ids], params["layers"])[0]


def with_penalties(params, ids, labels):
    """Terms that combine as a mean by a count, as a mean over the tokens, and that are equal in every micro-batch."""
    x, on = scanned(params, ids), labels >= 0
    whole = (params["table"] ** 2).sum() + (params["out"] ** 2).sum()
    return jnp.mean(losses(params, x, labels), where=on) + 1e-2 * (x**2).mean() + 1e-3 * whole


def summed(params, ids, labels):
    return losses(params, scanned(params, ids), labels).sum()


def in_each_layer(params, ids, labels):
    """Stages that are not the last read the count, too, and each layer makes it again."""
    x = params["table"][ids] / (labels >= 0).sum()
    for w in params["layers"]:
        x = x + jnp.tanh(x @ w) * 20 / (labels >= 0).sum()
    return jnp.mean(losses(params, x, labels), where=labels >= 0)


def by_class(params, ids, labels):
    """The totals have a dim: the number of tokens of each word."""
    on = (labels >= 0) * 1.0
    words = (jax.nn.one_hot(jnp.maximum(labels, 0), WORDS) * on[..., None]).sum((0, 1))
    weights = (1 / (1 + words))[jnp.maximum(labels, 0)] * on
    return (losses(params, scanned(params, ids), labels) * weights).sum() / on.sum()


def in_chunks(params, ids, labels):
    """A loop over parts of the sequences carries the count."""

    def chunk(so_far, given):
        x, labels = given
        total, count = so_far
        on = labels >= 0
        return (total + (losses(params, x, labels) * on).sum(), count + on.sum()), None

    parts = [
        x.reshape(-1, 3, 2, *x.shape[2:]).swapaxes(0, 1) for x in (scanned(params, ids), jnp.asarray(labels))
    ]
    total, count = jax.lax.scan(jax.checkpoint(chunk), (0.0, 0), tuple(parts))[0]
    return total / count


def matches(found, right):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert np.asarray(a) == pytest.approx(np.asarray(b), rel=1e-10, abs=1e-12)


def graded(plan, *args):
    value, gradients = plan.jax.value_and_grad()(*plan.jax.device_put(*args))
    return value, plan.jax.gathered(gradients)


@pytest.mark.some(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("loss", [with_penalties, summed, by_class, in_each_layer, in_chunks])
def test_the_step_is_that_of_the_whole_batch(loss, schedule):
    if loss in (in_each_layer, in_chunks) and schedule in ("circular", "recomputed"):
        return  # its layers are no single loop
    right = jax.value_and_grad(loss)(PARAMS, IDS, LABELS)
    plan = pase.compile(loss, PARAMS, IDS, LABELS, devices=4, pipeline=2, accumulate=4, **SCHEDULES[schedule])
    matches(graded(plan, PARAMS, IDS, LABELS), right)


def test_a_penalty_on_the_layers_is_left_to_schedules_that_can_run_it():
    """The last stage reads all layers' weights, so that no one program runs all stages."""

    def loss(params, ids, labels):
        return with_penalties(params, ids, labels) + (params["layers"] ** 2).sum()

    plan = pase.compile(loss, PARAMS, IDS, LABELS, devices=8, pipeline=4, accumulate=8)
    assert plan.pipeline.schedule != "circular"
    with pytest.warns(UserWarning, match="several stages read layers"):
        found = graded(plan, PARAMS, IDS, LABELS)
    matches(found, jax.value_and_grad(loss)(PARAMS, IDS, LABELS))


def test_totals_of_random_numbers_are_those_of_the_whole_batch():
    def loss(params, ids, labels, key):
        on = jax.random.bernoulli(key, 0.5, ids.shape) * 1.0
        return (losses(params, scanned(params, ids), labels) * on).sum() / on.sum()

    args = (PARAMS, IDS, LABELS, jax.random.key(3))
    plan = pase.compile(loss, *args, devices=4, pipeline=2, accumulate=4)
    matches(graded(plan, *args), jax.value_and_grad(loss)(*args))


def test_a_total_beside_the_loss_is_the_micro_batchs_own():
    def loss(params, ids, labels):
        each, count = losses(params, scanned(params, ids), labels), (labels >= 0).sum()
        return jnp.where(labels >= 0, each, 0).sum() / count, {"count": count}

    for schedule in ("1f1b", "circular"):
        plan = pase.compile(
            loss, PARAMS, IDS, LABELS, devices=4, pipeline=2, accumulate=4, stage_schedule=schedule
        )
        (value, beside), _ = graded(plan, PARAMS, IDS, LABELS)
        assert float(value) == pytest.approx(float(loss(PARAMS, IDS, LABELS)[0]), rel=1e-12)
        assert beside["count"].tolist() == [int((LABELS[i::4] >= 0).sum()) for i in range(4)]


@pytest.mark.some(1)
@pytest.mark.parametrize("schedule", ["1f1b", "circular"])
def test_it_is_checked_against_the_whole_batch(schedule):
    plan = pase.compile(
        with_penalties, PARAMS, IDS, LABELS, devices=4, pipeline=2, accumulate=4, stage_schedule=schedule
    )
    found = plan.jax.check(*plan.jax.device_put(PARAMS, IDS, LABELS))
    found.raise_if_off()
    assert "against the unsharded step: loss" in str(found)


def test_replicas_take_the_mean_so_that_others_are_searched():
    """On unequal devices, a loss that is a mean may run as replicas, and one that is not runs in stages."""

    def scaled(params, ids, labels, scale):
        on = (labels >= 0) * 1.0
        return (losses(params, scanned(params, ids), labels) * on).sum(1).mean() * scale

    asked = {"devices": 4, "machine": machine(), "pipeline": "auto", "accumulate": 8}
    plan = pase.compile(summed, PARAMS, IDS, LABELS, **asked)
    assert not plan.pipeline.replicas
    p, sizes = plan.pipeline, dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    alone = ReplicaPlan(group="all", micro_batches=8, step_s=1.0, mesh=sizes, pipeline=p)
    with pytest.raises(PaseError, match="replicas take the mean"):
        _ = replace(plan, pipeline=replace(p, replicas=(alone, alone))).jax
    # What the error of a step that takes the mean says to write is the mean by the count.
    scale = len(IDS) / (LABELS >= 0).sum()
    right = jax.value_and_grad(
        lambda params: jnp.mean(losses(params, scanned(params, IDS), LABELS), where=LABELS >= 0)
    )(PARAMS)
    matches(jax.value_and_grad(scaled)(PARAMS, IDS, LABELS, scale), right)


def test_only_replicas_are_left_to_refuse():
    from pase.compiler.problem.variants import check_replicas

    plan = pase.compile(with_penalties, PARAMS, IDS, LABELS, devices=1, accumulate=4)
    with pytest.raises(NotInParts, match="of which a micro-batch has only its own part") as e:
        check_replicas(plan.traced, 4)
    assert "(losses * weights).sum(1).mean() * scale" in e.value.fix
