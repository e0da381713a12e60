"""Micro-batches read sums over the whole batch that depend on no parameter, such as the number of tokens that count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pase
from pase.errors import PaseError
from pase.frontends.registry import NotInParts

RNG = np.random.default_rng(0)
WORDS, WIDTH = 12, 8
PARAMS = {
    "table": RNG.normal(size=(WORDS, WIDTH)).astype("f"),
    "up": (RNG.normal(size=(WIDTH, 4 * WIDTH)) / 3).astype("f"),
    "down": (RNG.normal(size=(4 * WIDTH, WORDS)) / 3).astype("f"),
}
IDS = RNG.integers(0, WORDS, (16, 6))
LABELS = np.where(np.random.default_rng(1).random((16, 6)) < 0.4, -100, RNG.integers(0, WORDS, (16, 6)))


def scores(params, ids):
    return jnp.tanh(params["table"][ids] @ params["up"]) @ params["down"]


def losses(params, ids, labels):
    told = jnp.take_along_axis(scores(params, ids), jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(scores(params, ids), axis=-1) - told


def counted(params, ids, labels):
    on = labels >= 0
    return jnp.where(on, losses(params, ids, labels), 0).sum() / on.sum()


def with_penalties(params, ids, labels):
    """Terms that combine as a mean by a count, as a mean over the tokens, and that are equal in every micro-batch."""
    whole = sum((x**2).sum() for x in jax.tree.leaves(params))
    return counted(params, ids, labels) + 1e-2 * (scores(params, ids) ** 2).mean() + 1e-3 * whole


def by_class(params, ids, labels):
    """The totals have a dim: the number of tokens of each word."""
    on = (labels >= 0) * 1.0
    words = (jax.nn.one_hot(jnp.maximum(labels, 0), WORDS) * on[..., None]).sum((0, 1))
    weights = (1 / (1 + words))[jnp.maximum(labels, 0)] * on
    return (losses(params, ids, labels) * weights).sum() / on.sum()


def of_means(params, ids, labels):
    on = (labels >= 0) * 1.0
    return (losses(params, ids, labels) * on).mean() / on.mean()


def recomputed(params, ids, labels):
    return jax.jit(jax.checkpoint(counted))(params, ids, labels)


def in_chunks(params, ids, labels):
    """A loop over parts of the sequences carries the count."""

    def chunk(so_far, given):
        ids, labels = given
        on = labels >= 0
        total, count = so_far
        return (total + (losses(params, ids, labels) * on).sum(), count + on.sum()), None

    parts = [x.reshape(-1, 3, 2).swapaxes(0, 1) for x in (ids, labels)]
    total, count = jax.lax.scan(jax.checkpoint(chunk), (0.0, 0), tuple(parts))[0]
    return total / jnp.maximum(count, 1)


def of_chunks(params, ids, labels):
    """A loop returns the counts of all parts; the loss is the mean of their own means."""

    def chunk(given):
        ids, labels = given
        return (losses(params, ids, labels) * (labels >= 0)).sum(), (labels >= 0).sum()

    totals, counts = jax.lax.map(chunk, tuple(x.reshape(-1, 3, 2).swapaxes(0, 1) for x in (ids, labels)))
    return (totals / counts).mean()


def matches(found, right):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert np.asarray(a) == pytest.approx(np.asarray(b), rel=1e-4, abs=1e-5)


@pytest.mark.some(1)
@pytest.mark.parametrize("once", ["none", "gathers", "all", "annotated"])
@pytest.mark.parametrize(
    "loss", [counted, with_penalties, by_class, of_means, recomputed, in_chunks, of_chunks]
)
def test_the_step_is_that_of_the_whole_batch(loss, once):
    right = jax.value_and_grad(loss)(PARAMS, IDS, LABELS)
    annotated = {} if once != "annotated" else {"lowering": "annotated"}
    for devices in (1, 4):
        plan = pase.compile(
            loss, PARAMS, IDS, LABELS, devices=devices, accumulate=4, once="none" if annotated else once
        )
        assert plan.accumulate == 4
        found = plan.jax.value_and_grad(**annotated)(*plan.jax.device_put(PARAMS, IDS, LABELS))
        matches(found, right)


def test_a_total_that_the_program_does_not_make_is_a_defect():
    """Readers would take the micro-batch's own for it, in silence."""
    plan = pase.compile(with_penalties, PARAMS, IDS, LABELS, devices=1, accumulate=4)
    plan.jax.check_found(plan.jax.sums.totals)
    with pytest.raises(PaseError, match="never makes the sums over the batch"):
        plan.jax.check_found([])


def test_totals_of_random_numbers_are_those_of_the_whole_batch():
    def loss(params, ids, labels, key):
        on = jax.random.bernoulli(key, 0.5, ids.shape) * 1.0
        return (losses(params, ids, jnp.maximum(labels, 0)) * on).sum() / on.sum()

    args = (PARAMS, IDS, LABELS, jax.random.key(3))
    right = jax.value_and_grad(loss)(*args)
    for once in ("none", "all"):
        plan = pase.compile(loss, *args, devices=2, accumulate=4, once=once)
        matches(plan.jax.value_and_grad()(*plan.jax.device_put(*args)), right)


def test_it_is_checked_against_the_whole_batch():
    plan = pase.compile(counted, PARAMS, IDS, LABELS, devices=2, accumulate=4)
    found = plan.jax.check(*plan.jax.device_put(PARAMS, IDS, LABELS))
    found.raise_if_off()
    assert "unsharded" in str(found)


