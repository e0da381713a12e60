"""Layers of helper functions: jitted, mapped, with derivative rules, solvers, loops and checkpoints of many forms."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from bench.composer.maker import Apply, Env, Maker, layer


@layer(2)
def jitted_helpers(m: Maker) -> Apply:
    """jax.jit inside jax.jit: called twice, with static arguments, inlined, or with a closure over a traced weight."""
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
    """Literal booleans, numbers and arrays; several results of one equation, of which one is constant."""
    _b, s, d = m.shape
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


@jax.custom_vjp
def _affine(tree: Any, x: Any) -> Any:
    return x @ tree["w"] + tree["b"]


def _affine_back(kept: Any, g: Any) -> Any:
    tree, x = kept
    return {"w": jnp.einsum("bsd,bse->de", x, g), "b": g.sum((0, 1))}, g @ tree["w"].T


_affine.defvjp(lambda tree, x: (_affine(tree, x), (tree, x)), _affine_back)


@layer(2)
def derivative_rules(m: Maker) -> Apply:
    """custom_vjp with nondifferentiable arguments, integers, trees and closures; inside scan, vmap and remat."""
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

    def apply(p: Any, x: Any, env: Env) -> Any:
        if kind == "tree":
            return _affine({"w": w(p), "b": bias(p)}, x)
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

        @jax.custom_gradient
        def closed(t: Any) -> Any:
            return jnp.tanh(t), lambda g: g * (1 - jnp.tanh(t) ** 2) * jnp.exp(-0.3)

        return closed(y) + bias(p)

    return apply


@layer()
def solvers(m: Maker) -> Apply:
    """Conjugate gradients, a linear solve and a root with custom derivatives, for each example."""
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
    """Scans without inputs, unrolled, with a counter and a key in the carry, with a branch, a written buffer, or a stop
    condition."""
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

            (buffer, _), said = lax.scan(written, (jnp.zeros_like(x), jnp.zeros_like(x[:, 0])), jnp.arange(s))
            return buffer + said.mean(0)[:, None, None]
        if kind == "stacked":
            weights = jnp.stack([f(p) for f in layers])
            return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), jnp.mean(h)), x, weights)[0]
        if kind == "reverse":

            def back(h: Any, t: Any) -> Any:
                return 0.9 * h + t @ w(p), (h, t * 2)

            h, said = lax.scan(back, jnp.zeros_like(x[:, 0]), turns, reverse=True)
            return jnp.swapaxes(said[0] + said[1], 0, 1) + h[:, None]
        # A weight that is read before, inside and after the loop.
        h = x @ w(p)
        h = lax.scan(lambda h, _: (jnp.tanh(h @ w(p) + x @ u(p)), None), h, None, length=2)[0]
        return h @ w(p).T

    return apply


@layer()
def loops_of_many_forms(m: Maker) -> Apply:
    """Nested branches, a switch under vmap, a map in batches, a while loop that only runs forward."""
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
    """vmap with in_axes in dicts and other out_axes, nested, over weights but not over values."""
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
    """Steps of an inner optimization of weights, Hessian-vector products, Jacobians, a transposed linear function."""
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
    """jax.checkpoint: nested, in a scan, with static arguments, with combined policies, of a jitted helper."""
    d = m.shape[2]
    up, down = m.weight(d, d), m.weight(d, d)
    kind = m.choose("nested", "static", "joined", "jitted", "scan", "named")
    policies = jax.checkpoint_policies

    def apply(p: Any, x: Any, env: Env) -> Any:
        def block(x: Any, twice: bool = False) -> Any:
            h = jnp.tanh(checkpoint_name(x @ up(p), "up"))
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
