"""Layers with control flow: scans over layers and over time, loops, branches, rematerialized and fixed-point parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from bench.composer.maker import Apply, Env, Maker, divisors, layer

POLICIES = ("none", "all", "dots_saveable", "nothing_saveable", "dots_with_no_batch_dims_saveable", "names")


def recomputed(policy: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the body under jax.checkpoint with a policy."""
    if policy == "none":
        return body
    if policy == "all":
        return jax.checkpoint(body)
    if policy == "names":
        return jax.checkpoint(body, policy=jax.checkpoint_policies.save_only_these_names("kept"))
    return jax.checkpoint(body, policy=getattr(jax.checkpoint_policies, policy))


@layer(2, loops=True)
def layer_scan(m: Maker) -> Apply:
    """A scan over stacked layers: a perceptron or a gated unit; outputs are stacked or not."""
    _b, _s, d = m.shape
    n, policy, out, gated = m.choose(2, 4), m.choose(*POLICIES), m.chance(0.3), m.chance(0.3)
    w, v, g = m.weight(n, d, d, scale=d**-0.5), m.weight(n, d, d, scale=d**-0.5), m.weight(n, d)

    def body(x: Any, layer: Any) -> Any:
        w, v, g = layer
        h = checkpoint_name(x @ w, "kept")
        h = jax.nn.sigmoid(h) * jnp.sin(h) if gated else jnp.tanh(h)
        x = x * jax.nn.sigmoid(g) + h @ v
        return x, jnp.mean(x**2, (1, 2)) if out else None

    def apply(p: Any, x: Any, env: Env) -> Any:
        x, said = lax.scan(recomputed(policy, body), x, (w(p), v(p), g(p)))
        if out:
            env.terms.append(0.1 * jnp.mean(said))
        return x

    return apply


@layer(loops=True)
def attention_scan(m: Maker) -> Apply:
    """Transformer blocks with pre-norm in a scan."""
    _b, _s, d = m.shape
    n, policy = m.choose(2, 4), m.choose(*POLICIES)
    qkv, o = m.weight(n, d, 3 * d, scale=d**-0.5), m.weight(n, d, d, scale=d**-0.5)
    up, down, g = (
        m.weight(n, d, 2 * d, scale=d**-0.5),
        m.weight(n, 2 * d, d, scale=d**-0.5),
        m.weight(n, 2, d),
    )

    def body(x: Any, layer: Any) -> Any:
        qkv, o, up, down, g = layer
        y = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-2) * (1 + g[0])
        q, k, v = jnp.split(y @ qkv, 3, -1)
        x = x + jax.nn.softmax(q @ k.mT / np.sqrt(d)) @ v @ o
        y = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-2) * (1 + g[1])
        return x + jax.nn.gelu(y @ up) @ down, None

    return lambda p, x, env: lax.scan(recomputed(policy, body), x, (qkv(p), o(p), up(p), down(p), g(p)))[0]


