"""New state that a function computes but does not return gets a remark, for every library; returned state does not."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

from pase.frontends.jax.frontend import trace

D = 4
X = jnp.ones((8, D))


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(D)(x)
        self.sow("intermediates", "h", x)
        return nn.BatchNorm(use_running_average=False)(x)


LINEN = Normed()
VARIABLES = LINEN.init(jax.random.key(0), X)
PARAMS, STATS = VARIABLES["params"], VARIABLES["batch_stats"]


def linen(p: Any, x: Any, stats: Any = STATS) -> Any:
    y, new = LINEN.apply({"params": p, "batch_stats": stats}, x, mutable=["batch_stats", "intermediates"])
    return jnp.mean(y**2), new["batch_stats"]


def each(p: Any, x: Any) -> Any:
    """The statistics of each example, inside a vmap and a checkpoint."""
    return jax.vmap(jax.checkpoint(lambda one: linen(p, one[None])))(x)


class Drops(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.norm, self.drop = nnx.BatchNorm(D, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.drop(self.norm(x))


FORM, WEIGHTS, REST = nnx.split(Drops(), nnx.Param, ...)


def merged(p: Any, x: Any) -> Any:
    model = nnx.merge(FORM, p, REST, copy=True)
    return jnp.mean(model(x) ** 2), nnx.state(model, nnx.BatchStat, nnx.RngState)


def mean(loss_and_state: Any) -> Any:
    return jnp.mean(loss_and_state[0])


def said(fn: Callable[..., Any], *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = [r.what for r in trace(fn, *args).graph.remarks if r.kind == "state"]
    assert found == [str(w.message) for w in warned if "does not return them" in str(w.message)]
    return found


@pytest.mark.parametrize(
    ("fn", "params", "what"),
    [
        (linen, PARAMS, ["collection 'batch_stats' of Normed.*carry={1: 1}"]),
        (each, PARAMS, ["collection 'batch_stats'"]),
        (merged, WEIGHTS, [r"NNX \(BatchStat\).*Pass the module itself", r"NNX \(RngCount\)"]),
    ],
)
def test_what_is_dropped_is_named_and_what_is_returned_is_not(fn: Any, params: Any, what: list[str]) -> None:
    import re

    found = said(lambda p, x: mean(fn(p, x)), params, X)
    assert len(found) == len(what) and all(map(re.search, what, found)), found
    assert not said(lambda p, x: (mean(fn(p, x)), jax.tree.map(lambda s: s[None], fn(p, x)[1])), params, X)


def test_random_streams_of_the_function_itself_are_not_handed_on() -> None:
    def fresh(p: Any, x: Any, key: Any) -> Any:
        return jnp.mean(nnx.Dropout(0.5, rngs=nnx.Rngs(key))(x @ p) ** 2)

    assert not said(fresh, jnp.eye(D), X, jax.random.key(0))


def test_a_transformed_function_of_haiku(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in that does what Haiku's apply does with its state."""

    class HaikuContext:
        def __init__(self, state: Any) -> None:
            self.initial, self.state = state, dict(state)

        def collect_initial_state(self) -> Any:
            return self.initial

        def collect_state(self) -> Any:
            return self.state

    def apply(p: Any, state: Any, x: Any) -> Any:
        context = HaikuContext(state)
        context.state["mean"] = 0.9 * state["mean"] + 0.1 * x.mean(0)
        return x @ p, context.collect_state()

    base = types.ModuleType("haiku._src.base")
    monkeypatch.setattr(base, "HaikuContext", HaikuContext, raising=False)
    monkeypatch.setitem(sys.modules, "haiku._src.base", base)
    state = {"mean": jnp.zeros(D), "fixed": jnp.ones(D)}
    (found,) = said(lambda p, x, s: jnp.mean(apply(p, s, x)[0] ** 2), jnp.eye(D), X, state)
    assert "the state of a transformed function (Haiku)" in found
    assert not said(
        lambda p, x, s: (jnp.mean(apply(p, s, x)[0] ** 2), apply(p, s, x)[1]), jnp.eye(D), X, state
    )
