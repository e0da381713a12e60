"""Weights that are functions of parameters. Each makes f(params) -> an array of the shape, of about unit size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.composer.maker import TRANSFORMS, Get, Maker, Pattern, transform


def matrix(shape: Sequence[int]) -> bool:
    """Returns whether there are at least two dims."""
    return len(shape) >= 2


def square(shape: Sequence[int]) -> bool:
    """Returns whether there are two equal dims."""
    return len(shape) == 2 and shape[0] == shape[1]


ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    "exp": lambda w: jnp.exp(w * 0.5),
    "minus_exp": lambda a: -jnp.exp(a * 0.5),
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "square": jnp.square,
    "cube": lambda w: w**3 * 0.3,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "rsqrt": lambda w: lax.rsqrt(w * w + 1),
    "sqrt": lambda w: jnp.sqrt(w * w + 0.1),
    "log1p": lambda w: jnp.log1p(w * w),
    "reciprocal": lambda w: 1 / (1 + w * w),
    "absolute": jnp.abs,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "erf": lax.erf,
    "arctan": jnp.arctan,
    "expm1": lambda w: jnp.expm1(w * 0.3),
    "clip": lambda w: jnp.clip(w, -1, 1),
    "leaky": lambda w: jnp.where(w > 0, w, 0.1 * w),
    "power": lambda w: jnp.power(jnp.abs(w) + 0.1, 1.5),
    "sinc": jnp.sinc,
    "logit": lambda w: jax.scipy.special.logit(jax.nn.sigmoid(w) * 0.9 + 0.05),
    "custom_derivative": jax.nn.relu6,
    "rounded": lambda w: w + lax.stop_gradient(jnp.round(w * 4) / 4 - w),
    "signed": lambda w: jnp.tanh(w) + lax.stop_gradient(jnp.sign(w) - jnp.tanh(w)),
    "half_stopped": lambda w: 0.5 * w + 0.5 * lax.stop_gradient(w * w),
    "optimisation_barrier": lambda w: lax.optimization_barrier(jnp.sin(w)),
}


def _elementwise(name: str) -> Pattern:
    def make(m: Maker, shape: Sequence[int]) -> Get:
        a = m.param(*shape)
        return lambda p: ELEMENTWISE[name](p[a])

    return Pattern(make=make)


TRANSFORMS.update({name: _elementwise(name) for name in ELEMENTWISE})


@transform()
def log_scaled(m: Maker, shape: Sequence[int]) -> Get:
    a, s = m.param(*shape), m.param(scale=0.3)
    return lambda p: p[a] * jnp.exp(p[s])


@transform()
def weight_norm(m: Maker, shape: Sequence[int]) -> Get:
    v, g = m.param(*shape), m.param(shape[-1], scale=0.3, shift=1)
    axes = tuple(range(len(shape) - 1))
    return lambda p: p[g] * p[v] * lax.rsqrt(jnp.sum(p[v] ** 2, axes, keepdims=True) + 1e-2)


@transform()
def normalised(m: Maker, shape: Sequence[int]) -> Get:
    v = m.param(*shape)
    return lambda p: p[v] / jnp.linalg.norm(p[v])


@transform(matrix)
def standardised(m: Maker, shape: Sequence[int]) -> Get:
    v = m.param(*shape)

    def get(p: Any) -> Any:
        w = p[v]
        return (w - w.mean(0)) / jnp.sqrt(w.var(0) + 0.1)

    return get


@transform(matrix)
def centred(m: Maker, shape: Sequence[int]) -> Get:
    v = m.param(*shape)
    return lambda p: p[v] - p[v].mean(-1, keepdims=True)


@transform()
def softmax(m: Maker, shape: Sequence[int]) -> Get:
    v, axis = m.param(*shape), m.choose(0, -1)
    return lambda p: jax.nn.softmax(p[v], axis) * 3


@transform()
def log_softmax(m: Maker, shape: Sequence[int]) -> Get:
    v = m.param(*shape)
    return lambda p: jax.nn.log_softmax(p[v])


@transform()
def cumulative(m: Maker, shape: Sequence[int]) -> Get:
    v, axis, of = m.param(*shape, scale=0.4), m.choose(0, -1), m.choose(jnp.cumsum, jnp.cumsum, lax.cummax)
    return lambda p: of(p[v], axis=axis % len(shape))


@transform(matrix)
def low_rank(m: Maker, shape: Sequence[int]) -> Get:
    *outer, inner = shape
    a, b = m.param(*outer, 4, scale=0.7), m.param(4, inner, scale=0.7)
    return lambda p: p[a] @ p[b]


@transform(matrix)
def adapted(m: Maker, shape: Sequence[int]) -> Get:
    """LoRA: a frozen weight and a low-rank change."""
    *outer, inner = shape
    w, a, b = m.param(*shape), m.param(*outer, 2), m.param(2, inner, scale=0.3)
    return lambda p: lax.stop_gradient(p[w]) + 2.0 * (p[a] @ p[b])


@transform(square)
def symmetric(m: Maker, shape: Sequence[int]) -> Get:
    a, sign = m.param(*shape), m.choose(1.0, -1.0)
    return lambda p: p[a] + sign * p[a].T


@transform(square)
def cayley(m: Maker, shape: Sequence[int]) -> Get:
    """An orthogonal matrix, by solving a linear system."""
    a, eye = m.param(*shape, scale=0.3), np.eye(shape[0])

    def get(p: Any) -> Any:
        skew = p[a] - p[a].T
        return jnp.linalg.solve(eye + skew, eye - skew) * 2

    return get


@transform(square)
def gram(m: Maker, shape: Sequence[int]) -> Get:
    a = m.param(*shape, scale=0.5)
    return lambda p: p[a] @ p[a].T * 0.3


@transform(square)
def householder(m: Maker, shape: Sequence[int]) -> Get:
    a = m.param(shape[0])
    return lambda p: 2 * (jnp.eye(shape[0]) - 2 * jnp.outer(p[a], p[a]) / jnp.sum(p[a] ** 2))


@transform(square)
def triangular(m: Maker, shape: Sequence[int]) -> Get:
    a, of = m.param(*shape), m.choose(jnp.tril, jnp.triu)
    return lambda p: of(p[a])


@transform(matrix)
def transposed(m: Maker, shape: Sequence[int]) -> Get:
    a = m.param(*shape[::-1])
    return lambda p: jnp.transpose(p[a])


@transform()
def masked(m: Maker, shape: Sequence[int]) -> Get:
    a, mask = m.param(*shape), m.normal(*shape) > -0.3
    return lambda p: p[a] * mask


@transform()
def mask_among_parameters(m: Maker, shape: Sequence[int]) -> Get:
    """A boolean mask among the parameters, which is not trained."""
    a, mask = m.param(*shape), m.leaf(m.normal(*shape) > -0.3)
    return lambda p: jnp.where(p[mask], p[a], 0.1)


@transform()
def fake_quantised(m: Maker, shape: Sequence[int]) -> Get:
    """Fake quantization to eight bits, straight through."""
    a = m.param(*shape)

    def get(p: Any) -> Any:
        w = p[a]
        step = lax.stop_gradient(jnp.max(jnp.abs(w), 0, keepdims=True)) / 7
        return w + lax.stop_gradient(jnp.clip(jnp.round(w / step), -7, 7) * step - w)

    return get


@transform(matrix)
def ternary(m: Maker, shape: Sequence[int]) -> Get:
    """BitNet's weights: scaled by the mean absolute value, rounded to -1, 0, 1, straight through."""
    a = m.param(*shape)

    def get(p: Any) -> Any:
        w = p[a]
        scale = jnp.mean(jnp.abs(w)) + 1e-5
        return w + lax.stop_gradient(jnp.clip(jnp.round(w / scale), -1, 1) * scale - w)

    return get