@layer(2)
def recurrent(m: Maker) -> Apply:
    """A scan over time that stacks its states: an Elman net, a GRU or an LSTM; forward, in reverse, or both."""
    _b, _s, d = m.shape
    kind, way = m.choose("elman", "gru", "lstm"), m.choose("forward", "reverse", "both")
    n = {"elman": 1, "gru": 3, "lstm": 4}[kind]
    w, u, bias, policy = m.weight(d, n * d), m.weight(d, n * d), m.vector(n * d), m.choose("none", "all")

    def cell(p: Any, carry: Any, x: Any) -> Any:
        h, c = carry
        if kind == "elman":
            h = jnp.tanh(x @ w(p) + h @ u(p) + bias(p))
        elif kind == "gru":
            a, r = x @ w(p) + bias(p), h @ u(p)
            z, reset = jax.nn.sigmoid(a[:, :d] + r[:, :d]), jax.nn.sigmoid(a[:, d : 2 * d] + r[:, d : 2 * d])
            h = (1 - z) * h + z * jnp.tanh(a[:, 2 * d :] + reset * r[:, 2 * d :])
        else:
            i, f, o, new = jnp.split(x @ w(p) + h @ u(p) + bias(p), 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(new)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    def run(p: Any, x: Any, reverse: bool) -> Any:
        zero = jnp.zeros((x.shape[0], d), x.dtype)
        body = recomputed(policy, lambda carry, x: cell(p, carry, x))
        return jnp.swapaxes(lax.scan(body, (zero, zero), jnp.swapaxes(x, 0, 1), reverse=reverse)[1], 0, 1)

    def apply(p: Any, x: Any, env: Env) -> Any:
        if way == "both":
            return run(p, x, False) + run(p, x, True)
        return run(p, x, way == "reverse")

    return apply


@layer(2)
def state_space(m: Maker) -> Apply:
    """exp(-exp(A_log) dt) as decay: a scan or an associative scan; real as Mamba's or complex as S5's and the LRU."""
    _b, _s, d = m.shape
    n, kind, parallel = 3, m.choose("real", "complex"), m.chance(0.5)
    a_log, turn, step = m.param(d, n, scale=0.5), m.param(d, n), m.weight(d, d)
    into, out, skip = m.weight(d, n), m.weight(d, n), m.vector(d)

    def combined(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    def apply(p: Any, x: Any, env: Env) -> Any:
        dt = jax.nn.softplus(x @ step(p))[..., None]
        a = -jnp.exp(p[a_log])
        rate = a + 1j * p[turn] if kind == "complex" else a
        decay = jnp.exp(dt * rate)
        new = dt * (x @ into(p))[:, :, None, :] * x[..., None] * jnp.ones((), decay.dtype)
        if parallel:
            _, h = lax.associative_scan(combined, (decay, new), axis=1)
        else:

            def body(h: Any, now: Any) -> Any:
                h = now[0] * h + now[1]
                return h, h

            turns = jnp.moveaxis(decay, 1, 0), jnp.moveaxis(new, 1, 0)
            h = jnp.moveaxis(lax.scan(body, jnp.zeros_like(new[:, 0]), turns)[1], 0, 1)
        y = jnp.einsum("bsdn,bsn->bsd", h, (x @ out(p)).astype(h.dtype))
        return jnp.real(y) + x * skip(p)

    return apply


@layer()
def nested_scans(m: Maker) -> Apply:
    """Chunks of the sequence in an outer scan, their steps in an inner one; both stack."""
    _b, s, d = m.shape
    chunk = m.choose(*divisors(s))
    w, u, policy = m.weight(d, d), m.weight(d, d), m.choose("none", "all")

    def apply(p: Any, x: Any, env: Env) -> Any:
        b = x.shape[0]

        def inner(h: Any, x: Any) -> Any:
            h = jnp.tanh(x @ w(p) + h @ u(p))
            return h, h

        def outer(h: Any, xs: Any) -> Any:
            h, said = lax.scan(inner, h, xs)
            return h * 0.9, said

        turns = jnp.swapaxes(x, 0, 1).reshape(s // chunk, chunk, b, d)
        _, said = lax.scan(recomputed(policy, outer), jnp.zeros((b, d), x.dtype), turns)
        return jnp.swapaxes(said.reshape(s, b, d), 0, 1)

    return apply


@layer()
def blockwise_attention(m: Maker) -> Apply:
    """Attention by blocks of keys and values, with a running maximum and sum."""
    _b, s, d = m.shape
    block = m.choose(*divisors(s))
    q, k, v = m.weight(d, d), m.weight(d, d), m.weight(d, d)

    def apply(p: Any, x: Any, env: Env) -> Any:
        b = x.shape[0]
        qs = x @ q(p)
        ks, vs = (jnp.moveaxis((x @ w(p)).reshape(b, s // block, block, d), 1, 0) for w in (k, v))

        def body(carry: Any, now: Any) -> Any:
            top, total, mixed = carry
            k, v = now
            scores = jnp.einsum("bqd,bkd->bqk", qs, k) / np.sqrt(d)
            new = jnp.maximum(top, scores.max(-1))
            old, part = jnp.exp(top - new), jnp.exp(scores - new[..., None])
            return (new, total * old + part.sum(-1), mixed * old[..., None] + part @ v), None

        start = jnp.full((b, s), -1e30), jnp.zeros((b, s)), jnp.zeros((b, s, d))
        (_, total, mixed), _ = lax.scan(body, start, (ks, vs))
        return x + mixed / total[..., None]

    return apply


@layer()
def shared_turns(m: Maker) -> Apply:
    """The same block several times, by fori_loop or by a Python loop; it uses the number of the iteration."""
    d = m.shape[2]
    w, unrolled, n = m.weight(d, d), m.chance(0.3), m.choose(2, 3)

    def apply(p: Any, x: Any, env: Env) -> Any:
        def body(i: Any, x: Any) -> Any:
            return x + jnp.tanh(x @ w(p)) / (i + 1.0)

        if unrolled:
            for i in range(n):
                x = body(i, x)
            return x
        return lax.fori_loop(0, n, body, x)

    return apply


@layer()
def branches(m: Maker) -> Apply:
    """cond or switch by a number of the batch; each branch has its own weights."""
    d = m.shape[2]
    n = m.choose(2, 3)
    ws = [m.weight(d, d) for _ in range(n)]
    which = m.input("branch", np.asarray(m.values.integers(n), np.int32))
    fns: list[Callable[[Any], Any]] = [jnp.tanh, jnp.sin, jax.nn.relu]

    def apply(p: Any, x: Any, env: Env) -> Any:
        made = [(lambda x, i=i: fns[i](x @ ws[i](p))) for i in range(n)]
        if n == 2:
            return x + lax.cond(env.batch[which] > 0, *made, x)
        return x + lax.switch(env.batch[which], made, x)

    return apply


@layer()
def while_loop(m: Maker) -> Apply:
    """Iterations to convergence that have no gradient: a scale by Newton's method, or a fixed point."""
    d = m.shape[2]
    w, gain = m.weight(d, d), m.vector(d, 1)

    def apply(p: Any, x: Any, env: Env) -> Any:
        y = x @ w(p)
        target = lax.stop_gradient(jnp.mean(y**2, (1, 2)) + 0.5)

        def body(state: Any) -> Any:
            i, r = state
            return i + 1, 0.5 * (r + target / r)

        _, root = lax.while_loop(lambda state: state[0] < 4, body, (0, jnp.ones_like(target)))
        return y / root[:, None, None] * gain(p)

    return apply


@layer()
def fixed_point(m: Maker) -> Apply:
    """An implicit layer: an iteration in forward, and a custom_vjp with another iteration for its gradient."""
    d = m.shape[2]
    w, u = m.weight(d, d), m.weight(d, d)

    def f(w: Any, x: Any, z: Any) -> Any:
        return jnp.tanh(0.3 * z @ w + x)

    @jax.custom_vjp
    def solved(w: Any, x: Any) -> Any:
        return lax.fori_loop(0, 4, lambda i, z: f(w, x, z), jnp.zeros_like(x))

    def forward(w: Any, x: Any) -> Any:
        z = solved(w, x)
        return z, (w, x, z)

    def backward(kept: Any, g: Any) -> Any:
        w, x, z = kept
        _, by_z = jax.vjp(lambda z: f(w, x, z), z)
        total = lax.fori_loop(0, 4, lambda i, t: g + by_z(t)[0], g)
        return jax.vjp(lambda w, x: f(w, x, z), w, x)[1](total)

    solved.defvjp(forward, backward)
    return lambda p, x, env: solved(w(p), x @ u(p))


@layer()
def rematerialised_block(m: Maker) -> Apply:
    """jax.checkpoint around a block that closes over its weights."""
    d = m.shape[2]
    up, down, policy = m.weight(d, 2 * d), m.weight(2 * d, d), m.choose(*POLICIES[1:])

    def apply(p: Any, x: Any, env: Env) -> Any:
        def block(x: Any) -> Any:
            h = checkpoint_name(x @ up(p), "kept")
            return x + jax.nn.gelu(h) @ down(p)

        return recomputed(policy, block)(x)

    return apply


@layer()
def mapped_chunks(m: Maker) -> Apply:
    """lax.map over the examples, or over the sequence."""
    d = m.shape[2]
    w, axis = m.weight(d, d), m.choose(0, 1)

    def apply(p: Any, x: Any, env: Env) -> Any:
        return jnp.moveaxis(lax.map(lambda t: jnp.sin(t @ w(p)), jnp.moveaxis(x, axis, 0)), 0, axis)

    return apply


@layer()
def running_average(m: Maker) -> Apply:
    """An exponential moving average over time by a scan, with a learned rate."""
    d = m.shape[2]
    rate, gain = m.vector(d), m.weight(d, d)

    def apply(p: Any, x: Any, env: Env) -> Any:
        keep = jax.nn.sigmoid(rate(p))

        def body(h: Any, now: Any) -> Any:
            h = keep * h + (1 - keep) * now
            return h, h - now

        said = lax.scan(body, x[:, 0], jnp.swapaxes(x, 0, 1))[1]
        return jnp.swapaxes(said, 0, 1) @ gain(p)

    return apply


@layer()
def ordinary_differential(m: Maker) -> Apply:
    """A few Runge-Kutta steps of a learned vector field, with the time as an input."""
    d = m.shape[2]
    w, t_in, n = m.weight(d, d), m.vector(d), m.choose(2, 3)

    def apply(p: Any, x: Any, env: Env) -> Any:
        def field(t: Any, y: Any) -> Any:
            return jnp.tanh(y @ w(p) + t * t_in(p))

        def step(y: Any, t: Any) -> Any:
            a = field(t, y)
            b = field(t + 0.25, y + 0.25 * a)
            return y + 0.5 * b, None

        return lax.scan(step, x, jnp.arange(n) * 0.5)[0]

    return apply
