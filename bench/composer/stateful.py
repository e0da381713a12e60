"""Layers with state: modules of Flax NNX in the model itself, Linen's collections, Equinox's State, Haiku, counters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.composer.maker import Apply, Env, Maker, layer

FLOAT32 = 2.0**-23


def double(tree: Any) -> Any:
    """Returns the tree with its arrays of floats in float64, on the host."""

    def one(x: Any) -> Any:
        if not isinstance(x, np.ndarray | jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)

    return jax.tree.map(one, tree)


@layer(2, holds="modules")
def nnx_streams(m: Maker) -> Apply:
    """Modules of Flax NNX whose random streams, counters and vectors change in each call; examples stay independent."""
    from flax import nnx

    from bench.composer.nnx_model import with_streams

    _b, _s, d = m.shape
    seed = m.part.seed % 1000
    kind = m.choose("dropout", "attention", "counter", "spectral", "rnn", "nested", "lora", "scan", "remat")

    if kind in ("attention", "spectral"):
        m.epsilon = max(m.epsilon, FLOAT32)
    name = m.module(lambda: with_streams(kind, d, seed))

    def apply(p: Any, x: Any, env: Env) -> Any:
        module = env.modules[name]
        if kind == "scan":

            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def forward(x: Any, block: Any) -> Any:
                return block(x)

            return forward(x, module)
        if kind == "remat":
            return nnx.remat(lambda module, x: module(x))(module, x)
        return module(x) if kind in ("nested", "counter") else x + module(x)

    return apply


@layer(holds="modules", whole=True)
def nnx_statistics(m: Maker) -> Apply:
    """Modules of Flax NNX with batch statistics, noise from a stream, a moving mean, and accumulated metrics."""
    from flax import nnx

    d = m.shape[2]
    seed = m.part.seed % 1000
    kind = m.choose("batch_norm", "noise", "mean", "metric")

    class Mean(nnx.Variable[Any]):
        """A moving mean."""

    class Noisy(nnx.Module):
        """A product with noise or a moving mean."""

        def __init__(self, rngs: nnx.Rngs) -> None:
            self.inner = nnx.Linear(d, d, rngs=rngs, param_dtype=jnp.float64)
            self.rngs = rngs
            self.mean = Mean(jnp.zeros(d))

        def __call__(self, x: Any) -> Any:
            h = jnp.tanh(self.inner(x))
            if kind == "noise":
                return h + 0.1 * jax.random.normal(self.rngs.noise(), x.shape)
            h = h - self.mean[...]
            self.mean[...] = 0.9 * self.mean[...] + 0.1 * lax.stop_gradient(h.mean((0, 1)))
            return h

    if kind == "batch_norm":
        m.epsilon = max(m.epsilon, FLOAT32)  # its statistics are in float32
        name = m.module(lambda: nnx.BatchNorm(d, momentum=0.8, rngs=nnx.Rngs(seed), param_dtype=jnp.float64))
    else:
        name = m.module(lambda: Noisy(nnx.Rngs(seed, noise=seed + 1)))
    if kind == "metric":
        m.epsilon = max(m.epsilon, FLOAT32)
        average = m.module(lambda: nnx.metrics.Average("value"))

    def apply(p: Any, x: Any, env: Env) -> Any:
        y = env.modules[name](x)
        if kind == "metric":
            env.modules[average].update(value=lax.stop_gradient(y))
        return x + y

    return apply


@layer(holds="state")
def carried_state(m: Maker) -> Apply:
    """A counter, a split typed key and an average of the weights, passed on as a dict; examples stay independent."""
    d = m.shape[2]
    w, kind = m.weight(d, d), m.choose("counter", "key", "average", "schedule")
    name = m.held(
        kind,
        {
            "counter": np.asarray(0, np.int32),
            "key": jax.random.key(m.part.seed),
            "average": {"w": np.zeros((d, d)), "n": np.zeros(())},
            "schedule": (np.ones(()), np.asarray([True, False])),
        }[kind],
    )

    def apply(p: Any, x: Any, env: Env) -> Any:
        held = env.state[name]
        if kind == "counter":
            env.state[name] = held + 1
            return x + jnp.tanh(x @ w(p)) / (held + 1)
        if kind == "key":
            env.state[name], mine = jax.random.split(held)
            return x + jnp.tanh(x @ w(p)) * jax.random.bernoulli(mine, 0.8, x.shape)
        if kind == "average":
            mean = 0.9 * held["w"] + 0.1 * lax.stop_gradient(w(p))
            env.state[name] = {"w": mean, "n": held["n"] + 1}
            return x + jnp.tanh(x @ w(p)) + 0.1 * x @ mean
        rate, flags = held
        env.state[name] = (0.9 * rate, flags[::-1])
        return x + rate * jnp.tanh(x @ w(p)) + jnp.where(flags[0], 0.1 * x, 0)

    return apply


@layer(holds="state", whole=True)
def carried_statistics(m: Maker) -> Apply:
    """A codebook's counts and sums, batch statistics, a memory of past examples, or a center, for the whole batch."""
    b, _s, d = m.shape
    w, kind = m.weight(d, d), m.choose("codebook", "statistics", "queue", "centre")
    start: dict[str, Any] = {
        "codebook": {"counts": np.ones(6), "sums": m.normal(6, d)},
        "statistics": {"mean": np.zeros(d), "var": np.ones(d)},
        "queue": m.normal(2 * b, d),
        "centre": np.zeros(d),
    }
    name = m.held(kind, start[kind])

    def apply(p: Any, x: Any, env: Env) -> Any:
        y, held = jnp.tanh(x @ w(p)), env.state[name]
        stopped = lax.stop_gradient(y)
        if kind == "codebook":
            codes = held["sums"] / held["counts"][:, None]
            apart = jnp.sum(codes**2, -1) - 2 * stopped @ codes.T
            chosen = jax.nn.one_hot(jnp.argmin(apart, -1), 6, dtype=y.dtype)
            env.state[name] = {
                "counts": 0.9 * held["counts"] + 0.1 * chosen.sum((0, 1)),
                "sums": 0.9 * held["sums"] + 0.1 * jnp.einsum("bsn,bsd->nd", chosen, stopped),
            }
            env.terms.append(0.2 * jnp.mean((y - chosen @ codes) ** 2))
            return x + y
        if kind == "statistics":
            mean, var = y.mean((0, 1)), y.var((0, 1))
            env.state[name] = jax.tree.map(
                lambda old, new: 0.9 * old + 0.1 * lax.stop_gradient(new), held, {"mean": mean, "var": var}
            )
            return x + (y - mean) * lax.rsqrt(var + 1e-1)
        if kind == "queue":
            env.state[name] = jnp.concatenate([stopped.mean(1), held[:-b]])
            scores = jnp.einsum("bsd,nd->bsn", y, held) / d
            return x + jax.nn.softmax(scores) @ held
        env.state[name] = 0.9 * held + 0.1 * stopped.mean((0, 1))
        return x + jax.nn.softmax(y - held) * d

    return apply


