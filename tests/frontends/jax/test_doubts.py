"""Doubts name, for each parameter, the op between it and the loss by which a gradient may differ from the slope."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pase.frontends.jax.doubts import doubts
from pase.frontends.jax.frontend import trace


def test_doubts_lie_between_a_parameter_and_the_loss():
    @jax.custom_vjp
    def own(x):
        return x

    own.defvjp(lambda x: (x, None), lambda _, c: (2 * c,))

    def fn(p, x):
        def body(h, w):
            return jax.nn.softmax(h @ w), jnp.argmax(h)

        h, found = jax.lax.scan(body, x @ own(p["ruled"]), p["layers"])
        accuracy = jnp.mean(jnp.round(p["plain"]))
        return jnp.sum(h * p["plain"]) + jnp.sum(jnp.floor(p["floored"])) + p["smooth"].sum(), (
            accuracy,
            found,
        )

    square = jnp.eye(3)
    p = {
        "ruled": square,
        "layers": jnp.stack([square] * 2),
        "plain": square,
        "floored": square,
        "smooth": square,
    }
    found = doubts(trace(fn, p, square))
    assert set(found) == {"ruled", "floored"}
    assert found["ruled"].startswith("a derivative rule at") and "test_doubts.py" in found["ruled"]
    assert found["floored"].startswith("a rounded value (floor) at")
