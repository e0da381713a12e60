"""Layers with few products: indices, order, random numbers, shapes, custom derivatives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.composer.maker import Apply, Env, Maker, layer

TOKENS = 12


@layer(2)
def embedding(m: Maker) -> Apply:
    """Rows of a table by the batch's tokens: by indexing, take, or one-hot; another part may use the table as well."""
    b, s, d = m.shape
    tokens = m.input("tokens", m.values.integers(0, TOKENS, (b, s)).astype(np.int32))
    how, tied = m.choose("index", "take", "one_hot", "clip"), m.chance(0.5)
    own = None if tied else m.weight(TOKENS, d, scale=1.0)
    name = m.common("embedding", TOKENS, d, scale=0.7) if tied else ""

    def apply(p: Any, x: Any, env: Env) -> Any:
        table, at = own(p) if own else env.shared[name], env.batch[tokens]
        if how == "index":
            return x + table[at]
        if how == "one_hot":
            return x + jax.nn.one_hot(at, TOKENS, dtype=x.dtype) @ table
        return x + jnp.take(table, at, axis=0, mode="clip" if how == "clip" else None)

    return apply


@layer()
def positions(m: Maker) -> Apply:
    """Positions: learned, sliced from a longer table at a fixed or a given index; or fixed sinusoids."""
    _b, s, d = m.shape
    kind, table = m.choose("slice", "dynamic", "waves"), m.weight(s + 3, d, scale=0.5)
    start = m.input("start", np.asarray(m.values.integers(3), np.int32)) if kind == "dynamic" else ""

    def apply(p: Any, x: Any, env: Env) -> Any:
        if kind == "slice":
            return x + table(p)[:s]
        if kind == "dynamic":
            return x + lax.dynamic_slice_in_dim(table(p), env.batch[start], s)
        wave = np.sin(np.arange(s)[:, None] / 10 ** (np.arange(d) / d))
        return x * (1 + table(p)[:s]) + wave

    return apply


