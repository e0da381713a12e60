"""Layers of helper functions: jitted, mapped, with derivative rules and solvers, with loops and indices of many forms."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.composer.maker import Apply, Env, Maker, divisors, layer

TOKENS = 12


@layer(2)
def jitted_helpers(m: Maker) -> Apply:
    """jax.jit within jax.jit: called twice, with static arguments, inlined, one that closes over a traced weight."""
    d = m.shape[2]
    w, v, gain = m.weight(d, d), m.weight(d, d), m.vector(d, 1)
    inline, named = m.chance(0.5), m.chance(0.5)

    @partial(jax.jit, static_argnames=("act", "scale"), inline=inline)
    def dense(x: Any, w: Any, act: str = "tanh", scale: float = 1.0) -> Any:
        return getattr(jnp, act)(x @ w) * scale

    @jax.jit
    def norm(x: Any, gain: Any) -> Any:
        return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-2) * gain

    def apply(p: Any, x: Any, env: Env) -> Any:
        weight = v(p)

        @jax.jit
        def closed(x: Any) -> Any:
            return dense(x, weight, act="sin") + norm(x, gain(p))

        with jax.named_scope("helper"):
            x = dense(x, w(p)) + dense(x[:, :1], w(p), scale=0.5)
        return jax.named_call(closed, name="closed")(x) if named else closed(x)

    return apply


@layer()
def literals(m: Maker) -> Apply:
    """Booleans, numbers and arrays of the program itself, several results of one equation, one of them constant."""
    b, s, d = m.shape
    w, kind = m.weight(d, d), m.choose("full", "bool", "placed", "where", "iota", "large")

    def apply(p: Any, x: Any, env: Env) -> Any:
        b = x.shape[0]
        y = x @ w(p)
        if kind == "full":
            return y * jnp.full((s, 1), 0.5) + jnp.full_like(y, 2) * jnp.ones(())
        if kind == "bool":
            on = jnp.broadcast_to(jnp.asarray(True), (b, s, 1)) & (jnp.arange(d) > 1)
            return jnp.where(on, y, 0.5 * x)
        if kind == "placed":
            y, zero = jax.device_put((y, jnp.zeros((s, d))))
            return jnp.tanh(y) + zero
        if kind == "where":
            return jnp.where(True, jnp.sin(y), 0.0) + lax.select(jnp.full(y.shape, False), y, x)
        if kind == "iota":
            return y + lax.broadcasted_iota(x.dtype, (s, d), 0) / s
        return jnp.where(jnp.uint32(0xFFFFFFFF) > 0, y * 1e-3, jnp.inf) + x * jnp.float64(np.pi)

    return apply


@layer(2)
def derivative_rules(m: Maker) -> Apply:
    """custom_vjp with arguments that are not differentiated, integers, trees, closures; within scan, vmap, remat."""
    _b, s, d = m.shape
    w, bias, kind = (
        m.weight(d, d),
        m.vector(d),
        m.choose("static", "integer", "tree", "closure", "scan", "vmap", "remat", "nested"),
    )

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def scaled(k: float, x: Any) -> Any:
        return jnp.sin(k * x)

    scaled.defvjp(lambda k, x: (scaled(k, x), x), lambda k, x, g: (g * k * jnp.cos(k * x) * 0.9,))

    @jax.custom_vjp
    def picked(x: Any, at: Any) -> Any:
        return jnp.take(x, at, axis=1)

    def picked_back(kept: Any, g: Any) -> Any:
        shape, at = kept
        return jnp.zeros(shape.shape).at[:, at].add(g) * 0.5, None

    picked.defvjp(lambda x, at: (picked(x, at), (x, at)), picked_back)

    @jax.custom_vjp
    def affine(tree: Any, x: Any) -> Any:
        return x @ tree["w"] + tree["b"]

    def affine_back(kept: Any, g: Any) -> Any:
        tree, x = kept
        return {"w": jnp.einsum("bsd,bse->de", x, g), "b": g.sum((0, 1))}, g @ tree["w"].T

    affine.defvjp(lambda tree, x: (affine(tree, x), (tree, x)), affine_back)

    def apply(p: Any, x: Any, env: Env) -> Any:
        if kind == "tree":
            return affine({"w": w(p), "b": bias(p)}, x)
        y = x @ w(p)
        if kind == "static":
            return scaled(0.7, y) + scaled(2.0, x)
        if kind == "integer":
            return x + picked(y, jnp.arange(s)[::-1])
        if kind == "scan":
            return lax.scan(lambda h, _: (scaled(0.5, h) + h, None), y, None, length=3)[0]
        if kind == "vmap":
            return jax.vmap(lambda t: scaled(0.5, t))(y)
        if kind == "remat":
            return jax.checkpoint(lambda t: scaled(0.5, t) + bias(p))(y)
        if kind == "nested":

            @jax.custom_jvp
            def outer(t: Any) -> Any:
                return scaled(0.5, t) * t

            outer.defjvps(lambda dt, out, t: dt * (scaled(0.5, t) + 1.0))
            return outer(y)
        size = jnp.mean(env.batch["x"] ** 2)

        @jax.custom_gradient
        def closed(t: Any) -> Any:
            return jnp.tanh(t), lambda g: g * (1 - jnp.tanh(t) ** 2) * jnp.exp(-size)

        return closed(y) + bias(p)

    return apply


@layer()
def solvers(m: Maker) -> Apply:
    """Conjugate gradients, a linear solve and a root with derivatives of their own, over each example."""
    d = m.shape[2]
    w, kind = m.weight(d, 4), m.choose("cg", "solve", "root", "triangular", "cholesky")

    def apply(p: Any, x: Any, env: Env) -> Any:
        y = x @ w(p)
        a = jnp.einsum("bsi,bsj->bij", y, y) + 3 * jnp.eye(4)
        b = y.mean(1)
        if kind == "cg":
            z = jax.vmap(lambda a, b: jax.scipy.sparse.linalg.cg(lambda v: a @ v, b, maxiter=4)[0])(a, b)
        elif kind == "solve":

            def one(a: Any, b: Any) -> Any:
                return lax.custom_linear_solve(
                    lambda v: a @ v, b, lambda _, b: jnp.linalg.solve(a, b), symmetric=True
                )

            z = jax.vmap(one)(a, b)
        elif kind == "root":

            def solve(f: Any, guess: Any) -> Any:
                return lax.fori_loop(0, 30, lambda i, z: z - 0.5 * f(z), guess)

            def tangent(g: Any, y: Any) -> Any:
                return y / g(jnp.ones_like(y))

            z = lax.custom_root(lambda z: z + 0.2 * jnp.sin(z) - b, jnp.zeros_like(b), solve, tangent)
        elif kind == "triangular":
            z = lax.linalg.triangular_solve(jnp.tril(a), b[..., None], left_side=True, lower=True)[..., 0]
        else:
            z = jax.vmap(lambda a, b: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(a), True), b))(a, b)
        return x + z.sum(-1)[:, None, None]

    return apply


@layer()
def decompositions(m: Maker) -> Apply:
    """QR, singular values, eigenvalues, a determinant and an exponential of a small matrix for each example."""
    d = m.shape[2]
    w, kind = m.weight(d, 3), m.choose("qr", "svd", "eigh", "det", "expm", "pinv")

    def apply(p: Any, x: Any, env: Env) -> Any:
        y = jnp.tanh(x @ w(p))
        a = jnp.einsum("bsi,bsj->bij", y, y) + jnp.diag(jnp.arange(1.0, 4.0))
        if kind == "qr":
            z = jnp.abs(jnp.linalg.qr(a)[1]).sum((1, 2))
        elif kind == "svd":
            z = jnp.linalg.svd(a, compute_uv=False).sum(-1)
        elif kind == "eigh":
            z = jnp.exp(-jnp.linalg.eigh(a)[0]).sum(-1)
        elif kind == "det":
            z = jnp.linalg.det(a)
        elif kind == "expm":
            z = jax.vmap(jax.scipy.linalg.expm)(-a * 0.1).sum((1, 2))
        else:
            z = jnp.linalg.inv(a + 2 * jnp.eye(3)).sum((1, 2))
        return x + z[:, None, None] * 0.1

    return apply


@layer(2)
def scans_of_many_forms(m: Maker) -> Apply:
    """Without inputs, unrolled, with a counter and a key in the carry, with a branch, a written buffer, a stop."""
    _b, s, d = m.shape
    kind = m.choose("length", "unrolled", "counter", "branch", "buffer", "stacked", "reverse", "tied")
    w, u = m.weight(d, d), m.weight(d, d)
    layers = [m.weight(d, d) for _ in range(3)] if kind == "stacked" else []

    def apply(p: Any, x: Any, env: Env) -> Any:
        turns = jnp.swapaxes(x, 0, 1)
        if kind == "length":
            return lax.scan(lambda h, _: (h + jnp.tanh(h @ w(p)), None), x, None, length=3)[0]
        if kind == "unrolled":
            h, said = lax.scan(
                lambda h, t: (jnp.tanh(h @ w(p) + t), h), jnp.zeros_like(x[:, 0]), turns, unroll=2
            )
            return jnp.swapaxes(said, 0, 1) + h[:, None]
        if kind == "counter":

            def counted(carry: Any, t: Any) -> Any:
                n, h = carry["n"], carry["h"]
                h = jnp.tanh(h @ w(p) + t / (n + 1))
                return {"n": n + 1, "h": h}, (h, n)

            last, (said, n) = lax.scan(counted, {"n": jnp.int32(0), "h": jnp.zeros_like(x[:, 0])}, turns)
            return jnp.swapaxes(said * (n[:, None, None] + 1.0), 0, 1) / last["n"]
        if kind == "branch":

            def either(h: Any, now: Any) -> Any:
                i, t = now
                h = lax.cond(i % 2 == 0, lambda h: jnp.tanh(h @ w(p)), lambda h: jnp.sin(h @ u(p)), h + t)
                return h, h

            said = lax.scan(either, jnp.zeros_like(x[:, 0]), (jnp.arange(s), turns))[1]
            return jnp.swapaxes(said, 0, 1)
        if kind == "buffer":

            def written(carry: Any, i: Any) -> Any:
                buffer, h = carry
                h = jnp.tanh(h @ w(p) + lax.dynamic_index_in_dim(x, i, 1, keepdims=False))
                buffer = lax.dynamic_update_slice_in_dim(buffer, h[:, None], i, 1)
                return (buffer, h), buffer.mean((1, 2))

            (buffer, _), said = lax.scan(
                written, (jnp.zeros_like(x), jnp.zeros_like(x[:, 0])), jnp.arange(s)
            )
            return buffer + said.mean(0)[:, None, None]
        if kind == "stacked":
            weights = jnp.stack([f(p) for f in layers])
            return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), jnp.mean(h)), x, weights)[0]
        if kind == "reverse":
            h, said = lax.scan(
                lambda h, t: (0.9 * h + t @ w(p), (h, t * 2)), jnp.zeros_like(x[:, 0]), turns, reverse=True
            )
            return jnp.swapaxes(said[0] + said[1], 0, 1) + h[:, None]
        # A weight that is read in the loop, before it and behind it.
        h = x @ w(p)
        h = lax.scan(lambda h, _: (jnp.tanh(h @ w(p) + x @ u(p)), None), h, None, length=2)[0]
        return h @ w(p).T

    return apply


@layer()
def loops_of_many_forms(m: Maker) -> Apply:
    """Branches within branches, a switch under vmap, a map in batches, a while loop that is only run forward."""
    _b, s, d = m.shape
    kind = m.choose("nested", "mapped_switch", "batched_map", "while", "fori")
    w, v = m.weight(d, d), m.weight(d, d)
    which = m.input("which", m.values.integers(0, 3, m.shape[0]).astype(np.int32))

    def apply(p: Any, x: Any, env: Env) -> Any:
        at = env.batch[which]
        y = x @ w(p)
        if kind == "nested":
            inner = lambda y: lax.cond(y.sum() > 1, jnp.sin, jnp.cos, y)  # noqa: E731
            return lax.cond(y.mean() > 0, inner, lambda y: jnp.tanh(y @ v(p)), y)
        if kind == "mapped_switch":
            return jax.vmap(lambda i, t: lax.switch(i, (jnp.sin, jnp.tanh, lambda t: t @ v(p)), t))(at, y)
        if kind == "batched_map":
            return lax.map(lambda t: jnp.tanh(t @ v(p)), y, batch_size=2)
        if kind == "while":
            scale = lax.while_loop(
                lambda z: jnp.max(z) > 1, lambda z: z * 0.5, lax.stop_gradient(jnp.abs(y).mean((1, 2)))
            )
            return x + y * scale[:, None, None]
        return lax.fori_loop(0, 3, lambda i, z: z.at[:, i % s].add(jnp.sin(z[:, i % s] @ v(p))), y)

    return apply


@layer(whole=True)
def typed_keys(m: Maker) -> Apply:
    """A typed random key in the batch: split, folded in, in a scan; categorical, truncated, permuted, uniform."""
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
    """Scatters that multiply, take the least, drop what is outside; strided writes; counts; rolls by a traced number."""
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
    """Tokens to experts with a capacity: by sums over the past, by sorting, by a ragged product."""
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
            # A place in each example's queue of its expert; those behind the capacity are dropped.
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
    """Transposed, dilated, over patches, pooled by mean or least; in two dims, depthwise."""
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
    _b, s, d = m.shape
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
    """Products, deviations, norms of other orders, quantiles, reversed cumulative sums, monoids that users write."""
    _b, s, d = m.shape
    kind = m.choose("prod", "std", "norms", "quantile", "reverse", "monoid", "associative", "nan", "any", "logsum")
    w, g = m.weight(d, d), m.vector(d)

    def apply(p: Any, x: Any, env: Env) -> Any:
        y = jnp.tanh(x @ w(p))
        if kind == "prod":
            return x * jnp.prod(1 + 0.1 * y, axis=1, keepdims=True)
        if kind == "std":
            return x + y / (jnp.std(y, axis=-1, ddof=1, keepdims=True) + 0.3) * g(p)
        if kind == "norms":
            return x + y / (1 + jnp.linalg.norm(y, ord=1, axis=-1, keepdims=True)) + jnp.abs(y).max(1, keepdims=True)
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
        return x + jnp.trace(gram, axis1=1, axis2=2)[:, None, None] * 0.05 + jnp.diagonal(
            gram, axis1=1, axis2=2
        )[:, None] * g(p)

    return apply


@layer(whole=True)
def mapped_collectives(m: Maker) -> Apply:
    """vmap with a named axis over the batch, and sums, means and gathers over it."""
    d = m.shape[2]
    w, kind = m.weight(d, d), m.choose("mean", "sum", "gather", "max", "index", "permute")

    def apply(p: Any, x: Any, env: Env) -> Any:
        b = x.shape[0]

        def one(t: Any) -> Any:
            y = jnp.tanh(t @ w(p))
            if kind == "mean":
                return t + y - lax.pmean(y, "examples")
            if kind == "sum":
                return t + y / lax.psum(jnp.exp(y), "examples")
            if kind == "gather":
                return t + lax.all_gather(y, "examples").max(0)
            if kind == "max":
                return t + y / lax.pmax(jnp.abs(lax.stop_gradient(y)) + 1, "examples")
            if kind == "index":
                return t + y * lax.axis_index("examples") / b
            return t + lax.ppermute(y, "examples", [(i, (i + 1) % b) for i in range(b)])

        return jax.vmap(one, axis_name="examples")(x)

    return apply


@layer()
def mapped_axes(m: Maker) -> Apply:
    """vmap with axes in dicts and out of others, nested, over weights and not over values."""
    _b, s, d = m.shape
    kind = m.choose("tree", "out", "heads", "weights", "vectorize")
    w, g = m.weight(d, d), m.weight(3, d)

    def apply(p: Any, x: Any, env: Env) -> Any:
        if kind == "tree":
            f = jax.vmap(lambda t: jnp.tanh(t["x"] @ t["w"]), in_axes=({"x": 1, "w": None},), out_axes=1)
            return x + f({"x": x, "w": w(p)})
        if kind == "out":
            return x + jax.vmap(lambda t: jnp.sin(t @ w(p)), in_axes=0, out_axes=2)(x).transpose(2, 0, 1)
        if kind == "heads":
            y = (x @ w(p)).reshape(-1, s, 2, d // 2)
            f = jax.vmap(jax.vmap(lambda q: jax.nn.softmax(q @ q.T) @ q, in_axes=1, out_axes=1))
            return x + f(y).reshape(-1, s, d)
        if kind == "weights":
            return x + jax.vmap(lambda g: jnp.tanh(x * g), in_axes=0)(g(p)).mean(0)
        return x + jnp.vectorize(lambda a, b: jnp.tanh(a @ b), signature="(s,d),(d,e)->(s,e)")(x, w(p))

    return apply


@layer()
def higher_derivatives(m: Maker) -> Apply:
    """Steps of an inner optimisation on weights, products with a Hessian, Jacobians, a transposed linear function."""
    d = m.shape[2]
    kind = m.choose("maml", "hessian", "jacobian", "transpose", "linearize", "divergence")
    w, v = m.weight(d, d), m.weight(d, 2)

    def apply(p: Any, x: Any, env: Env) -> Any:
        weight = w(p)
        if kind == "maml":
            inner = lambda w: jnp.mean(jnp.tanh(x @ w) ** 2)  # noqa: E731
            for _ in range(2):
                weight = weight - 0.3 * jax.grad(inner)(weight)
            return x + jnp.tanh(x @ weight)
        if kind == "hessian":
            energy = lambda t: jnp.sum(jnp.log(jnp.cosh(t @ weight)))  # noqa: E731
            return x + 0.1 * jax.jvp(jax.grad(energy), (x,), (jnp.sin(x),))[1]
        if kind == "jacobian":
            f = lambda t: jnp.tanh(t @ v(p))  # noqa: E731
            return x + jax.vmap(jax.vmap(jax.jacrev(f)))(x).sum(2)
        if kind == "transpose":
            f = lambda t: t @ weight  # noqa: E731
            return x + jax.linear_transpose(f, x)(jnp.sin(x))[0]
        if kind == "linearize":
            y, f = jax.linearize(lambda t: jnp.tanh(t @ weight), x)
            return y + f(x)
        f = lambda t: jnp.tanh(t @ v(p))  # noqa: E731
        each = jax.vmap(jax.vmap(lambda t: jax.jacfwd(f)(t).sum()))(x)
        return x + 0.1 * each[..., None]

    return apply


@layer()
def checkpoints_of_many_forms(m: Maker) -> Apply:
    """jax.checkpoint nested, within a scan, with static arguments, with policies that are joined, of a jitted helper."""
    d = m.shape[2]
    up, down = m.weight(d, d), m.weight(d, d)
    kind = m.choose("nested", "static", "joined", "jitted", "scan", "named")
    policies = jax.checkpoint_policies

    def apply(p: Any, x: Any, env: Env) -> Any:
        def block(x: Any, twice: bool = False) -> Any:
            h = jnp.tanh(jax.ad_checkpoint.checkpoint_name(x @ up(p), "up"))
            return x + h @ down(p) * (2 if twice else 1)

        if kind == "nested":
            return jax.checkpoint(lambda x: jax.checkpoint(block)(jnp.sin(x)))(x)
        if kind == "static":
            return jax.checkpoint(block, static_argnums=(1,), prevent_cse=False)(x, True)
        if kind == "joined":
            both = policies.save_from_both_policies(
                policies.dots_saveable, policies.save_only_these_names("up")
            )
            return jax.checkpoint(block, policy=both)(x)
        if kind == "jitted":
            return jax.jit(jax.checkpoint(jax.jit(block)))(x)
        if kind == "scan":
            body = jax.checkpoint(lambda h, _: (block(h), None), prevent_cse=False)
            return lax.scan(body, x, None, length=2)[0]
        return jax.checkpoint(block, policy=policies.save_anything_except_these_names("up"))(x)

    return apply


@layer()
def integers_and_bits(m: Maker) -> Apply:
    """Quantised weights of eight bits with a learned scale; bits packed in integers; hashed features."""
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
    """The sequence in chunks with halos: padded, gathered by a sliding window, joined again."""
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