@transform()
def polar(m: Maker, shape: Sequence[int]) -> Get:
    """The real part of a complex exponential."""
    a, b = m.param(*shape, scale=0.3), m.param(*shape)
    return lambda p: jnp.real(jnp.exp(-jnp.exp(p[a]) + 1j * p[b])) * 2


@transform()
def complex_parts(m: Maker, shape: Sequence[int]) -> Get:
    a = m.leaf(m.normal(*shape) + 1j * m.normal(*shape))
    return lambda p: jnp.real(p[a]) * jnp.abs(p[a]) - jnp.imag(p[a])


@transform()
def single_precision(m: Maker, shape: Sequence[int]) -> Get:
    """A weight that is stored in float32 and used in float64."""
    a = m.leaf(m.normal(*shape).astype(np.float32))
    m.epsilon = max(m.epsilon, 2.0**-23)  # its update is rounded to its type
    return lambda p: p[a].astype(jnp.float64)


@transform()
def cast(m: Maker, shape: Sequence[int]) -> Get:
    a = m.param(*shape)
    m.epsilon = max(m.epsilon, 2.0**-23)  # its gradient is rounded to the type of the cast
    return lambda p: jnp.sin(p[a].astype(jnp.float32)).astype(jnp.float64)


@transform()
def gathered_rows(m: Maker, shape: Sequence[int]) -> Get:
    a, rows = m.param(shape[0] + 4, *shape[1:]), m.values.integers(0, shape[0] + 4, shape[0])
    return lambda p: p[a][rows]


