"""A JAX step in micro-batches takes the mean of their losses. A loss that is no mean over the batch is refused."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, ShapeDtypeStruct

import pase
from pase.compiler.problem.variants import Variant, check_replicas, graph_of
from pase.frontends.common import micro_batches as analysis
from pase.frontends.common.micro_batches import examples_meet
from pase.frontends.jax.blocks import batch_inputs
from pase.frontends.jax.frontend import trace
from pase.frontends.registry import NotInParts
from pase.ir import named, simplify

W, X = ShapeDtypeStruct((8, 8), "float32"), ShapeDtypeStruct((16, 8), "float32")
Loss = Callable[[Array, Array], Array]


@jax.custom_vjp
def _own_mean(y: Array) -> Array:
    return jnp.mean(y * y)


_own_mean.defvjp(lambda y: (jnp.mean(y * y), y), lambda y, g: (2.0 * g * y / y.size,))


@jax.custom_vjp
def _own_sum(y: Array) -> Array:
    return jnp.sum(y * y)


_own_sum.defvjp(lambda y: (jnp.sum(y * y), y), lambda y, g: (2.0 * g * y,))


def _in_a_scan(w: Array, x: Array) -> Array:
    total, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)
    return jnp.mean(jnp.sum(total, axis=1))


def _example_by_example(w: Array, x: Array) -> Array:
    return jnp.mean(jax.vmap(lambda row: jnp.sum((row @ w) ** 2))(x))


def _each(w: Array, x: Array) -> Array:
    return jnp.mean((x @ w) ** 2, axis=1)


def _one_of_two(w: Array, x: Array) -> Array:
    a, b = jnp.mean(_each(w, x)), jnp.mean(x @ w)
    return a if len(x) > 8 else b


def _a_step_per_example(w: Array, x: Array) -> Array:
    return jnp.mean(jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=len(x))[0])


def _carried(turn: Callable[[Array, Array], Array], init: float = 0.0) -> Loss:
    """A loss that is the carry of a loop over features. turn(carry, one feature of all examples) -> carry."""

    def loss(w: Array, x: Array) -> Array:
        return jax.lax.scan(lambda c, y: (turn(c, y), None), init, (x @ w).T)[0]

    return loss


def _in_a_fori(w: Array, x: Array) -> Array:
    return jax.lax.fori_loop(0, 3, lambda i, c: c + jnp.mean((x @ w)[:, i]) ** 2, jnp.zeros(()))


def _until_small(w: Array, x: Array) -> Array:
    scale = jax.lax.while_loop(lambda c: jnp.mean(x * c) > 1e-3, lambda c: 0.5 * c, 1.0)
    return jnp.mean(_each(w, x)) * scale


MEANS: dict[str, Loss] = {
    "a mean that a loop adds up": _carried(lambda c, y: c + jnp.mean(y**2)),
    "sums that a loop adds up": lambda w, x: _carried(lambda c, y: c - jnp.sum(y**2))(w, x) / x.size,
    "a running mean": _carried(lambda c, y: 0.9 * c + 0.1 * jnp.mean(y)),
    "mean": lambda w, x: jnp.mean((x @ w) ** 2),
    "sum over a count": lambda w, x: jnp.sum((x @ w) ** 2) / x.shape[0],
    "times one over a count": lambda w, x: jnp.sum((x @ w) ** 2) * np.float32(1 / x.shape[0]),
    "weights divided first": lambda w, x: jnp.sum((x @ w) ** 2 * jnp.full((x.shape[0], 1), 1 / x.shape[0])),
    "mean under jit": jax.jit(lambda w, x: jnp.mean((x @ w) ** 2)),
    "mean and a penalty": lambda w, x: jnp.mean((x @ w) ** 2) + 1e-3 * jnp.sum(w * w),
    "penalty alone": lambda w, x: jnp.sum(w * w),
    "mean of sums": lambda w, x: jnp.mean(jnp.sum((x @ w) ** 2, axis=1)),
    "rule of its own": lambda w, x: _own_mean(x @ w),
    "scan": _in_a_scan,
    "vmap": _example_by_example,
    "variance": lambda w, x: jnp.mean(jnp.var(x @ w, axis=1)),
    "weights of numpy": lambda w, x: jnp.sum(_each(w, x) * np.full(len(x), 1 / len(x), np.float32)),
    "a constant of numpy": lambda w, x: jnp.sum(_each(w, x)[:, None] * np.full(3, 1 / len(x), np.float32)),
    "places of features": lambda w, x: jnp.mean(
        (x @ w * jnp.arange(8) + np.arange(8, dtype=np.float32)) ** 2
    ),
    "places repeated": lambda w, x: jnp.mean((x @ w * np.tile(np.float32(range(8)), (len(x), 1))) ** 2),
    "weights that are counted": lambda w, x: jnp.average(_each(w, x), weights=jnp.full(len(x), 2.0)),
    "ones in a product": lambda w, x: _each(w, x) @ jnp.ones(len(x)) / (jnp.ones(len(x)) @ jnp.ones(len(x))),
    "sums along features": lambda w, x: jnp.mean((x @ w) ** 2 * jnp.cumsum(jnp.ones((len(x), 8)), axis=1)),
    "a state that is set": lambda w, x: jnp.mean(
        jnp.tanh(x @ w + jnp.concatenate([jnp.ones((len(x), 4)), jnp.zeros((len(x), 4))], axis=1))
    ),
    "remat": lambda w, x: jax.checkpoint(lambda w: jnp.mean((x @ w) ** 2))(w),
}
OTHERS: dict[str, tuple[Loss, str]] = {
    "sum": (lambda w, x: jnp.sum((x @ w) ** 2), "a sum over the batch"),
    "sum over a constant": (lambda w, x: jnp.sum((x @ w) ** 2) / 100.0, "a sum over the batch"),
    "sum under jit": (jax.jit(lambda w, x: jnp.sum((x @ w) ** 2)), "a sum over the batch"),
    "rule of its own": (lambda w, x: _own_sum(x @ w), "a sum over the batch"),
    "divided twice": (lambda w, x: jnp.mean((x @ w) ** 2) / x.shape[0], r"size \*\* \+1"),
    "sum and a penalty": (
        lambda w, x: jnp.sum((x @ w) ** 2) + 1e-3 * jnp.sum(w * w),
        "adds a sum over the batch to a mean",
    ),
    "first half": (lambda w, x: jnp.mean(_each(w, x) * (jnp.arange(len(x)) < 8)), "meet in mul"),
    "first half, numpy": (lambda w, x: jnp.mean(_each(w, x) * (np.arange(len(x)) < 8)), "meet in mul"),
    "places": (lambda w, x: jnp.mean(_each(w, x) * jnp.arange(len(x))), "meet in mul"),
    "places, numpy": (
        lambda w, x: jnp.mean(_each(w, x) * np.arange(len(x), dtype=np.float32)),
        "meet in mul",
    ),
    "places under jit": (
        lambda w, x: jax.jit(lambda e: jnp.mean(e * np.arange(len(x), dtype=np.float32)))(_each(w, x)),
        "meet in mul",
    ),
    "places in a product": (
        lambda w, x: _each(w, x) @ np.arange(len(x), dtype=np.float32) / len(x),
        "examples .* meet in",
    ),
    "times the size": (
        lambda w, x: jnp.sum(jnp.mean(_each(w, x)) * np.array([float(len(x))], np.float32)),
        "a sum over the batch",
    ),
    "times a count": (lambda w, x: jnp.mean(_each(w, x)) * jnp.sum(jnp.ones(len(x))), "a sum over the batch"),
    "times a count in a product": (
        lambda w, x: jnp.mean((x @ w) ** 2 * (jnp.ones((len(x), len(x))) @ jnp.ones((len(x), 8)))),
        "a sum over the batch",
    ),
    "sums along the batch": (
        lambda w, x: jnp.mean(_each(w, x) * jnp.cumsum(jnp.ones(len(x)))),
        "meet in mul",
    ),
    "a mean by a count of the model's own values": (
        lambda w, x: jnp.nanmean((x @ w) ** 2),
        "meet in div .*divide by the mask's sum",
    ),
    "a product over the batch": (
        lambda w, x: jnp.mean(_each(w, x)) * jnp.prod(jnp.full(len(x), 1.1)),
        "examples .* meet in mul",
    ),
    "begin of a table": (lambda w, x: jnp.mean(_each(w, x) * jnp.arange(100.0)[: len(x)]), "meet in mul"),
    "place in a table": (
        lambda w, x: jnp.mean((x @ w + jnp.arange(100.0)[len(x) : len(x) + 8]) ** 2),
        "examples .* meet in add",
    ),
    "random numbers of a fixed key": (
        lambda w, x: jnp.mean(jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x @ w, 0.0)),
        "examples .* meet in",
    ),
    "a loop that counts": (
        lambda w, x: (
            jnp.mean(_each(w, x))
            * jax.lax.scan(lambda c, a: (c + a.sum(), None), 0.0, jnp.ones((3, len(x))))[0]
        ),
        "examples .* meet in add",
    ),
    "a loop that adds up sums": (_carried(lambda c, y: c + jnp.sum(y)), "a sum over the batch"),
    "sums that begin at one": (_carried(lambda c, y: c + jnp.sum(y), 1.0), "examples .* meet in"),
    "a loop that squares means": (_carried(lambda c, y: c + jnp.mean(y) ** 2), "meet in integer_pow"),
    "a loop's largest": (_carried(lambda c, y: jnp.maximum(c, jnp.max(y))), "meet in reduce_max"),
    "the sine of a carry": (_carried(lambda c, y: jnp.sin(c + jnp.mean(y))), "meet in sin"),
    "squares in a loop of a known length": (_in_a_fori, "examples .* meet in"),
    "a loop until the batch's mean is small": (_until_small, "examples .* meet in"),
    "a branch by the batch": (
        lambda w, x: jax.lax.cond(jnp.sum(x) > 0, jnp.mean, lambda e: 2 * jnp.mean(e), _each(w, x)),
        "depends on reduce_sum at .*pass it as an argument",
    ),
    "another program": (
        lambda w, x: jnp.mean(_each(w, x)) if len(x) > 8 else jnp.mean(_each(w, x)) * 2,
        "other operations",
    ),
    "other features": (
        lambda w, x: jnp.mean((x @ w)[:, len(x) // 8 : len(x) // 8 + 2] ** 2),
        "other parameters of slice",
    ),
    "another variable": (_one_of_two, "other variables"),
    "another exponent": (
        lambda w, x: jnp.mean(_each(w, x) ** (2 if len(x) > 8 else 3)),
        "other numbers in integer_pow",
    ),
    "as many steps as examples": (_a_step_per_example, "other trip counts"),
}


@pytest.mark.some(12)
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_runs_in_micro_batches(name):
    whole = trace(MEANS[name], W, X)
    graph_of(whole, Variant(accumulate=4))
    graph_of(whole, Variant(accumulate=16))  # micro-batches of one example
    w, x = (np.random.default_rng(i).normal(size=s.shape) for i, s in enumerate((W, X)))
    parts = [float(MEANS[name](w, x[i::4])) for i in range(4)]
    assert np.mean(parts) == pytest.approx(float(MEANS[name](w, x)), rel=1e-4)


SUMMED = {
    "sum",
    "sum over a constant",
    "sum under jit",
    "rule of its own",
    "divided twice",
    "sum and a penalty",
    "times the size",
    "times a count",
    "times a count in a product",
    "a loop that adds up sums",
    "a branch by the batch",
}
"""Which of ``OTHERS`` a step in micro-batches can sum, although replicas take their mean."""


@pytest.mark.parametrize("name", OTHERS)
def test_replicas_refuse_what_is_no_mean(name):
    loss, told = OTHERS[name]
    whole = trace(loss, W, X)
    for micro_batches in (4, 16):
        with pytest.raises(NotInParts, match=told):
            check_replicas(whole, micro_batches)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_mean_is_summed_or_refused(name):
    loss, told = OTHERS[name]
    if name not in SUMMED:
        with pytest.raises(NotInParts, match=told):
            graph_of(trace(loss, W, X), Variant(accumulate=4))
        return
    w, x = (np.random.default_rng(i).normal(size=s.shape).astype("f") for i, s in enumerate((W, X)))
    plan = pase.compile(loss, w, x, devices=1, accumulate=4)
    both = plan.jax.value_and_grad()(w, x), jax.value_and_grad(loss)(w, x)
    assert float(both[0][0]) == pytest.approx(float(both[1][0]), rel=1e-5)
    assert np.asarray(both[0][1]) == pytest.approx(np.asarray(both[1][1]), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("of_one", [1.0, 2.0])
def test_the_program_of_one_example_may_not_differ(of_one):
    def loss(w, x):
        return jnp.mean((x @ w) ** 2) * (of_one if len(x) == 1 else 3.0)

    graph_of(trace(loss, W, X), Variant(accumulate=4))
    with pytest.raises(NotInParts, match="for one example"):
        graph_of(trace(loss, W, X), Variant(accumulate=16))


def test_what_sorts_each_example_alone_runs_in_micro_batches():
    def choice(w, x):
        return jnp.mean(jax.lax.top_k(x @ w, 2)[0])

    def order(w, x):
        return jnp.mean(jnp.sort(x @ w, axis=0))

    def meets(traced):
        return examples_meet(named(simplify(traced.graph)), batch_inputs(traced), state_of_whole=False)

    graph_of(trace(choice, W, X), Variant(accumulate=4))
    chosen, ordered = (trace(loss, W, X) for loss in (choice, order))
    assert meets(chosen) is None
    assert "sort" in str(meets(ordered))
    with pytest.raises(NotInParts, match="meet in sort"):
        graph_of(ordered, Variant(accumulate=4))


def test_a_plan_reads_what_compiling_found_out_about_its_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    analyzed, once = [], analysis.micro_sums
    monkeypatch.setattr(analysis, "micro_sums", lambda *of, **more: analyzed.append(of) or once(*of, **more))
    plan = pase.compile(lambda w, x: jnp.mean((x @ w) ** 2), W, X, devices=2, accumulate=2)
    assert plan.jax.sums.mean and len(analyzed) == 1
