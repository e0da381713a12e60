"""Losses of many kinds of x [batch, sequence, width]."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.composer.maker import Apply, Env, Maker, loss
from bench.composer.values import TOKENS


def _target(m: Maker) -> str:
    return m.input("target", m.normal(*m.shape))


@loss(2)
def mean_square(m: Maker) -> Apply:
    target = _target(m)
    return lambda p, x, env: jnp.mean((x - env.batch[target]) ** 2)


@loss()
def sum_square(m: Maker) -> Apply:
    target = _target(m)
    return lambda p, x, env: 0.5 * jnp.sum((x - env.batch[target]) ** 2, (1, 2)).mean() / 8


@loss(3)
def cross_entropy(m: Maker) -> Apply:
    """Cross entropy of labels, by one-hot, take_along_axis or optax; smoothed; the head may be the embedding."""
    import optax

    b, s, d = m.shape
    how, tied, smooth = m.choose("one_hot", "take", "optax", "z"), m.chance(0.4), m.choose(0.0, 0.1)
    name = m.common("embedding", TOKENS, d, scale=0.7) if tied else ""
    head = None if tied else m.weight(d, TOKENS)
    labels = m.input("labels", m.values.integers(0, TOKENS, (b, s)).astype(np.int32))

    def of(p: Any, x: Any, env: Env) -> Any:
        logits = x @ (head(p) if head else env.shared[name].T)
        right = env.batch[labels]
        if how == "optax":
            return optax.softmax_cross_entropy_with_integer_labels(logits, right).mean()
        logs = jax.nn.log_softmax(logits)
        if how == "one_hot":
            aim = jax.nn.one_hot(right, TOKENS, dtype=logs.dtype) * (1 - smooth) + smooth / TOKENS
            return -jnp.sum(aim * logs, -1).mean()
        said = -jnp.take_along_axis(logs, right[..., None], axis=-1).mean()
        return said + (1e-2 * jnp.mean(jax.nn.logsumexp(logits, -1) ** 2) if how == "z" else 0)

    return of


@loss(whole=True)
def masked_tokens(m: Maker) -> Apply:
    """The mean over the tokens that are not masked."""
    b, s, d = m.shape
    head = m.weight(d, TOKENS)
    labels = m.input("labels", m.values.integers(0, TOKENS, (b, s)).astype(np.int32))
    weights = m.input("weights", (m.normal(b, s) > 0).astype(np.float64))

    def of(p: Any, x: Any, env: Env) -> Any:
        logs = jax.nn.log_softmax(x @ head(p))
        each = -jnp.take_along_axis(logs, env.batch[labels][..., None], -1)[..., 0]
        on = env.batch[weights]
        return jnp.sum(each * on) / (jnp.sum(on) + 1)

    return of


@loss(2, whole=True)
def contrastive(m: Maker) -> Apply:
    """All pairs of examples: InfoNCE with a learned temperature, symmetric or not; SigLIP's; triplets."""
    b, s, d = m.shape
    kind, w, scale = (
        m.choose("softmax", "symmetric", "sigmoid", "triplet"),
        m.weight(d, d),
        m.param(scale=0.3),
    )

    def of(p: Any, x: Any, env: Env) -> Any:
        a = x[:, : max(s // 2, 1)].mean(1)
        c = (x @ w(p)).max(1)
        a, c = (t / (jnp.linalg.norm(t, axis=-1, keepdims=True) + 1e-3) for t in (a, c))
        pairs = a @ c.T * jnp.exp(p[scale])
        if kind == "softmax":
            return -jnp.mean(jnp.diag(jax.nn.log_softmax(pairs)))
        if kind == "symmetric":
            labels = jnp.arange(b)
            logs = jax.nn.log_softmax(pairs, 0), jax.nn.log_softmax(pairs, 1)
            return -sum(jnp.mean(t[labels, labels]) for t in logs) / 2
        if kind == "sigmoid":
            return -jnp.mean(jax.nn.log_sigmoid(pairs * (2 * jnp.eye(b) - 1)))
        return jnp.mean(jax.nn.softplus(pairs - jnp.diagonal(pairs)[:, None]))

    return of


@loss()
def weighted(m: Maker) -> Apply:
    """A Huber, quantile or log-cosh loss with a weight for each example."""
    b, _s, _d = m.shape
    target, weights = _target(m), m.input("weights", np.abs(m.normal(b)))
    kind = m.choose("huber", "quantile", "logcosh")

    def of(p: Any, x: Any, env: Env) -> Any:
        e = x - env.batch[target]
        if kind == "huber":
            e = jnp.where(jnp.abs(e) < 1, 0.5 * e**2, jnp.abs(e) - 0.5)
        elif kind == "quantile":
            e = jnp.maximum(0.7 * e, -0.3 * e)
        else:
            e = jnp.logaddexp(e, -e) - np.log(2)
        return jnp.mean(e.mean((1, 2)) * env.batch[weights])

    return of


@loss()
def log_mean_exp(m: Maker) -> Apply:
    """The log-mean-exp of the tokens of each example."""
    d = m.shape[2]
    w = m.weight(d)
    return lambda p, x, env: jnp.mean(jax.nn.logsumexp(jnp.tanh(x @ w(p)) * 2, axis=1))


@loss()
def self_distilled(m: Maker) -> Apply:
    """A loss against the other half of the same values, without a gradient."""
    d = m.shape[2]
    w = m.weight(d, 6)

    def of(p: Any, x: Any, env: Env) -> Any:
        logits = x @ w(p)
        teacher = lax.stop_gradient(jax.nn.softmax(logits[:, ::-1] / 0.7))
        return -jnp.mean(jnp.sum(teacher * jax.nn.log_softmax(logits), -1))

    return of


@loss()
def variational_bound(m: Maker) -> Apply:
    """A reconstruction and a divergence from the normal distribution, with noise in the batch."""
    b, s, d = m.shape
    mean, logvar, back = m.weight(d, 4), m.weight(d, 4), m.weight(4, d)
    noise = m.input("noise", m.normal(b, s, 4))

    def of(p: Any, x: Any, env: Env) -> Any:
        mu, lv = x @ mean(p), 0.3 * jnp.tanh(x @ logvar(p))
        z = mu + jnp.exp(0.5 * lv) * env.batch[noise]
        divergence = -0.5 * jnp.mean(jnp.sum(1 + lv - mu**2 - jnp.exp(lv), -1))
        return jnp.mean((z @ back(p) - lax.stop_gradient(x)) ** 2) + 0.1 * divergence

    return of


@loss(whole=True)
def decorrelated(m: Maker) -> Apply:
    """Barlow's: the covariance of features over the batch against the identity."""
    b, _s, d = m.shape

    def of(p: Any, x: Any, env: Env) -> Any:
        y = x.mean(1)
        y = (y - y.mean(0)) / jnp.sqrt(y.var(0) + 0.1)
        return jnp.mean((y.T @ y / b - jnp.eye(d)) ** 2)

    return of


@loss()
def regularised(m: Maker) -> Apply:
    """A loss with a penalty on every trained parameter."""
    target = _target(m)

    def of(p: Any, x: Any, env: Env) -> Any:
        arrays = [w for w in jax.tree.leaves(env.params) if hasattr(w, "dtype")]
        leaves = [w for w in arrays if jnp.issubdtype(w.dtype, jnp.inexact)]
        penalty = sum(jnp.sum(jnp.real(w * jnp.conj(w))) for w in leaves)
        return jnp.mean(jnp.abs(x - env.batch[target]) ** 1.5) + 1e-3 * penalty

    return of


@loss()
def margin(m: Maker) -> Apply:
    """A hinge loss with the largest wrong score, or a focal loss."""
    b, _s, d = m.shape
    w, focal = m.weight(d, 5), m.chance(0.5)
    labels = m.input("labels", m.values.integers(0, 5, b).astype(np.int32))

    def of(p: Any, x: Any, env: Env) -> Any:
        scores, right = x.mean(1) @ w(p), jax.nn.one_hot(env.batch[labels], 5)
        if focal:
            chance = jnp.sum(jax.nn.softmax(scores) * right, -1)
            return -jnp.mean((1 - chance) ** 2 * jnp.log(chance))
        wrong = jnp.max(jnp.where(right > 0, -jnp.inf, scores), -1)
        return jnp.mean(jax.nn.relu(1 + wrong - jnp.sum(scores * right, -1)))

    return of