@transform()
def rows_by_parameter(m: Maker, shape: Sequence[int]) -> Get:
    """Rows selected by integers among the parameters."""
    a = m.param(*shape)
    rows = m.leaf(m.values.permutation(shape[0]).astype(np.int32))
    return lambda p: jnp.take(p[a], p[rows], axis=0)


@transform()
def joined(m: Maker, shape: Sequence[int]) -> Get:
    axis = m.choose(0, len(shape) - 1)
    first = shape[axis] // 2
    sizes = [(*shape[:axis], n, *shape[axis + 1 :]) for n in (first, shape[axis] - first)]
    a, b = (m.param(*s) for s in sizes)
    return lambda p: jnp.concatenate([jnp.tanh(p[a]), p[b] ** 2], axis)


@transform()
def stacked(m: Maker, shape: Sequence[int]) -> Get:
    a = m.leaf([m.normal(*shape[1:]) for _ in range(shape[0])])
    return lambda p: jnp.stack([jnp.sin(row) for row in p[a]])


@transform(matrix)
def split(m: Maker, shape: Sequence[int]) -> Get:
    *outer, inner = shape
    a = m.param(*outer, 2 * inner)

    def get(p: Any) -> Any:
        first, second = jnp.split(p[a], 2, axis=-1)
        return first * jax.nn.sigmoid(second)

    return get


@transform(matrix)
def flat(m: Maker, shape: Sequence[int]) -> Get:
    a = m.param(int(np.prod(shape)))
    return lambda p: jnp.sin(p[a]).reshape(shape)


@transform()
def mean_of_copies(m: Maker, shape: Sequence[int]) -> Get:
    a = m.param(3, *shape)
    return lambda p: jnp.tanh(p[a]).mean(0) * 2


@transform()
def mixed_by_softmax(m: Maker, shape: Sequence[int]) -> Get:
    a, g = m.param(4, *shape), m.param(4)
    return lambda p: jnp.tensordot(jax.nn.softmax(p[g]), p[a], 1)


@transform()
def interpolated(m: Maker, shape: Sequence[int]) -> Get:
    a, b, t = m.param(*shape), m.param(*shape), m.param()

    def get(p: Any) -> Any:
        part = jax.nn.sigmoid(p[t])
        return part * p[a] + (1 - part) * p[b]

    return get


@transform()
def moving_average(m: Maker, shape: Sequence[int]) -> Get:
    """A weight that is half an untrained average."""
    a, ema = m.param(*shape), m.param(*shape)
    return lambda p: p[a] + lax.stop_gradient(0.9 * p[ema] + 0.1 * p[a])


@transform(matrix)
def outer_product(m: Maker, shape: Sequence[int]) -> Get:
    *outer, inner = shape
    a, b = m.param(*outer), m.param(inner)
    return lambda p: jnp.sin(p[a])[..., None] * p[b]


@transform(matrix)
def generated(m: Maker, shape: Sequence[int]) -> Get:
    """A hypernetwork: the weight is a product."""
    z, g = m.param(4), m.param(4, int(np.prod(shape)), scale=0.5)
    return lambda p: (jnp.tanh(p[z]) @ p[g]).reshape(shape)


