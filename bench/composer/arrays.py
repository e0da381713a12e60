"""Layers about arrays: random keys, scattered writes, experts, convolutions, complex numbers, reductions, integers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.composer.maker import Apply, Env, Maker, divisors, layer
from bench.composer.values import TOKENS


@layer(whole=True)
def typed_keys(m: Maker) -> Apply:
    """A typed random key in the batch: split, folded in, used in a scan; categorical, truncated, permuted, uniform."""
    _b, s, d = m.shape
    key = m.input("typed", jax.random.key(int(m.values.integers(1 << 30))))  # type: ignore[arg-type]
    w, kind = m.weight(d, d), m.choose("split", "fold", "scan", "categorical", "permuted", "uniform")

    def apply(p: Any, x: Any, env: Env) -> Any:
        k = env.batch[key]
        y = x @ w(p)
        if kind == "split":
            a, b = jax.random.split(k)
            return y * jax.random.bernoulli(a, 0.7, y.shape) + 0.1 * jax.random.normal(b, y.shape, y.dtype)
        if kind == "fold":
            masks = [jax.random.bernoulli(jax.random.fold_in(k, i), 0.7, y.shape) for i in range(2)]
            return y * masks[0] + jnp.sin(y) * masks[1]
        if kind == "scan":

            def turn(carry: Any, _: Any) -> Any:
                h, k = carry
                k, mine = jax.random.split(k)
                return (h + jnp.tanh(h @ w(p)) * jax.random.bernoulli(mine, 0.8, h.shape), k), None

            return lax.scan(turn, (x, k), None, length=2)[0][0]
        if kind == "categorical":
            chosen = jax.nn.one_hot(jax.random.categorical(k, lax.stop_gradient(y)), d, dtype=y.dtype)
            return x + chosen * jax.nn.softmax(y)
        if kind == "permuted":
            return x + jax.random.permutation(k, y, axis=1)
        return x + y * jax.random.uniform(k, (s, 1), y.dtype) + jax.random.truncated_normal(k, -1, 1, (d,))

    return apply


@layer(2)
def indexed_writes(m: Maker) -> Apply:
    """Scatters that multiply, take the minimum, or drop indices out of range; strided writes; counts; rolls."""
    b, s, d = m.shape
    at = m.input("at", m.values.integers(0, s + 2, (b, s)).astype(np.int32))
    by = m.input("by", np.asarray(m.values.integers(1, s), np.int32))
    w = m.weight(d, d)
    kind = m.choose("multiply", "least", "drop", "strided", "counts", "roll", "fill", "segment", "mask")

    def apply(p: Any, x: Any, env: Env) -> Any:
        b = x.shape[0]
        y, i = jnp.tanh(x @ w(p)), env.batch[at]
        rows = jnp.arange(b)[:, None]
        if kind == "multiply":
            return x.at[rows, jnp.arange(s)[::-1]].multiply(1 + 0.1 * y, unique_indices=True)
        if kind == "least":
            return x + jnp.full((b, s, d), 0.5).at[rows, i % s].min(y)
        if kind == "drop":
            return x.at[rows, i].add(y, mode="drop")
        if kind == "strided":
            return x.at[:, ::2].set(y[:, ::2]).at[:, 0, : d // 2].add(1.0)
        if kind == "counts":
            counts = jax.vmap(lambda t: jnp.bincount(t, length=s + 2))(i)
            return x + y * counts[:, :s, None]
        if kind == "roll":
            return x + jnp.roll(y, env.batch[by], axis=1)
        if kind == "fill":
            return x + jax.vmap(lambda y, i: jnp.take(y, i, axis=0, mode="fill", fill_value=0.1))(y, i)
        if kind == "segment":
            return x + jax.vmap(lambda y, i: jax.ops.segment_max(y, i % s, s, indices_are_sorted=False))(
                y, i
            ).clip(-2, 2)
        return jnp.where((i % 2 == 0)[..., None], y, x)

    return apply


@layer(2)
def dispatched_experts(m: Maker) -> Apply:
    """Experts with a capacity: tokens are dispatched by cumulative sums, by sorting, or by a ragged product."""
    b, s, d = m.shape
    n, kind = m.choose(2, 4), m.choose("capacity", "sorted", "ragged")
    router, up = m.weight(d, n), m.weight(n, d, d)
    whole = b * s

    def apply(p: Any, x: Any, env: Env) -> Any:
        b = x.shape[0]
        chances = jax.nn.softmax(x @ router(p))
        best = jnp.argmax(chances, -1)
        gate = jnp.max(chances, -1)
        if kind == "capacity":
            # The position in the expert's queue of each example; tokens beyond the capacity are dropped.
            chosen = jax.nn.one_hot(best, n, dtype=x.dtype)
            place = jnp.cumsum(chosen, 1) * chosen - 1
            there = jax.nn.one_hot(place.astype(jnp.int32), 2, dtype=x.dtype) * chosen[..., None]
            sent = jnp.einsum("bsnc,bsd->bncd", there, x)
            done = jnp.tanh(jnp.einsum("bncd,nde->bnce", sent, up(p)))
            return x + jnp.einsum("bsnc,bnce,bs->bse", there, done, gate)

        def one(x: Any, best: Any, gate: Any) -> Any:
            order = jnp.argsort(best, stable=True)
            sizes = jnp.bincount(best, length=n)
            rows = x[order]
            if kind == "ragged":
                done = lax.ragged_dot(rows, up(p), sizes.astype(jnp.int32))
            else:
                done = jnp.einsum("sd,sde->se", rows, up(p)[best[order]])
            return jnp.zeros_like(x).at[order].set(jnp.tanh(done)) * gate[:, None]

        if kind == "ragged":
            flat = x.reshape(-1, d), best.reshape(-1), gate.reshape(-1)
            return x + one(*flat).reshape(b, s, d)
        return x + jax.vmap(one)(x, best, gate)

    assert whole
    return apply


@layer()
def convolutions(m: Maker) -> Apply:
    """Convolutions: transposed, dilated, over patches, pooled by mean or minimum; in two dims, depthwise."""
    _b, s, d = m.shape
    kind = m.choose("transposed", "dilated", "patches", "mean", "least", "depthwise", "correlate")
    w, v = m.weight(3, d, d), m.weight(d, d)

    def apply(p: Any, x: Any, env: Env) -> Any:
        if kind == "transposed":
            y = lax.conv_transpose(x, w(p), (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
            return x + jnp.tanh(y).reshape(-1, s, 2, d).mean(2)
        if kind == "dilated":
            y = lax.conv_general_dilated(
                x, w(p), (1,), [(4, 0)], rhs_dilation=(2,), dimension_numbers=("NWC", "WIO", "NWC")
            )
            return x + jnp.tanh(y)
        if kind == "patches":
            y = lax.conv_general_dilated_patches(
                x, (3,), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
            )
            return x + jnp.tanh(y.reshape(-1, s, d, 3).mean(-1) @ v(p))
        if kind in ("mean", "least"):
            of, start = (lax.add, 0.0) if kind == "mean" else (lax.min, jnp.inf)
            y = lax.reduce_window(x @ v(p), start, of, (1, 3, 1), (1, 1, 1), "SAME")
            return x + y / 3
        if kind == "depthwise":
            y = (x @ v(p)).reshape(-1, s, 2, d // 2)
            f = w(p)[:, :1, : d // 2].reshape(3, 1, 1, d // 2)
            return x + lax.conv_general_dilated(
                y,
                f,
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=d // 2,
            ).reshape(-1, s, d)
        f = v(p)[0, :3]
        return x + jax.vmap(jax.vmap(lambda t: jnp.convolve(t, f, mode="same")))(x)

    return apply


@layer()
def complex_products(m: Maker) -> Apply:
    """Products of complex weights and their conjugates, magnitudes and angles."""
    _b, _s, d = m.shape
    w = m.leaf((m.normal(d, d) + 1j * m.normal(d, d)) / d**0.5)
    kind = m.choose("magnitude", "gram", "angle", "modrelu", "scan")
    bias = m.vector(d)

    def apply(p: Any, x: Any, env: Env) -> Any:
        z = x.astype(jnp.complex128) @ p[w]
        if kind == "magnitude":
            return x + jnp.abs(z) * bias(p)
        if kind == "gram":
            scores = jnp.real(jnp.einsum("bqd,bkd->bqk", z, jnp.conj(z))) / d
            return x + jax.nn.softmax(scores) @ jnp.imag(z)
        if kind == "angle":
            return x + jnp.sin(jnp.angle(z + 3.0)) + jnp.real(z * jnp.conj(z)) * 0.1
        if kind == "modrelu":
            size = jnp.abs(z) + 1e-3
            return x + jnp.real(jax.nn.relu(size + bias(p)) * z / size)
        turn = jnp.exp(1j * bias(p))
        said = lax.scan(lambda h, t: (h * turn * 0.9 + t,) * 2, z[:, 0], jnp.swapaxes(z, 0, 1))[1]
        return x + jnp.real(jnp.swapaxes(said, 0, 1))

    return apply


@layer(2)
def reductions(m: Maker) -> Apply:
    """Reductions: products, deviations, norms of other orders, quantiles, reversed cumulative sums, custom monoids."""
    _b, s, d = m.shape
    kind = m.choose(
        "prod", "std", "norms", "quantile", "reverse", "monoid", "associative", "nan", "any", "logsum"
    )
    w, g = m.weight(d, d), m.vector(d)

    def apply(p: Any, x: Any, env: Env) -> Any:
        y = jnp.tanh(x @ w(p))
        if kind == "prod":
            return x * jnp.prod(1 + 0.1 * y, axis=1, keepdims=True)
        if kind == "std":
            return x + y / (jnp.std(y, axis=-1, ddof=1, keepdims=True) + 0.3) * g(p)
        if kind == "norms":
            return (
                x
                + y / (1 + jnp.linalg.norm(y, ord=1, axis=-1, keepdims=True))
                + jnp.abs(y).max(1, keepdims=True)
            )
        if kind == "quantile":
            return x + y - jnp.quantile(y, 0.3, axis=1, keepdims=True)
        if kind == "reverse":
            return x + lax.cumsum(y, axis=1, reverse=True) * 0.3
        if kind == "monoid":
            total, many = lax.reduce(
                (y, y * 2), (0.0, 1.0), lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])), (1,)
            )
            return x + (total + many)[:, None] * g(p)
        if kind == "associative":
            decay = jax.nn.sigmoid(y + g(p))
            return lax.associative_scan(
                lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, x), reverse=True, axis=1
            )[1]
        if kind == "nan":
            holes = jnp.where(jnp.arange(s)[:, None] % 2 == 0, y, jnp.nan)
            return x + jnp.nan_to_num(holes) + jnp.nanmean(holes, axis=1, keepdims=True)
        if kind == "any":
            some = jnp.any(y > 0.5, axis=-1, keepdims=True) & ~jnp.all(y > -0.5, axis=1, keepdims=True)
            return x + jnp.where(some, y, 0.1 * y)
        return x + jax.nn.logsumexp(y, b=jax.nn.softplus(g(p)), axis=-1, keepdims=True)

    return apply


@layer()
def contractions(m: Maker) -> Apply:
    """einsum of three operands, tensordot, Kronecker products, polynomials, interpolation."""
    _b, s, d = m.shape
    kind = m.choose("three", "tensordot", "kron", "poly", "interp", "trilinear", "outer", "trace")
    w, v, g = m.weight(d, d), m.weight(d, d), m.vector(d)

    def apply(p: Any, x: Any, env: Env) -> Any:
        if kind == "three":
            return x + jnp.einsum("bsd,de,ef->bsf", x, w(p), v(p))
        if kind == "tensordot":
            return x + jnp.tanh(jnp.tensordot(x, w(p), axes=((2,), (1,))))
        if kind == "kron":
            return x + jnp.tanh(x @ jnp.kron(w(p)[:2, :2], v(p)[: d // 2, : d // 2]))
        if kind == "poly":
            return jnp.polyval(g(p)[:3], jnp.tanh(x @ w(p)))
        if kind == "interp":
            return x + jnp.interp(jnp.tanh(x @ w(p)), jnp.linspace(-1, 1, d), g(p))
        if kind == "trilinear":
            return x + jnp.einsum("bsd,btd,bte->bse", jnp.tanh(x @ w(p)), x, x @ v(p)) / s / d
        if kind == "outer":
            return x + jnp.einsum("bsi,bsj,ij->bs", x, jnp.tanh(x), w(p))[..., None] * g(p) / d
        gram = jnp.einsum("bsi,bsj->bij", x, x @ w(p))
        return (
            x
            + jnp.trace(gram, axis1=1, axis2=2)[:, None, None] * 0.05
            + jnp.diagonal(gram, axis1=1, axis2=2)[:, None] * g(p)
        )

    return apply


@layer()
def integers_and_bits(m: Maker) -> Apply:
    """Weights quantized to eight bits with a learned scale; bits packed in integers; hashed features."""
    b, s, d = m.shape
    kind = m.choose("int8", "bits", "hashed", "bitcast")
    codes = m.leaf(m.values.integers(-7, 8, (d, d)).astype(np.int8))
    scale, w = m.vector(d, 1), m.weight(TOKENS, d)
    ids = m.input("ids", m.values.integers(0, 1 << 20, (b, s)).astype(np.uint32))

    def apply(p: Any, x: Any, env: Env) -> Any:
        if kind == "int8":
            return x + jnp.tanh(x @ (p[codes].astype(x.dtype) * scale(p) / 7))
        if kind == "bits":
            bits = (p[codes].view(jnp.uint8) >> 1) & 1
            return x + jnp.tanh(x @ jnp.where(bits == 1, scale(p), 0.1))
        i = env.batch[ids]
        if kind == "hashed":
            return x + w(p)[(i * jnp.uint32(2654435761)) % TOKENS]
        low = lax.bitcast_convert_type(i, jnp.uint8)[..., 0] % TOKENS
        return x + w(p)[low]

    return apply


@layer()
def chunks(m: Maker) -> Apply:
    """The sequence in chunks with halos: padded, gathered by a sliding window, concatenated again."""
    _b, s, d = m.shape
    size = m.choose(*divisors(s))
    w, kind = m.weight(d, d), m.choose("window", "halo", "tiles")

    def apply(p: Any, x: Any, env: Env) -> Any:
        b = x.shape[0]
        y = x @ w(p)
        if kind == "window":
            at = jnp.arange(s)[:, None] + jnp.arange(2)
            return x + jnp.pad(y, ((0, 0), (1, 0), (0, 0)))[:, at].max(2)
        if kind == "halo":
            parts = y.reshape(b, s // size, size, d)
            before = jnp.pad(parts[:, :-1, -1:], ((0, 0), (1, 0), (0, 0), (0, 0)))
            return x + jnp.concatenate([before, parts], 2)[:, :, :-1].reshape(b, s, d)
        tiled = jnp.tile(y[:, :1], (1, s, 1)) + jnp.repeat(y[:, -1:], s, axis=1)
        return x + jnp.tanh(tiled)

    return apply