@layer(holds="state", whole=True)
def linen_collections(m: Maker) -> Apply:
    """A module of Flax Linen with mutable collections and random streams."""
    from flax import linen as nn

    d, kind = m.shape[2], m.choose("batch_norm", "dropout", "own", "spectral", "scan")

    class Own(nn.Module):
        """A variable in its own collection."""

        @nn.compact
        def __call__(self, x: Any) -> Any:
            h = jnp.tanh(nn.Dense(d, param_dtype=jnp.float64)(x))
            seen = self.variable("seen", "mean", lambda: jnp.zeros(d))
            h = h - seen.value
            if not self.is_initializing():
                seen.value = 0.9 * seen.value + 0.1 * lax.stop_gradient(h.mean((0, 1)))
            return nn.Dropout(0.2, deterministic=False)(h)

    class Normed(nn.Module):
        """Batch statistics, over layers in a scan or not."""

        @nn.compact
        def __call__(self, x: Any) -> Any:
            h = nn.Dense(d, param_dtype=jnp.float64)(x)
            if kind == "spectral":
                h = nn.SpectralNorm(nn.Dense(d, param_dtype=jnp.float64), collection_name="batch_stats")(
                    x, update_stats=True
                )
            return x + jnp.tanh(
                nn.BatchNorm(use_running_average=False, momentum=0.8, param_dtype=jnp.float64)(h)
            )

    class Layers(nn.Module):
        """Two of them in nn.scan."""

        @nn.compact
        def __call__(self, x: Any) -> Any:
            scanned = nn.scan(
                lambda module, x, _: (module(x), None),
                variable_axes={"params": 0, "batch_stats": 0},
                split_rngs={"params": True},
                length=2,
            )
            return scanned(Normed(name="layer"), x, None)[0]

    module: Any = {"own": Own, "dropout": Own, "scan": Layers}.get(kind, Normed)()
    m.epsilon = max(m.epsilon, FLOAT32)  # statistics are in float32
    keys = {"params": jax.random.key(m.part.seed), "dropout": jax.random.key(1)}
    made = dict(module.init(keys, jnp.zeros(m.shape)))
    name = m.leaf(double(made.pop("params")))
    held = m.held("collections", {"variables": double(made), "key": jax.random.key(m.part.seed + 1)})

    def apply(p: Any, x: Any, env: Env) -> Any:
        state = env.state[held]
        after, mine = jax.random.split(state["key"])
        y, moved = module.apply(
            {"params": p[name], **state["variables"]}, x, rngs={"dropout": mine}, mutable=list(made)
        )
        env.state[held] = {"variables": dict(moved), "key": after}
        return x + y

    return apply


