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


def rule_of(eqn):
    """The rule of an equation that the graph does not determine, for parts of any size along other dims; or None."""
    p = eqn.params
    match eqn.primitive.name:
        case "sort":
            return in_jax(lambda x: jnp.sort(x, axis=p["dimension"]))
        case "cumsum":
            return in_jax(lambda x: jax.lax.cumsum(x, axis=p["axis"], reverse=p["reverse"]))
        case "concatenate":
            return in_jax(lambda *xs: jnp.concatenate(xs, p["dimension"]))
        case "slice":
            kept = zip(p["start_indices"], p["limit_indices"], eqn.invars[0].aval.shape, strict=True)
            cut = tuple(slice(None) if b - a == n else slice(a, b) for a, b, n in kept)
            return in_jax(lambda x: x[cut])
        case "pad":
            return in_jax(lambda x: jax.lax.pad(x, np.zeros((), x.dtype), p["padding_config"]))
    return in_jax(plain_attention) if call_of(eqn) is not None else None


def rules_of(jaxpr, prefix=""):
    """The rules of a jaxpr's equations, by place."""
    out = {}
    for i, eqn in enumerate(jaxpr.eqns):
        if (rule := rule_of(eqn)) is not None:
            out[Place(f"{prefix}{i}")] = rule
        elif inlined(eqn):
            out |= rules_of(inner_jaxpr(eqn)[0], f"{prefix}{i}.")
    return out
