"""Shared by tests that interpret a local program: the rules of a jaxpr's equations."""

import jax
import jax.numpy as jnp
import numpy as np

from pase.frontends.jax.attention import call_of
from pase.frontends.jax.frontend import inlined, inner_jaxpr
from pase.ir import Place
from pase.local.interpret import OpRule


def in_jax(fn):
    """A function of arrays as an op's rule, in float64, with JAX's derivative."""

    def made(xs):
        with jax.enable_x64(True):
            return np.asarray(fn(*xs))

    def pulled(xs, g):
        with jax.enable_x64(True):
            return [np.asarray(x) for x in jax.vjp(fn, *map(jnp.asarray, xs))[1](jnp.asarray(g))]

    return OpRule(made=made, pulled=pulled)


def plain_attention(q, k, v):
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), v)


def rules_of(jaxpr, prefix=""):
    """The rules of a jaxpr's fused attention, by place."""
    out = {}
    for i, eqn in enumerate(jaxpr.eqns):
        if call_of(eqn) is not None:
            out[Place(f"{prefix}{i}")] = in_jax(plain_attention)
        elif inlined(eqn):
            out |= rules_of(inner_jaxpr(eqn)[0], f"{prefix}{i}.")
    return out
