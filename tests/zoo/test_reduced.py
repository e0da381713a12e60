"""Every reduced model trains: loss near chance, a gradient for every parameter, no look at the future."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pase import zoo

from .helpers import DISTINCT, compiled, reduced_step

SCANNED = tuple(name for name in DISTINCT if "scan" in zoo.entry(name).settings)


@pytest.mark.parametrize("name", zoo.names())
def test_reduced_is_small_and_splits_by_eight(name: str) -> None:
    model = zoo.reduced(name)
    assert model.parameters < 1_000_000
    assert model.settings["dtype"] == "float32"
    assert all(leaf.shape[0] % 8 == 0 for leaf in jax.tree.leaves(model.batch))


@pytest.mark.some(3)
@pytest.mark.parametrize("name", DISTINCT)
def test_loss_at_chance(name: str) -> None:
    """With small random weights all classes are about equally likely, so the loss is near log(classes)."""
    params, batch, step = reduced_step(name)
    loss, _ = step(params, batch)
    settings = zoo.reduced(name).settings
    chance = math.log(int(settings.get("vocab", settings.get("classes", 0))))
    if name == "bert_base":
        chance += math.log(2)  # the next-sentence head
    assert float(loss) == pytest.approx(chance, abs=0.15)


@pytest.mark.some(3)
@pytest.mark.parametrize("name", DISTINCT)
def test_every_parameter_has_a_gradient(name: str) -> None:
    params, batch, step = reduced_step(name)
    _, gradients = step(params, batch)
    jax.tree.map(lambda x, g: np.testing.assert_equal(x.shape, g.shape), params, gradients)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        where = jax.tree_util.keystr(path)
        assert np.isfinite(gradient).all(), where
        largest = float(np.abs(gradient).max())
        if where.endswith("['bk']"):
            # A bias of all keys adds the same number to all scores of a query, which a softmax ignores.
            assert largest < 1e-7, where
        else:
            assert largest > 1e-6, where


@pytest.mark.some(3)
@pytest.mark.parametrize("name", DISTINCT)
def test_init_is_reproducible_and_has_the_stated_shapes(name: str) -> None:
    model = zoo.reduced(name)
    params, batch, _ = reduced_step(name)
    again = model.init(0)
    other, _ = model.init(1)
    jax.tree.map(np.testing.assert_array_equal, (params, batch), again)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (params, batch))
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), (model.params, model.batch))
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(other), strict=True)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in pairs)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "scan", "remat"), [("gpt2", 1, 0), ("gpt2", 0, 1), *((name, 0, 0) for name in SCANNED)]
)
def test_scan_and_remat_do_not_change_the_numbers(name: str, scan: int, remat: int) -> None:
    """With the same parameters, unstacked for scan=0, the loss and all gradients agree to float32 rounding."""
    params, batch, step = reduced_step(name)
    loss, gradients = step(params, batch)
    model = zoo.reduced(name, scan=scan, remat=remat)
    if not scan:
        params = unstacked(model, params)
    other = compiled(jax.value_and_grad(model.loss_fn), params, batch)
    loss_again, gradients_again = other(params, batch)
    if not scan:
        gradients = unstacked(model, gradients)
    assert float(loss_again) == pytest.approx(float(loss), rel=1e-6)
    jax.tree.map(assert_close, gradients_again, gradients)


def unstacked(model: zoo.ZooModel, stacked: Any) -> Any:
    """Parameters for scan=1 converted to the form for scan=0."""
    return {
        key: [jax.tree.map(lambda x, i=i: x[i], stacked[key]) for i in range(len(value))]
        if isinstance(value, list)
        else stacked[key]
        for key, value in model.params.items()
    }


def assert_close(x: jax.Array, y: jax.Array) -> None:
    np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * float(np.abs(y).max()) + 1e-8)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("gpt2", "tokens"),
        ("llama3_8b", "tokens"),
        ("mixtral_8x7b", "tokens"),
        ("rnnlm", "tokens"),
        ("transformer", "target"),
    ],
)
def test_causal_models_do_not_see_the_future(name: str, tokens: str) -> None:
    early, late = visible_change(name, tokens)
    assert early == pytest.approx(0, abs=4e-6)
    assert late > 2e-4


@pytest.mark.parametrize(("name", "tokens"), [("bert_base", "tokens"), ("transformer", "source")])
def test_the_others_do(name: str, tokens: str) -> None:
    early, _ = visible_change(name, tokens)
    assert early > 2e-4


def visible_change(name: str, tokens: str) -> tuple[float, float]:
    """How much new tokens in the second half change the predictions in the first half, and in the second.

    Swapping the labels of some positions changes the mean loss by a sum of those positions' logits alone;
    that change is what new tokens may or may not alter.
    """
    model = zoo.reduced(name)
    params, batch, step = reduced_step(name)
    vocab, half = int(model.settings["vocab"]), int(model.settings["seq"]) // 2
    first = jnp.arange(2 * half) < half
    changed = dict(batch) | {tokens: jnp.where(first, batch[tokens], (batch[tokens] + 7) % vocab)}

    def logit_sum(inputs: Any, where: jax.Array, other: int) -> float:
        labels = jnp.where(where, (batch["labels"] + other) % vocab, batch["labels"])
        return float(step(params, dict(inputs) | {"labels": labels})[0] - step(params, inputs)[0])

    def change(where: jax.Array) -> float:
        others = (1, 50, 100, 150)  # a single sum may hardly change by chance
        return max(abs(logit_sum(changed, where, n) - logit_sum(batch, where, n)) for n in others)

    return change(first), change(~first)
