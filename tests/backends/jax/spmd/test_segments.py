"""Maxima by segment, as a graph's attention has them: each device has some edges; all share an extreme's gradient."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pase

EDGES, NODES, WIDTH = 65536, 256, 32


def attended(p: Any, x: Any, src: Any, dst: Any) -> Any:
    """Softmax over each node's edges, without a stop_gradient, and a minimum."""
    h = x @ p["w"]
    scores = jax.nn.leaky_relu((h[src] * h[dst]) @ p["a"])
    top = jax.ops.segment_max(scores, dst, NODES)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.exp(scores - top[dst])
    weights = weights / (jax.ops.segment_sum(weights, dst, NODES)[dst] + 1e-9)
    out = jax.ops.segment_sum(weights[:, None] * h[src], dst, NODES)
    low = jax.ops.segment_min(out[src].sum(-1), dst, NODES)
    return jnp.mean(out**2) + jnp.mean(top**2) + jnp.mean(jnp.where(jnp.isfinite(low), low, 0) ** 3)


def raised(p: Any, x: Any, src: Any, dst: Any) -> Any:
    """Maxima of updates and of an array that is trained; in the second, both attain all of them."""
    updates = (jnp.tanh(x[src] @ p["w"]) @ p["w"]).sum(-1)
    once = jnp.broadcast_to(p["a"].sum() / 10, (NODES,)).at[dst].max(updates)
    return jnp.mean((once * p["a"].sum()).at[dst].max(updates * p["a"].sum()) ** 2)


def layered(p: Any, x: Any, src: Any, dst: Any) -> Any:
    """Maxima in the body of a loop, whose derivative must not refer to values of the body's trace."""

    def layer(h: Any, _: None) -> tuple[Any, None]:
        top = jax.ops.segment_max((h[src] * h[dst]) @ p["a"], dst, NODES)
        return jnp.tanh(h @ p["w"] + jnp.where(jnp.isfinite(top), top, 0)[:, None]), None

    return jnp.mean(jax.lax.scan(layer, x, None, length=2)[0] ** 2)


@pytest.mark.parametrize("program", [attended, raised, layered])
@pytest.mark.parametrize(
    ("mesh", "edges"),
    [("data=4", "data"), ("data=2,model=2", "data"), ("data=2,model=2", [("data", "model")])],
)
def test_extremes_by_segment_are_those_of_one_device(program: Any, mesh: str, edges: Any) -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        p = {
            "w": jnp.array(rng.normal(size=(WIDTH, WIDTH)) * 0.1),
            "a": jnp.array(rng.normal(size=(WIDTH,))),
        }
        x = jnp.array(rng.normal(size=(NODES, WIDTH)))
        src, dst = jnp.array(rng.integers(0, NODES, EDGES)), jnp.array(rng.integers(0, NODES - 5, EDGES))
        args = p, x, src.at[:64].set(3), dst.at[::64].set(7)  # equal edges attain one extreme together
        loss, gradients = jax.value_and_grad(program)(*args)
        plan = pase.compile(
            program,
            *args,
            devices=4,
            mesh=mesh,
            constraints={"src": edges, "dst": edges},
            baselines=False,
        )
        split = [n for n in plan.strategy if n.startswith("scatter") and plan.strategy[n]]
        assert len(split) >= 1 + (program is not layered)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a part that is left to XLA is a warning
            found, by = plan.jax.value_and_grad()(*plan.jax.device_put(*args))
        np.testing.assert_allclose(found, loss, rtol=1e-12)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), by, gradients)