@layer(holds="state", whole=True)
def equinox_state(m: Maker) -> Apply:
    """A module of Equinox with a State: batch statistics over a vmap, spectral norm, a custom index."""
    import equinox as eqx

    d = m.shape[2]
    kind = m.choose("batch_norm", "spectral", "own", "dropout")

    class Own(eqx.Module):
        """Counts its calls."""

        inner: eqx.nn.Linear
        index: eqx.nn.StateIndex[Any]

        def __init__(self, key: Any) -> None:
            self.inner = eqx.nn.Linear(d, d, key=key)
            self.index = eqx.nn.StateIndex(jnp.array(0))

        def __call__(self, x: Any, state: Any) -> Any:
            n = state.get(self.index)
            return jnp.tanh(self.inner(x)) / (n + 1), state.set(self.index, n + 1)

    class Normed(eqx.Module):
        """A product and a norm with state."""

        inner: eqx.nn.Linear
        norm: Any
        dropout: eqx.nn.Dropout

        def __init__(self, key: Any) -> None:
            self.inner = eqx.nn.Linear(d, d, key=key)
            self.norm = (
                eqx.nn.SpectralNorm(eqx.nn.Linear(d, d, key=key), "weight", key=key)
                if kind == "spectral"
                else eqx.nn.BatchNorm(d, "examples", mode="batch", momentum=0.8)
            )
            self.dropout = eqx.nn.Dropout(0.2, inference=kind != "dropout")

        def __call__(self, x: Any, state: Any) -> Any:
            h, state = self.norm(self.inner(x), state)
            return self.dropout(jnp.tanh(h), key=jax.random.key(3)), state

    model, state = eqx.nn.make_with_state(Own if kind == "own" else Normed)(jax.random.key(m.part.seed))
    m.epsilon = max(m.epsilon, FLOAT32)
    name, held = m.leaf(double(model)), m.held("state", state)

    def apply(p: Any, x: Any, env: Env) -> Any:
        each = jax.vmap(p[name], axis_name="examples", in_axes=(0, None), out_axes=(0, None))
        y, env.state[held] = each(x.mean(1), env.state[held])
        return x + y[:, None]

    return apply
