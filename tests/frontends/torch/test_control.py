"""PyTorch's scan, map, cond and flex_attention cost the same as in JAX, and as fused attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pase
from pase.errors import PaseError
from tests.frontends.torch.bodies import models

pytestmark = pytest.mark.torch


def priced(*model, **options):
    return pase.compile(*model, devices=4, overlap="none", **options)


def both(kind):
    """The plans of a model in PyTorch and of the same model in JAX."""
    import torch

    w, x = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((8, 32, 64), "float32")

    def times(x, w):
        return jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())))

    def scans(w, x):
        def body(c, x):
            h = jnp.tanh(times(x, w) + c)
            return h, h * 2

        c, ys = jax.lax.scan(body, jnp.zeros((32, 64)), x)
        return ys.sum() + c.sum()

    def maps(w, x):
        return jax.lax.map(lambda x: jnp.tanh(times(x, w)), x).sum()

    def branches(w, x):
        return jax.lax.cond(x.sum() > 0, lambda x: jnp.tanh(times(x, w)), jnp.tanh, x).sum()

    theirs = {"Scans": scans, "Maps": maps, "Branches": branches}[kind]
    return priced(getattr(models(), kind)(), torch.empty(8, 32, 64)), priced(theirs, w, x)


@pytest.mark.parametrize("kind", ["Scans", "Maps", "Branches"])
def test_bodies_cost_what_they_cost_in_jax(kind):
    with jax.default_matmul_precision("highest"):  # PyTorch's default
        ours, theirs = both(kind)
    # The predicate of a branch is a bool in PyTorch and an int32 in JAX, written once and read three times: 12 bytes.
    predicate = 12 / 1e12 if kind == "Branches" else 0.0
    assert ours.cost == pytest.approx(theirs.cost, rel=1e-9, abs=predicate)
    assert ours.memory.total == pytest.approx(theirs.memory.total, rel=0.02)
    if kind == "Branches":
        assert "the one for true, the more expensive one" in " ".join(str(ours).split())


def attends(kind):
    import torch

    return priced(models().Attends(kind), torch.empty(4, 128, 64), torch.zeros(128, dtype=torch.int64))


def test_flex_attention_is_attention():
    causal, biased = attends("causal"), attends("biased")
    assert causal.cost == pytest.approx(attends("fused").cost, rel=1e-9)
    assert biased.cost >= causal.cost


def test_what_bodies_cannot_do_is_refused():
    import torch

    with pytest.raises(PaseError, match="trip count") as e:
        priced(models().Turns(), torch.empty(32, 64))
    assert "while_loop" in e.value.where and "bodies.py" in e.value.where and "scan" in e.value.fix
    for kind in ("documents", "trained"):
        with pytest.raises(PaseError, match="positions and constants") as e:
            attends(kind)
        assert "flex_attention" in e.value.where and "bodies.py" in e.value.where
        assert "scaled_dot_product_attention" in e.value.fix
