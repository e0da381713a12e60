"""Layers without loops over time: products, gates, norms, attention, convolutions, experts, frequencies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.composer.maker import Apply, Env, Maker, divisors, layer
from pase.zoo.attention import fused_attend

ACTIVATIONS = (jax.nn.relu, jax.nn.gelu, jax.nn.silu, jnp.tanh, jax.nn.softplus, jax.nn.elu, jax.nn.mish)


@layer(2)
def dense(m: Maker) -> Apply:
    d = m.shape[2]
    w, b, act = m.weight(d, d), m.vector(d), m.choose(*ACTIVATIONS)
    return lambda p, x, env: act(x @ w(p) + b(p))


@layer(2)
def mlp(m: Maker) -> Apply:
    d = m.shape[2]
    wide = m.choose(d, 2 * d, 4 * d)
    up, down, b, act = m.weight(d, wide), m.weight(wide, d), m.vector(wide), m.choose(*ACTIVATIONS)
    return lambda p, x, env: x + act(x @ up(p) + b(p)) @ down(p)


@layer(2)
def glu(m: Maker) -> Apply:
    """A gated linear unit: one product for both halves, or one for each."""
    d = m.shape[2]
    act, joint = m.choose(jax.nn.sigmoid, jax.nn.silu, jax.nn.gelu), m.chance(0.5)
    down = m.weight(2 * d, d)
    if joint:
        both = m.weight(d, 4 * d)

        def of_both(p: Any, x: Any, env: Env) -> Any:
            gate, value = jnp.split(x @ both(p), 2, axis=-1)
            return x + (act(gate) * value) @ down(p)

        return of_both
    gate, up = m.weight(d, 2 * d), m.weight(d, 2 * d)
    return lambda p, x, env: x + (act(x @ gate(p)) * (x @ up(p))) @ down(p)


@layer(2)
def norm(m: Maker) -> Apply:
    """Layer, RMS, group, unit or power norm with gain and bias."""
    _b, s, d = m.shape
    kind, gain, bias = m.choose("layer", "rms", "group", "unit"), m.vector(d, 1), m.vector(d)
    groups = m.choose(2, 4)

    def apply(p: Any, x: Any, env: Env) -> Any:
        b = x.shape[0]
        y = x.reshape(b, s, groups, -1) if kind == "group" else x
        if kind in ("layer", "group"):
            y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-2)
        elif kind == "rms":
            y = y * lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-2)
        else:
            y = y / (jnp.linalg.norm(y, axis=-1, keepdims=True) + 1e-2)
        return y.reshape(b, s, d) * gain(p) + bias(p)

    return apply


@layer(whole=True)
def batch_norm(m: Maker) -> Apply:
    """Batch norm. The running statistics are parameters that are not trained; their next values are metrics."""
    d = m.shape[2]
    gain, bias, mean, var = m.vector(d, 1), m.vector(d), m.param(d), m.leaf(np.ones(d))
    part = m.choose(0.0, 0.5)

    def apply(p: Any, x: Any, env: Env) -> Any:
        mine, spread = x.mean((0, 1)), x.var((0, 1))
        env.metrics[m.name] = 0.9 * p[mean] + 0.1 * lax.stop_gradient(mine)
        mine = (1 - part) * mine + part * lax.stop_gradient(p[mean])
        spread = (1 - part) * spread + part * lax.stop_gradient(p[var])
        return (x - mine) * lax.rsqrt(spread + 1e-2) * gain(p) + bias(p)

    return apply


def rotated(x: Any, base: float = 100.0) -> Any:
    """Returns the rotary embedding of x [batch, sequence, heads, width]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * base ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    a, b = x[..., :half], x[..., half : 2 * half]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)