@layer()
def picked_tokens(m: Maker) -> Apply:
    """take_along_axis by indices of the batch, written back by a scatter."""
    b, s, d = m.shape
    n = max(s // 2, 1)
    order = np.stack([m.values.permutation(s)[:n] for _ in range(b)]).astype(np.int32)
    at, w, add = m.input("picked", order), m.weight(d, d), m.chance(0.5)

    def apply(p: Any, x: Any, env: Env) -> Any:
        b = x.shape[0]
        i = env.batch[at]
        mine = jnp.tanh(jnp.take_along_axis(x, i[..., None], axis=1) @ w(p))
        rows = jnp.arange(b)[:, None]
        return x.at[rows, i].add(mine) if add else x.at[rows, i].set(mine)

    return apply


@layer(whole=True)
def graph(m: Maker) -> Apply:
    """Messages along edges of a graph of examples: gathered, and summed by segment_sum or a scatter."""
    b, s, d = m.shape
    edges = m.values.integers(0, b, (2, 2 * b)).astype(np.int32)
    src, dst = m.input("from", edges[0]), m.input("to", edges[1])
    w, how = m.weight(d, d), m.choose("segment", "scatter", "max")

    def apply(p: Any, x: Any, env: Env) -> Any:
        b = x.shape[0]
        said = jnp.tanh(x[env.batch[src]] @ w(p))
        to = env.batch[dst]
        if how == "segment":
            return x + jax.ops.segment_sum(said, to, b)
        zero = jnp.zeros((b, s, d), x.dtype)
        return x + (zero.at[to].add(said) if how == "scatter" else zero.at[to].max(said))

    return apply


@layer()
def ordered(m: Maker) -> Apply:
    """Sorted along the sequence or by a score; the largest few; the median."""
    _b, s, d = m.shape
    kind, w, k = m.choose("sort", "argsort", "top", "median"), m.weight(d), max(s // 2, 1)

    def apply(p: Any, x: Any, env: Env) -> Any:
        if kind == "sort":
            return x + jnp.sort(x, axis=1) * w(p)
        if kind == "median":
            return x - jnp.median(x, axis=1, keepdims=True) * w(p)
        score = x @ w(p)
        if kind == "argsort":
            return jnp.take_along_axis(
                x * jax.nn.sigmoid(score)[..., None], jnp.argsort(score, 1)[..., None], 1
            )
        top, at = lax.top_k(score, k)
        chosen = jnp.take_along_axis(x, at[..., None], axis=1) * jax.nn.softmax(top)[..., None]
        return x + chosen.sum(1, keepdims=True)

    return apply


@layer(whole=True)
def random_numbers(m: Maker) -> Apply:
    """Dropout, noise by reparametrisation, a Gumbel softmax or a random sign, from a key in the batch."""
    _b, _s, d = m.shape
    key, kind, w = m.key(), m.choose("dropout", "noise", "gumbel", "depth"), m.weight(d, d)

    def apply(p: Any, x: Any, env: Env) -> Any:
        b = x.shape[0]
        k = env.batch[key]
        y = x @ w(p)
        if kind == "dropout":
            return jnp.where(jax.random.bernoulli(k, 0.8, y.shape), y / 0.8, 0)
        if kind == "noise":
            return x + jnp.exp(0.3 * y) * jax.random.normal(k, y.shape, y.dtype)
        if kind == "gumbel":
            return x * jax.nn.softmax(y + jax.random.gumbel(k, y.shape, y.dtype))
        return x + y * jax.random.bernoulli(k, 0.7, (b, 1, 1))

    return apply


@layer()
def codebook(m: Maker) -> Apply:
    """Vector quantization: the nearest code, straight through, with a commitment loss and a moving average."""
    d = m.shape[2]
    codes, by_gradient = m.param(6, d), m.chance(0.5)
    w = m.weight(d, d)

    def apply(p: Any, x: Any, env: Env) -> Any:
        y, book = x @ w(p), p[codes]
        apart = jnp.sum(y**2, -1, keepdims=True) - 2 * y @ book.T + jnp.sum(book**2, -1)
        nearest = jnp.argmin(apart, -1)
        code = book[nearest]
        env.terms.append(0.25 * jnp.mean((y - lax.stop_gradient(code)) ** 2))
        if by_gradient:
            env.terms.append(jnp.mean((lax.stop_gradient(y) - code) ** 2))
        else:
            chosen = jax.nn.one_hot(nearest, 6)
            env.metrics[m.name] = 0.9 * book + 0.1 * jnp.einsum(
                "bsn,bsd->nd", chosen, lax.stop_gradient(y)
            ) / len(x)
        # Tokens of one code would be equal up to rounding, and a maximum over them ambiguous.
        return x + y + lax.stop_gradient(code - y)

    return apply


@layer()
def target_network(m: Maker) -> Apply:
    """An untrained target network predicts, and the online weights are trained towards it."""
    d = m.shape[2]
    w, target = m.weight(d, d), m.param(d, d, scale=d**-0.5)

    def apply(p: Any, x: Any, env: Env) -> Any:
        aim = lax.stop_gradient(jnp.tanh(x @ p[target]))
        y = jnp.tanh(x @ w(p))
        env.terms.append(0.1 * jnp.mean((y - aim) ** 2))
        env.metrics[m.name] = 0.99 * p[target] + 0.01
        return x + y

    return apply


@layer()
def shapes(m: Maker) -> Apply:
    """Views around a weight: concatenation, slices, padding, rolls, flips, transposes, strides."""
    _b, s, d = m.shape
    w, word = m.weight(d, d), m.choose("join", "pad", "roll", "flip", "second", "shift", "merge", "heads")

    def apply(p: Any, x: Any, env: Env) -> Any:
        b = x.shape[0]
        y = x @ w(p)
        if word == "join":
            return jnp.concatenate([y[..., d // 2 :], jnp.sin(x[..., : d // 2])], -1)
        if word == "pad":
            return jnp.pad(y, ((0, 0), (1, 1), (0, 0)))[:, 2:] + x
        if word == "roll":
            return jnp.roll(y, 1, axis=2) + x
        if word == "flip":
            return jnp.flip(y, 1) + x
        if word == "second":
            return jnp.repeat(y[:, :, ::2], 2, axis=2)[:, :, :d]
        if word == "shift":
            return jnp.concatenate([jnp.zeros_like(y[:, :1]), y[:, :-1]], 1) + x
        if word == "merge":
            return jnp.sin(y.reshape(b * s, d)).reshape(b, s, d)
        return jnp.swapaxes(jnp.tanh(jnp.swapaxes(y.reshape(b, s, 2, d // 2), 1, 2)), 1, 2).reshape(b, s, d)

    return apply


@layer()
def given_mask(m: Maker) -> Apply:
    """A padding mask of the batch, for attention and for means."""
    b, s, d = m.shape
    lengths = m.input("lengths", m.values.integers(1, s + 1, b).astype(np.int32))
    w, v = m.weight(d, d), m.weight(d, d)

    def apply(p: Any, x: Any, env: Env) -> Any:
        there = jnp.arange(s) < env.batch[lengths][:, None]
        scores = jnp.einsum("bqd,bkd->bqk", x @ w(p), x) / np.sqrt(d)
        mixed = jax.nn.softmax(scores, where=there[:, None, :], axis=-1) @ x
        mean = jnp.sum(x * there[..., None], 1) / jnp.sum(there, 1)[:, None]
        return x + mixed * there[..., None] + (mean @ v(p))[:, None]

    return apply


@layer()
def cumulative_sums(m: Maker) -> Apply:
    _b, _s, d = m.shape
    w, of, axis = m.weight(d, d), m.choose("sum", "max", "product", "logsumexp"), m.choose(1, 2)

    def apply(p: Any, x: Any, env: Env) -> Any:
        y = jnp.tanh(x @ w(p))
        if of == "sum":
            return jnp.cumsum(y, axis) * 0.3
        if of == "product":
            return jnp.cumprod(1 + 0.1 * y, axis)
        return lax.cummax(y, axis) if of == "max" else lax.cumlogsumexp(y, axis)

    return apply


@layer()
def own_rules(m: Maker) -> Apply:
    """custom_vjp and custom_jvp on activations: a reversed, clipped or scaled gradient; saved statistics."""
    d = m.shape[2]
    w, kind, size = m.weight(d, d), m.choose("reverse", "clip", "full", "normed"), m.choose(0.5, 2.0)

    @jax.custom_vjp
    def f(x: Any) -> Any:
        return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 0.1) if kind == "normed" else x * 1.0

    def forward(x: Any) -> Any:
        return f(x), (x, jnp.full((1,), size))

    def backward(kept: Any, g: Any) -> Any:
        x, scale = kept
        if kind == "reverse":
            return (-scale * g,)
        if kind == "clip":
            return (jnp.clip(g, -size, size),)
        if kind == "full":
            return (g * jnp.full(x.shape, size) + jnp.zeros_like(x),)
        r = lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 0.1)
        return (g * r - x * r**3 * jnp.mean(g * x, -1, keepdims=True),)

    f.defvjp(forward, backward)
    return lambda p, x, env: jnp.tanh(f(x @ w(p)))


@layer()
def inner_gradient(m: Maker) -> Apply:
    """A derivative inside the loss: an energy's gradient, a step of an inner optimisation, or a jvp."""
    d = m.shape[2]
    w, kind = m.weight(d, d), m.choose("energy", "penalty", "jvp")

    def apply(p: Any, x: Any, env: Env) -> Any:
        def energy(x: Any) -> Any:
            return jnp.sum(jnp.log(jnp.cosh(x @ w(p))))

        if kind == "jvp":
            return jax.jvp(lambda x: jnp.sin(x @ w(p)), (x,), (x * 0.5,))[1]
        g = jax.grad(energy)(x)
        if kind == "energy":
            return x - 0.3 * g
        env.terms.append(0.1 * jnp.mean(jnp.sum(g**2, -1)))
        return x + jnp.tanh(x @ w(p))

    return apply


@layer()
def nested_parameters(m: Maker) -> Apply:
    """Parameters in lists, tuples and dicts, with a number and a boolean; one is unused."""
    d = m.shape[2]
    w = lambda: m.normal(d, d, scale=d**-0.5)  # noqa: E731
    tree = {"layers": [{"w": w(), "b": m.normal(d)}, {"w": w(), "b": m.normal(d)}], "pair": (m.normal(), w())}
    name = m.leaf(tree | {"step": np.asarray(3, np.int32), "on": np.asarray(True), "unused": m.normal(3)})

    def apply(p: Any, x: Any, env: Env) -> Any:
        q = p[name]
        for one in q["layers"]:
            x = jnp.tanh(x @ one["w"] + one["b"])
        return x * jnp.exp(q["pair"][0]) + (x @ q["pair"][1]) * q["on"] / (q["step"] + 1)

    return apply


@layer(whole=True)
def among_examples(m: Maker) -> Apply:
    """Ops that mix examples: attention over the batch, or a batch mean."""
    _b, _s, d = m.shape
    w, mean = m.weight(d, d), m.chance(0.4)

    def apply(p: Any, x: Any, env: Env) -> Any:
        y = x @ w(p)
        if mean:
            return x - jnp.tanh(y.mean(0, keepdims=True))
        return x + jnp.einsum("stc,csd->tsd", jax.nn.softmax(jnp.einsum("tsd,csd->stc", y, x)), x)

    return apply


@layer()
def linear_algebra(m: Maker) -> Apply:
    """A system for each example, or a decomposition of a small matrix."""
    _b, _s, d = m.shape
    w, kind = m.weight(d, 4), m.choose("solve", "cholesky", "inverse", "logdet")

    def apply(p: Any, x: Any, env: Env) -> Any:
        y = x @ w(p)
        a = jnp.einsum("bsi,bsj->bij", y, y) + 2 * jnp.eye(4)
        if kind == "solve":
            return x + jnp.linalg.solve(a, jnp.swapaxes(y, 1, 2)).mean(1)[..., None]
        if kind == "cholesky":
            return x * jnp.linalg.cholesky(a).mean((1, 2))[:, None, None]
        if kind == "inverse":
            return x + jnp.trace(jnp.linalg.inv(a), axis1=1, axis2=2)[:, None, None]
        env.terms.append(0.1 * jnp.linalg.slogdet(a)[1].mean())
        return x

    return apply


@layer()
def special_functions(m: Maker) -> Apply:
    d = m.shape[2]
    w = m.weight(d, d)
    f = m.choose(
        lax.erf_inv,
        jax.scipy.special.gammaln,
        jax.scipy.special.digamma,
        jax.scipy.special.ndtri,
        lax.bessel_i1e,
    )
    return lambda p, x, env: x + f(jax.nn.sigmoid(x @ w(p)) * 0.8 + 0.1) * 0.3


@layer()
def resized(m: Maker) -> Apply:
    """The sequence lengthened by interpolation, and shortened again by pooling."""
    _b, s, d = m.shape
    w, how = m.weight(d, d), m.choose("nearest", "linear")

    def apply(p: Any, x: Any, env: Env) -> Any:
        b = x.shape[0]
        wide = jnp.tanh(jax.image.resize(x, (b, 2 * s, d), how) @ w(p))
        return x + wide.reshape(b, s, 2, d).mean(2)

    return apply


@layer()
def equinox_module(m: Maker) -> Apply:
    """A module of Equinox among the parameters, its activation a static leaf."""
    import equinox as eqx

    d = m.shape[2]
    key = jax.random.key(m.part.seed)
    made = m.choose(
        lambda: eqx.nn.MLP(d, d, 2 * d, 1, key=key),
        lambda: eqx.nn.Linear(d, d, key=key),
        lambda: eqx.nn.LayerNorm(d),
    )()
    name = m.leaf(jax.tree.map(lambda a: np.asarray(a, np.float64) if eqx.is_array(a) else a, made))
    return lambda p, x, env: x + jax.vmap(jax.vmap(p[name]))(x)


@layer()
def linen_module(m: Maker) -> Apply:
    """A module of Flax Linen, applied to its parameters."""
    from flax import linen as nn

    b, s, d = m.shape
    module = m.choose(
        nn.Dense(d, param_dtype=jnp.float64),
        nn.LayerNorm(param_dtype=jnp.float64),
        nn.MultiHeadDotProductAttention(num_heads=2, param_dtype=jnp.float64, deterministic=True),
        nn.Sequential(
            [nn.Dense(2 * d, param_dtype=jnp.float64), nn.gelu, nn.Dense(d, param_dtype=jnp.float64)]
        ),
        nn.RNN(nn.GRUCell(d, param_dtype=jnp.float64)),
        nn.Conv(d, (3,), param_dtype=jnp.float64),
    )
    m.epsilon = max(m.epsilon, 2.0**-23)
    shapes_ = jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct((b, s, d), jnp.float64))
    name = m.leaf(jax.tree.map(lambda a: m.normal(*a.shape, scale=0.3), shapes_["params"]))
    return lambda p, x, env: x + module.apply({"params": p[name]}, x)


@layer()
def nnx_module(m: Maker) -> Apply:
    """A module of Flax NNX, merged from its state."""
    from flax import nnx

    d = m.shape[2]
    rngs = nnx.Rngs(m.part.seed % 1000)
    m.epsilon = max(m.epsilon, 2.0**-23)  # its attention is that of jax.nn, with scores in float32
    module = m.choose(
        lambda: nnx.Linear(d, d, rngs=rngs, param_dtype=jnp.float64),
        lambda: nnx.LayerNorm(d, rngs=rngs, param_dtype=jnp.float64),
        lambda: nnx.MultiHeadAttention(2, d, rngs=rngs, param_dtype=jnp.float64, decode=False),
    )()
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    name = m.leaf(nnx.to_pure_dict(params))
    return lambda p, x, env: x + nnx.merge(graphdef, nnx.State(p[name]), rest)(x)