def test_a_total_beside_the_loss_is_the_micro_batchs_own():
    def loss(params, ids, labels):
        count = (labels >= 0).sum()
        total = jnp.where(labels >= 0, losses(params, ids, labels), 0).sum()
        return total / count, {"count": count, "total": total}

    plan = pase.compile(loss, PARAMS, IDS, LABELS, devices=2, accumulate=4)
    (value, beside), _ = plan.jax.value_and_grad()(*plan.jax.device_put(PARAMS, IDS, LABELS))
    each = [loss(PARAMS, IDS[i::4], LABELS[i::4])[1] for i in range(4)]
    assert float(value) == pytest.approx(float(loss(PARAMS, IDS, LABELS)[0]), rel=1e-5)
    for name in ("count", "total"):
        assert np.asarray(beside[name]) == pytest.approx(np.array([e[name] for e in each]), rel=1e-4)


@pytest.mark.parametrize("of", [counted, with_penalties])
def test_what_depends_on_a_sum_of_the_losss_beside_it_is_refused(of):
    def loss(params, ids, labels):
        mean = of(params, ids, labels)
        return mean, {"mean": mean}

    with pytest.raises(NotInParts, match=r"the result \[1\]\['mean'\] is returned beside the loss") as e:
        pase.compile(loss, PARAMS, IDS, LABELS, devices=1, accumulate=4)
    assert "compute it of what the micro-batches return" in e.value.fix


def test_what_only_other_results_read_is_each_micro_batchs_own():
    """Neither a count that the loss does not read is summed, nor a sum of unlike terms scaled."""

    def loss(params, ids, labels):
        on, each = (labels >= 0) * 1.0, losses(params, ids, labels)
        whole = sum((x**2).sum() for x in jax.tree.leaves(params))
        return each.mean(), {"mean": (each * on).sum() / on.sum(), "sum": each.sum() + whole}

    right = jax.value_and_grad(loss, has_aux=True)(PARAMS, IDS, LABELS)
    plan = pase.compile(loss, PARAMS, IDS, LABELS, devices=2, accumulate=4)
    (value, beside), gradients = plan.jax.value_and_grad()(*plan.jax.device_put(PARAMS, IDS, LABELS))
    matches((value, gradients), (right[0][0], right[1]))
    own = [loss(PARAMS, IDS[i::4], LABELS[i::4])[1] for i in range(4)]
    for name in beside:
        assert np.asarray(beside[name]) == pytest.approx(np.array([e[name] for e in own]), rel=1e-4)


def test_a_total_in_a_loop_is_refused():
    def loss(params, ids, labels):
        def row(_, given):
            ids, labels = given
            return 0, counted(params, ids[:, None], labels[:, None])

        return jax.lax.scan(row, 0, (ids.T, labels.T))[1].sum()

    with pytest.raises(NotInParts, match="inside of a loop, a branch or a function") as e:
        pase.compile(loss, PARAMS, IDS, LABELS, devices=1, accumulate=4)
    assert "(losses * weights).sum(1).mean() * scale" in e.value.fix


def running(params, given):
    """Each part of the loss is divided by the count so far."""

    def part(so_far, x):
        total, count = so_far
        count += (x[1] >= 0).sum()
        return (total + (losses(params, *x) * (x[1] >= 0)).sum() / count, count), None

    return jax.lax.scan(part, (0.0, 0), given)[0][0]


def by_another_loop(params, given):
    """The parts of the loss are divided by the count of a loop before."""
    count = jax.lax.scan(lambda so_far, x: (so_far + (x >= 0).sum(), None), 0, given[1])[0]

    def part(total, x):
        return total + (losses(params, *x) * (x[1] >= 0)).sum() / count, None

    return jax.lax.scan(part, 0.0, given)[0]


def from_one(params, given):
    """The count begins at one, which would be counted in each micro-batch."""

    def part(so_far, x):
        total, count = so_far
        return (total + (losses(params, *x) * (x[1] >= 0)).sum(), count + (x[1] >= 0).sum()), None

    total, count = jax.lax.scan(part, (0.0, 1), given)[0]
    return total / count


@pytest.mark.parametrize("of", [running, by_another_loop, from_one])
def test_a_count_that_a_loop_needs_of_the_whole_batch_is_refused(of):
    def loss(params, ids, labels):
        return of(params, tuple(x.reshape(-1, 3, 2).swapaxes(0, 1) for x in (ids, labels)))

    with pytest.raises(NotInParts, match=r"examples of the batch meet in what the loop at .* carries"):
        pase.compile(loss, PARAMS, IDS, LABELS, devices=1, accumulate=4)


def test_what_a_loop_returns_beside_the_loss_is_the_micro_batchs_own():
    def loss(params, ids, labels):
        def part(so_far, x):
            total, count = so_far
            mine = (x[1] >= 0).sum()
            return (total + (losses(params, *x) * (x[1] >= 0)).sum(), count + mine), mine

        given = tuple(x.reshape(-1, 3, 2).swapaxes(0, 1) for x in (ids, labels))
        (total, count), each = jax.lax.scan(part, (0.0, 0), given)
        return total / count, {"count": count, "each": each}

    plan = pase.compile(loss, PARAMS, IDS, LABELS, devices=2, accumulate=4)
    (value, beside), _ = plan.jax.value_and_grad()(*plan.jax.device_put(PARAMS, IDS, LABELS))
    own = [jax.jit(loss)(PARAMS, IDS[i::4], LABELS[i::4])[1] for i in range(4)]
    assert float(value) == pytest.approx(float(jax.jit(loss)(PARAMS, IDS, LABELS)[0]), rel=1e-5)
    for name in ("count", "each"):
        assert np.asarray(beside[name]).tolist() == [np.asarray(o[name]).tolist() for o in own]