@transform(matrix)
def mapped(m: Maker, shape: Sequence[int]) -> Get:
    """A function of each row, by vmap."""
    a, s = m.param(*shape), m.param(shape[0], scale=0.3)

    def row(w: Any, t: Any) -> Any:
        return w * jnp.exp(t) / (1 + jnp.sum(w**2)) ** 0.5

    return lambda p: jax.vmap(row)(p[a], p[s]) * 3


@transform(matrix)
def spectral(m: Maker, shape: Sequence[int]) -> Get:
    """A weight over its largest singular value, by a step of power iteration without a gradient."""
    a, u = m.param(*shape), m.normal(int(np.prod(shape[:-1])))

    def get(p: Any) -> Any:
        w = p[a].reshape(-1, shape[-1])
        v = u @ w
        v = lax.stop_gradient(v / jnp.linalg.norm(v))
        left = lax.stop_gradient(w @ v / jnp.linalg.norm(w @ v))
        return p[a] / (left @ w @ v) * 4

    return get


@transform(square)
def circulant(m: Maker, shape: Sequence[int]) -> Get:
    """A Toeplitz matrix, gathered from a vector."""
    n = shape[0]
    a, where = m.param(n), (np.arange(n)[:, None] - np.arange(n)) % n
    return lambda p: jnp.sin(p[a])[where]


@transform()
def rematerialised(m: Maker, shape: Sequence[int]) -> Get:
    a = m.param(*shape)
    return lambda p: jax.checkpoint(lambda w: jnp.sin(jnp.exp(w * 0.3)))(p[a])


@transform()
def own_derivative(m: Maker, shape: Sequence[int]) -> Get:
    """A custom_vjp with a literal and a closure."""
    a, bound = m.param(*shape), m.choose(0.5, 1.0)

    @jax.custom_vjp
    def bounded(w: Any) -> Any:
        return jnp.tanh(w)

    def forward(w: Any) -> Any:
        return bounded(w), w

    def backward(w: Any, g: Any) -> Any:
        return (jnp.where(jnp.abs(w) < bound, g, jnp.full(w.shape, 0.25) * g),)

    bounded.defvjp(forward, backward)
    return lambda p: bounded(p[a])


@transform()
def own_tangent(m: Maker, shape: Sequence[int]) -> Get:
    """A custom_jvp."""
    a = m.param(*shape)

    @jax.custom_jvp
    def squashed(w: Any) -> Any:
        return w / (1 + jnp.abs(w))

    @squashed.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (w,), (t,) = primals, tangents
        return squashed(w), t / (1 + jnp.abs(w)) ** 2

    return lambda p: squashed(p[a])


@transform()
def conditional(m: Maker, shape: Sequence[int]) -> Get:
    """One of two functions, by a parameter's sign."""
    a, s = m.param(*shape), m.param()
    return lambda p: lax.cond(p[s] > 0, lambda w: jnp.sin(w), lambda w: w**2, p[a])


@transform()
def looped(m: Maker, shape: Sequence[int]) -> Get:
    """A loop over the weight itself."""
    a = m.param(*shape)
    return lambda p: lax.fori_loop(0, 3, lambda i, w: w + 0.1 * jnp.sin(w * (i + 1)), p[a])


@transform()
def sorted_values(m: Maker, shape: Sequence[int]) -> Get:
    a = m.param(*shape)
    return lambda p: jnp.sort(jnp.tanh(p[a]), axis=-1)


@transform()
def unit_interval(m: Maker, shape: Sequence[int]) -> Get:
    a = m.param(*shape)

    def get(p: Any) -> Any:
        low, high = p[a].min(), p[a].max()
        return (p[a] - low) / (high - low + 0.1)

    return get


@transform()
def batched_mean(m: Maker, shape: Sequence[int]) -> Get:
    """A weight scaled by a function of the whole weight."""
    a = m.param(*shape)
    return lambda p: p[a] / jnp.sqrt(jnp.mean(p[a] ** 2) + 0.01)


@transform()
def variational(m: Maker, shape: Sequence[int]) -> Get:
    """A mean and a log-variance, with constant noise."""
    mean, logvar, noise = m.param(*shape), m.param(*shape, scale=0.3, shift=-1), m.normal(*shape)
    return lambda p: p[mean] + jnp.exp(0.5 * p[logvar]) * noise