@layer(3)
def attention(m: Maker) -> Apply:
    """Attention with heads, grouped or not; causal, windowed, biased by distance, capped; rotary, with QK norm."""
    _b, s, d = m.shape
    heads = m.choose(*(h for h in (1, 2, 4) if d % h == 0))
    groups = m.choose(*(g for g in (1, 2, 4) if heads % g == 0))
    width = d // heads
    q, k, v, o = m.weight(d, d), m.weight(d, groups * width), m.weight(d, groups * width), m.weight(d, d)
    kind, rotary, normed, capped = (
        m.choose("full", "causal", "window", "alibi", "relative"),
        m.chance(0.3),
        m.chance(0.2),
        m.chance(0.2),
    )
    table = m.param(heads, 2 * s - 1) if kind == "relative" else ""
    distance = np.arange(s)[:, None] - np.arange(s)
    seen = np.abs(distance) < 3 if kind == "window" else distance >= 0

    def apply(p: Any, x: Any, env: Env) -> Any:
        b = x.shape[0]
        qs = (x @ q(p)).reshape(b, s, heads, width)
        ks, vs = ((x @ w(p)).reshape(b, s, groups, width) for w in (k, v))
        if normed:
            qs, ks = (t * lax.rsqrt(jnp.mean(t**2, -1, keepdims=True) + 1e-2) for t in (qs, ks))
        if rotary:
            qs, ks = rotated(qs), rotated(ks)
        ks, vs = (jnp.repeat(t, heads // groups, axis=2) for t in (ks, vs))
        scores = jnp.einsum("bqhd,bkhd->bhqk", qs, ks) / np.sqrt(width)
        if capped:
            scores = 5 * jnp.tanh(scores / 5)
        if kind == "relative":
            scores += p[table][:, distance + s - 1]
        elif kind == "alibi":
            scores += -np.abs(distance) * (2.0 ** -np.arange(1, heads + 1))[:, None, None]
        elif kind != "full":
            scores = jnp.where(seen, scores, -1e30)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), vs)
        return x + mixed.reshape(b, s, d) @ o(p)

    return apply


