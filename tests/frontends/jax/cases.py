"""Losses as users write them, in plain JAX, Flax (linen and nnx), Equinox and optax, as (loss, params, batch)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pase.frontends.jax.frontend import trace
from pase.ir import Graph, named, simplify, verify

Case = tuple[Callable[..., Any], Any, tuple[Any, ...]]
CASES: dict[str, Callable[[], Case]] = {}

S = jax.ShapeDtypeStruct
X = S((8, 16, 32), jnp.float32)
W = S((32, 32), jnp.float32)
IMAGES = S((8, 16, 16, 3), jnp.float32)
LABELS = S((8,), jnp.int32)


def key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


def plain(name: str, fn: Callable[..., Any], params: Any = W, *batch: Any) -> None:
    CASES[name] = lambda: (fn, params, batch or (X,))


@case
def linen_conv_batchnorm_dropout() -> Case:
    import flax.linen as nn
    import optax

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(16, (3, 3))(x)))
            x = nn.avg_pool(nn.max_pool(x, (2, 2), (2, 2)), (2, 2), (2, 2)).reshape(x.shape[0], -1)
            x = nn.GroupNorm(4)(nn.LayerNorm()(nn.Dropout(0.5, deterministic=not train)(x)))
            return nn.Dense(10)(x)

    m: Any = Model()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    v = jax.eval_shape(lambda: m.init(keys, jnp.zeros(IMAGES.shape), True))

    def loss(p: Any, stats: Any, images: Any, labels: Any, key: Any) -> Any:
        y, _ = m.apply(
            {"params": p, "batch_stats": stats}, images, True, rngs={"dropout": key}, mutable=["batch_stats"]
        )
        return optax.softmax_cross_entropy_with_integer_labels(y, labels).mean()

    return loss, v["params"], (v["batch_stats"], IMAGES, LABELS, key())


@case
def linen_attention() -> Case:
    import flax.linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
            x = x + nn.MultiHeadDotProductAttention(4, dropout_rate=0.1, deterministic=False)(x, mask=mask)
            return nn.gelu(nn.Dense(64)(nn.LayerNorm()(x)))

    m: Any = Model()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    v = jax.eval_shape(lambda: m.init(keys, jnp.zeros(X.shape)))
    return (lambda p, x, k: jnp.mean(jnp.square(m.apply(p, x, rngs={"dropout": k})))), v, (X, key())


@case
def linen_scan_remat() -> Case:
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            return x + nn.Dense(32)(nn.relu(nn.Dense(64)(x))), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            block = nn.remat(Block, policy=jax.checkpoint_policies.dots_saveable)
            return nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)()(
                x, None
            )[0]

    m: Any = Model()
    v = jax.eval_shape(lambda: m.init(jax.random.key(0), jnp.zeros(X.shape)))
    return (lambda p, x: jnp.mean(jnp.square(m.apply(p, x)))), v, (X,)


@case
def nnx_model() -> Case:
    import optax
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.conv, self.norm = nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
            self.drop, self.dense = nnx.Dropout(0.1, rngs=rngs), nnx.Linear(8, 10, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.dense(self.drop(nnx.relu(self.norm(self.conv(x)))).mean((1, 2)))

    graph, params, *others = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), nnx.Param, ...)

    def loss(p: Any, rest: Any, x: Any, y: Any) -> Any:
        model = nnx.merge(graph, p, rest)
        value = optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()
        return value, nnx.state(model, nnx.Not(nnx.Param))

    return loss, params, (*others, IMAGES, LABELS)


@case
def nnx_attention() -> Case:
    from flax import nnx

    made = nnx.eval_shape(lambda: nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0)))
    graph, params, *others = nnx.split(made, nnx.Param, ...)
    return (lambda p, rest, x: jnp.sum(nnx.merge(graph, p, rest)(x))), params, (*others, X)


def equinox(make: Callable[[Any], Any], use: Callable[..., Any], *batch: Any) -> Case:
    import equinox as eqx

    model = eqx.filter_eval_shape(make, jax.random.key(0))
    params, static = eqx.partition(model, lambda leaf: isinstance(leaf, (S, jax.Array)))
    return (lambda p, *b: use(eqx.combine(p, static), *b)), params, batch


@case
def equinox_mlp() -> Case:
    import equinox as eqx
    import optax

    def use(m: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(m)(x), y).mean()

    return equinox(lambda k: eqx.nn.MLP(32, 10, 64, 2, key=k), use, S((8, 32), jnp.float32), LABELS)


@case
def equinox_attention() -> Case:
    import equinox as eqx

    def use(m: Any, x: Any) -> Any:
        return jnp.sum(jax.vmap(lambda v: m(v, v, v))(x))

    return equinox(lambda k: eqx.nn.MultiheadAttention(4, 32, key=k), use, X)


@case
def equinox_gru() -> Case:
    import equinox as eqx

    def use(m: Any, x: Any) -> Any:
        def one(row: Any) -> Any:
            return lax.scan(lambda h, a: (m(a, h), None), jnp.zeros(32), row)[0]

        return jnp.sum(jax.vmap(one)(x))

    return equinox(lambda k: eqx.nn.GRUCell(32, 32, key=k), use, X)


@case
def equinox_convolutions() -> Case:
    import equinox as eqx

    def make(k: Any) -> Any:
        layers: Any = [
            eqx.nn.Conv2d(3, 8, 3, key=k),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.GroupNorm(2, 8),
            eqx.nn.ConvTranspose2d(8, 4, 2, 2, key=k),
        ]
        return eqx.nn.Sequential(layers)

    return equinox(make, lambda m, x: jnp.sum(jax.vmap(m)(x)), S((8, 3, 16, 16), jnp.float32))


@case
def optax_losses() -> Case:
    import optax

    def loss(p: Any, x: Any, y: Any, labels: Any) -> Any:
        z = x @ p
        each = (
            optax.sigmoid_binary_cross_entropy,
            optax.l2_loss,
            optax.huber_loss,
            optax.log_cosh,
            optax.hinge_loss,
        )
        smooth = optax.smooth_labels(jax.nn.one_hot(labels, 32), 0.1)
        rows = optax.safe_softmax_cross_entropy(z, smooth) + optax.kl_divergence(jax.nn.log_softmax(z), y)
        return sum(f(z, y).mean() for f in each) + rows.mean() + optax.cosine_distance(z, y).mean()

    return loss, W, (S((8, 32), jnp.float32), S((8, 32), jnp.float32), LABELS)


@case
def custom_vjp() -> Case:
    @jax.custom_vjp
    def f(x: Any, w: Any) -> Any:
        return jnp.sin(x @ w)

    f.defvjp(
        lambda x, w: (f(x, w), (x, w)),
        lambda saved, g: (g @ saved[1].T, jnp.einsum("bsd,bse->de", saved[0], g)),
    )
    return (lambda p, x: jnp.sum(f(x, p))), W, (X,)


@case
def nested_scan() -> Case:
    def loss(p: Any, x: Any) -> Any:
        def outer(c: Any, w: Any) -> Any:
            return lax.scan(lambda c, _: (jnp.tanh(c @ p["a"]), None), c @ w, None, length=3)[0], jnp.sum(c)

        c, sums = lax.scan(outer, x, p["b"])
        return jnp.sum(c) + jnp.sum(sums)

    return loss, {"a": W, "b": S((4, 32, 32), jnp.float32)}, (X,)


@case
def indexing() -> Case:
    def loss(p: Any, x: Any, i: Any) -> Any:
        y = (x @ p).at[:, 0].set(1.0).at[i].add(2.0)[:, ::2]
        y = jnp.pad(jnp.roll(jnp.flip(y, 1), 1, 1), ((0, 0), (1, 1), (0, 0)))
        y = jnp.repeat(jnp.tile(y, (1, 2, 1)), 2, axis=1)
        a, b = jnp.split(jnp.concatenate([y, y], -1), 2, -1)
        z = jnp.take_along_axis(a, jnp.argsort(b, axis=1), 1)
        z = lax.dynamic_update_slice(
            lax.dynamic_slice(z, (0, 0, i[0]), (8, 4, 4)), z[:, :1, :4], (0, i[0], 0)
        )
        return (
            jnp.sum(jnp.where(z > 0, z, 0))
            + jnp.sum(jnp.triu(p))
            + jnp.sum(jnp.stack([x, x]))
            + jnp.sum(x[i])
        )

    return loss, W, (X, LABELS)


def _prints(p: Any, x: Any) -> Any:
    y = x @ p
    jax.debug.print("{}", jnp.sum(y))
    return jnp.sum(y)


def _activations(p: Any, x: Any) -> Any:
    n = jax.nn
    each = (
        n.relu,
        n.gelu,
        n.silu,
        n.softplus,
        n.elu,
        n.selu,
        n.leaky_relu,
        n.hard_swish,
        n.mish,
        n.glu,
        n.softmax,
        n.log_softmax,
        n.standardize,
        n.logsumexp,
        n.relu6,
        n.celu,
        n.soft_sign,
        n.squareplus,
    )
    return sum(jnp.sum(f(x @ p)) for f in each)


def _convolutions(p: Any, x: Any) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")
    a = lax.conv_general_dilated(x, p["k"], (1, 1), "SAME", feature_group_count=4, dimension_numbers=dims)
    b = lax.conv_general_dilated(x, p["d"], (2, 2), "VALID", rhs_dilation=(2, 2), dimension_numbers=dims)
    return jnp.sum(a) + jnp.sum(b) + jnp.sum(lax.conv_transpose(x, p["d"], (2, 2), "SAME"))


def _attention(p: Any, x: Any) -> Any:
    q, v = (x @ p).reshape(8, 16, 4, 8), x.reshape(8, 16, 4, 8)
    return jnp.sum(jax.nn.dot_product_attention(q, q, v, is_causal=True, implementation="cudnn"))


def _random(p: Any, x: Any, k: Any) -> Any:
    a, b = jax.random.split(k)
    kept = jax.random.bernoulli(a, 0.5, x.shape)
    return jnp.sum(x @ p * kept + jax.random.normal(jax.random.fold_in(b, 1), x.shape))


def _while(p: Any, x: Any) -> Any:
    q = lax.stop_gradient(p)
    turned = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ q)), (0, x))[1]
    return jnp.sum(turned @ p)


def _linalg(p: Any, x: Any) -> Any:
    return jnp.sum(jnp.linalg.inv(p)) + jnp.linalg.slogdet(p)[1] + jnp.sum(jnp.linalg.svd(x)[1])


plain("attention", _attention)
plain("activations", _activations)
plain(
    "convolutions",
    _convolutions,
    {"k": S((3, 3, 4, 16), jnp.float32), "d": S((3, 3, 16, 8), jnp.float32)},
    S((8, 16, 16, 16), jnp.float32),
)
plain("debug_print", _prints)
plain("random", _random, W, X, key())
plain("while", _while)
plain("linalg", _linalg)
plain("cond", lambda p, x: jnp.sum(lax.cond(jnp.sum(x) > 0, lambda a: a @ p, jnp.sin, x)))
plain("fori", lambda p, x: jnp.sum(lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ p), x)))
plain("map", lambda p, x: jnp.sum(lax.map(lambda a: a @ p, x)))
plain("associative_scan", lambda p, x: jnp.sum(lax.associative_scan(jnp.multiply, x @ p, axis=1)))
plain("fft", lambda p, x: jnp.sum(jnp.abs(jnp.fft.fft(x @ p))))
plain(
    "ragged",
    lambda p, x, g: jnp.sum(lax.ragged_dot(x, p, g)),
    S((4, 32, 64), jnp.float32),
    S((128, 32), jnp.float32),
    S((4,), jnp.int32),
)
plain("gradient_inside", lambda p, x: jnp.sum(jax.grad(lambda q: jnp.sum(jnp.tanh(x @ q)))(p) ** 2))
plain("segment_sum", lambda p, x, i: jnp.sum(jax.ops.segment_sum(x @ p, i, 4)), W, X, LABELS)
plain("bfloat16", lambda p, x: jnp.sum((x.astype(jnp.bfloat16) @ p.astype(jnp.bfloat16)).astype(jnp.float32)))
plain("aux", lambda p, x: (jnp.sum(x @ p), {"best": jnp.argmax(x @ p, -1)}))
plain("no_batch", lambda p: jnp.sum(p**2), W)


def graphs(name: str, **options: Any) -> tuple[Graph, Graph]:
    """The traced graph of a case, and the simplified graph with names."""
    loss, params, batch = CASES[name]()
    if name == "no_batch":
        batch = ()
    raw = verify(trace(loss, params, *batch, name=name, **options).graph)
    return raw, verify(named(simplify(raw)))