@layer()
def library_attention(m: Maker) -> Apply:
    """jax.nn.dot_product_attention, whose scores are float32: by a kernel, if it is causal, or as JAX writes it."""
    m.epsilon = max(m.epsilon, 2.0**-23)
    _b, s, d = m.shape
    heads, causal = m.choose(*(h for h in (2, 4) if d % h == 0)), m.chance(0.5)
    qkv, o = m.weight(d, 3 * d), m.weight(d, d)

    def apply(p: Any, x: Any, env: Env) -> Any:
        b = x.shape[0]
        q, k, v = jnp.moveaxis((x @ qkv(p)).reshape(b, s, 3, heads, d // heads), 2, 0)
        y = fused_attend(q, k, v, causal=True) if causal else jax.nn.dot_product_attention(q, k, v)
        return x + y.reshape(b, s, d) @ o(p)

    return apply


@layer()
def linear_attention(m: Maker) -> Apply:
    """Linear attention by a feature map, with sums over the past or over all tokens."""
    _b, s, d = m.shape
    q, k, v, causal = m.weight(d, d), m.weight(d, d), m.weight(d, d), m.chance(0.5)

    def apply(p: Any, x: Any, env: Env) -> Any:
        b = x.shape[0]
        qs, ks, vs = jax.nn.elu(x @ q(p)) + 1, jax.nn.elu(x @ k(p)) + 1, x @ v(p)
        state, total = jnp.einsum("bsd,bse->bsde", ks, vs), ks
        state, total = (
            (jnp.cumsum(state, 1), jnp.cumsum(total, 1))
            if causal
            else (state.sum(1, keepdims=True), total.sum(1, keepdims=True))
        )
        return x + jnp.einsum("bsd,bsde->bse", qs, jnp.broadcast_to(state, (b, s, d, d))) / (
            jnp.sum(qs * total, -1, keepdims=True) + 1
        )

    return apply


@layer()
def latents(m: Maker) -> Apply:
    """Perceiver: learned latents attend to the sequence, which then attends to them."""
    _b, _s, d = m.shape
    n = m.choose(2, 3, 4)
    queries, k, v, back = m.param(n, d), m.weight(d, d), m.weight(d, d), m.weight(d, d)

    def apply(p: Any, x: Any, env: Env) -> Any:
        scores = jnp.einsum("nd,bsd->bns", p[queries], x @ k(p)) / np.sqrt(d)
        read = jnp.einsum("bns,bsd->bnd", jax.nn.softmax(scores), x @ v(p))
        again = jnp.einsum("bsd,bnd->bsn", x, read @ back(p)) / np.sqrt(d)
        return x + jnp.einsum("bsn,bnd->bsd", jax.nn.softmax(again), read)

    return apply


@layer()
def windows(m: Maker) -> Apply:
    """Attention within shifted windows."""
    _b, s, d = m.shape
    size = m.choose(*divisors(s))
    shift, w = m.choose(0, size // 2), m.weight(d, d)

    def apply(p: Any, x: Any, env: Env) -> Any:
        b = x.shape[0]
        y = jnp.roll(x, -shift, 1).reshape(b, s // size, size, d)
        mixed = jax.nn.softmax(jnp.einsum("bnid,bnjd->bnij", y @ w(p), y) / np.sqrt(d)) @ y
        return x + jnp.roll(mixed.reshape(b, s, d), shift, 1)

    return apply


@layer()
def convolution(m: Maker) -> Apply:
    """A convolution over the sequence: grouped, depthwise, dilated, or causal."""
    _b, _s, d = m.shape
    groups, window, causal = m.choose(1, 2, d), m.choose(1, 2, 3), m.chance(0.5)
    w, bias = m.weight(window, d // groups, d), m.vector(d)
    reach = window - 1
    pad = (reach, 0) if causal else (reach // 2, reach - reach // 2)

    def apply(p: Any, x: Any, env: Env) -> Any:
        y = lax.conv_general_dilated(
            x, w(p), (1,), [pad], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=groups
        )
        return x + jnp.tanh(y + bias(p))

    return apply


@layer()
def image(m: Maker) -> Apply:
    """The width as a small image with channels: a convolution, a pooling, and back."""
    _b, s, d = m.shape
    c = d // 4
    w, back = m.weight(3, 3, c, 2 * c), m.weight(2 * c, d)
    pool = m.choose("mean", "max", "stride")

    def apply(p: Any, x: Any, env: Env) -> Any:
        b = x.shape[0]
        y = x.reshape(b * s, 2, 2, c)
        stride = (2, 2) if pool == "stride" else (1, 1)
        y = lax.conv_general_dilated(y, w(p), stride, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        if pool == "max":
            y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return x + jnp.tanh(y.mean((1, 2)) @ back(p)).reshape(b, s, d)

    return apply


@layer()
def experts(m: Maker) -> Apply:
    """A mixture of experts, chosen by top-k and combined by one-hot or by gathering, with a balancing loss."""
    _b, _s, d = m.shape
    n, best, gathering = m.choose(2, 4), m.choose(1, 2), m.chance(0.4)
    router, up, down = m.weight(d, n), m.weight(n, d, d), m.weight(n, d, d)

    def apply(p: Any, x: Any, env: Env) -> Any:
        chances = jax.nn.softmax(x @ router(p))
        top, which = lax.top_k(chances, best)
        top = top / top.sum(-1, keepdims=True)
        hidden = jnp.einsum("bsnd,nde->bsne", jax.nn.silu(jnp.einsum("bsd,nde->bsne", x, up(p))), down(p))
        if gathering:
            mixed = jnp.sum(jnp.take_along_axis(hidden, which[..., None], axis=2) * top[..., None], 2)
        else:
            mixed = jnp.einsum("bsnd,bskn,bsk->bsd", hidden, jax.nn.one_hot(which, n), top)
        env.terms.append(0.1 * jnp.mean(chances**2))
        return x + mixed

    return apply


@layer()
def ensemble(m: Maker) -> Apply:
    """vmap over the parameters of members, whose outputs are averaged."""
    _b, _s, d = m.shape
    w, bias = m.weight(3, d, d, scale=d**-0.5), m.weight(3, d)

    def member(w: Any, bias: Any, x: Any) -> Any:
        return jnp.tanh(x @ w + bias)

    return lambda p, x, env: jax.vmap(member, (0, 0, None))(w(p), bias(p), x).mean(0)


@layer()
def by_example(m: Maker) -> Apply:
    """vmap over the batch of a function of one example, which is itself a vmap over tokens."""
    d = m.shape[2]
    w, g = m.weight(d, d), m.vector(d)

    def token(p: Any, x: Any) -> Any:
        return jax.nn.softmax(w(p) @ x) * g(p)

    def example(p: Any, x: Any) -> Any:
        return x + jax.vmap(lambda t: token(p, t))(x)

    return lambda p, x, env: jax.vmap(lambda x: example(p, x))(x)


@layer()
def frequencies(m: Maker) -> Apply:
    """A filter of complex parameters between a Fourier transform and its inverse."""
    _b, s, d = m.shape
    kind = m.choose("rfft", "fft", "fft2", "long")
    n = s // 2 + 1
    shape = {"rfft": (n, d), "fft": (s, d), "fft2": (s, d), "long": (s + 1, d)}[kind]
    f = m.leaf(m.normal(*shape) + 1j * m.normal(*shape))

    def apply(p: Any, x: Any, env: Env) -> Any:
        if kind == "rfft":
            return x + jnp.fft.irfft(jnp.fft.rfft(x, axis=1) * p[f], n=s, axis=1)
        if kind == "fft":
            return jnp.real(jnp.fft.ifft(jnp.fft.fft(x, axis=1) * p[f], axis=1))
        if kind == "fft2":
            return x + jnp.real(jnp.fft.fft2(x, axes=(1, 2)) * p[f]) / np.sqrt(s * d)
        wide = jnp.fft.rfft(x, n=2 * s, axis=1) * p[f]
        return x + jnp.fft.irfft(wide, n=2 * s, axis=1)[:, :s]

    return apply


@layer()
def rotation(m: Maker) -> Apply:
    """Pairs of numbers as complex numbers, rotated by learned angles."""
    _b, _s, d = m.shape
    angle, size = m.vector(d // 2), m.vector(d // 2)

    def apply(p: Any, x: Any, env: Env) -> Any:
        z = (
            lax.complex(x[..., : d // 2], x[..., d // 2 :])
            * jnp.exp(1j * angle(p))
            * jnp.exp(-(size(p) ** 2))
        )
        return jnp.concatenate([jnp.real(z), jnp.imag(z)], -1)

    return apply


@layer()
def tied(m: Maker) -> Apply:
    """The same weight twice, once transposed; another part may use it as well."""
    d = m.shape[2]
    name, act = m.common("tied", d, d, scale=d**-0.5), m.choose(*ACTIVATIONS)
    return lambda p, x, env: x + act(x @ env.shared[name]) @ env.shared[name].T


@layer()
def condition(m: Maker) -> Apply:
    """FiLM, where a leaf of the batch scales and shifts channels; or squeeze and excitation."""
    b, _s, d = m.shape
    excited = m.chance(0.5)
    given = "" if excited else m.input("condition", m.normal(b, 4))
    w, v = m.weight(d if excited else 4, d), m.weight(d if excited else 4, d)

    def apply(p: Any, x: Any, env: Env) -> Any:
        c = x.mean(1) if excited else env.batch[given]
        return x * jax.nn.sigmoid(c @ w(p))[:, None] + jnp.tanh(c @ v(p))[:, None]

    return apply


@layer()
def bilinear(m: Maker) -> Apply:
    _b, _s, d = m.shape
    w, scale = m.weight(4, d, 4, scale=0.2), m.weight(d, d)
    return lambda p, x, env: x @ scale(p) + jnp.einsum("bsi,idj,bsj->bsd", x[..., :4], w(p), x[..., -4:])


@layer()
def mixer(m: Maker) -> Apply:
    """Products over tokens, then over channels."""
    _b, s, d = m.shape
    tokens, channels = m.weight(s, s), m.weight(d, d)
    return lambda p, x, env: jnp.einsum("bsd,st->btd", x, tokens(p)) + jax.nn.gelu(x @ channels(p))


@layer()
def mixed_precision(m: Maker) -> Apply:
    """float32 inside, float64 outside."""
    d = m.shape[2]
    w = m.weight(d, d)
    m.epsilon = max(m.epsilon, 2.0**-23)

    def apply(p: Any, x: Any, env: Env) -> Any:
        y = x.astype(jnp.float32) @ w(p).astype(jnp.float32)
        return x + jnp.tanh(y).astype(x.dtype)

    return apply


@layer()
def kernel_machine(m: Maker) -> Apply:
    """Distances to learned centres."""
    d = m.shape[2]
    centres, width, w = m.weight(6, d), m.vector(6), m.weight(6, d)

    def apply(p: Any, x: Any, env: Env) -> Any:
        apart = jnp.sum((x[:, :, None] - centres(p)) ** 2, -1)
        return jnp.exp(-apart * jax.nn.softplus(width(p)) / d) @ w(p)

    return apply
