"""Flax NNX models with every kind of state, and their step under nnx.jit on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

OPTIMIZER = optax.adam(1e-2, eps=1e-3)
WIDTH, HIDDEN = 16, 32
X = jax.random.normal(jax.random.key(3), (16, WIDTH))
BATCH = {"x": X, "y": jnp.sin(X)}
TOKENS = jax.random.randint(jax.random.key(5), (8, 12), 0, HIDDEN)


class Count(nnx.Variable):
    """A counter of a Variable type that the user defines."""


class Mean(nnx.Variable):
    """A moving mean."""


class Layer(nnx.Module):
    """Batch statistics, two random streams, a counter, a moving mean, and an array that is not a Variable."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.rngs = rngs
        self.count = Count(jnp.int32(0))
        self.mean = Mean(jnp.zeros(WIDTH))
        self.scales = nnx.data(
            {("of", "h"): jnp.linspace(0.5, 1.5, WIDTH)}
        )  # as nnx.WeightNorm keeps its own

    def __call__(self, x: Any) -> Any:
        x = x + 0.1 * jax.random.normal(self.rngs.noise(), x.shape)
        h = self.scales["of", "h"] * jnp.tanh(self.norm(self.inner(x))) - self.mean[...]
        self.count[...] += 1
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * jax.lax.stop_gradient(h.mean(0))
        return x + self.dropout(h) / self.count[...]


class Everything(nnx.Module):
    """Layers, two of which are the same module and two of which share weights, and a spectral norm.

    The spectral norm writes a parameter.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = Layer(rngs)
        self.second = Layer(rngs)
        self.again = self.first
        self.second.inner = self.first.inner
        self.up = nnx.SpectralNorm(nnx.Linear(WIDTH, HIDDEN, rngs=rngs), rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(nnx.relu(self.up(self.again(self.second(self.first(x))))))


class Decoder(nnx.Module):
    """A block of a decoder with dropout in its attention, and tied embeddings."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(HIDDEN, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            4, WIDTH, decode=False, dropout_rate=0.2, deterministic=False, rngs=rngs
        )
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        h = self.embed(tokens)
        h = h + self.dropout(self.attention(self.norm(h), mask=nnx.make_causal_mask(tokens)))
        return self.embed.attend(h)


class Scanned(nnx.Module):
    """Layers stacked by nnx.vmap, run by nnx.scan."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def layers(rngs: nnx.Rngs) -> Layer:
            return Layer(rngs)

        self.layers = layers(
            rngs.fork(split=3)
        )  # a fork keeps a stream for each layer, which the layers hold
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: Any, layer: Any) -> Any:
            return layer(x)

        return self.head(forward(x, self.layers))


class Recomputed(nnx.Module):
    """The same without state, each layer under nnx.remat, which returns the layer's parameters as they were."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def layers(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        self.layers = layers(rngs)

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def forward(x: Any, layer: Any) -> Any:
            return x + nnx.relu(layer(x))

        return forward(x, self.layers)


class Dropped(nnx.Module):
    """Dropout, a counter and a random stream. Examples do not interact, so it can be run in micro-batches."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.SpectralNorm(nnx.Linear(HIDDEN, WIDTH, rngs=rngs), rngs=rngs)
        self.count = Count(jnp.int32(0))

    def __call__(self, x: Any) -> Any:
        self.count[...] += 1
        return self.down(self.dropout(nnx.relu(self.up(x)))) / self.count[...]


def rngs(seed: int = 0) -> nnx.Rngs:
    return nnx.Rngs(seed, dropout=1, noise=2)


def squares(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def next_token(model: Any, tokens: Any) -> Any:
    logits = model(tokens)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def distilled(student: Any, teacher: Any, batch: Any) -> Any:
    """Two modules. The teacher's state changes too, but its weights are not trained."""
    wanted = jax.lax.stop_gradient(teacher(batch["x"]))
    got = student(batch["x"])
    return jnp.mean((got - wanted) ** 2), {"largest": jnp.max(got)}


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "everything": (squares, lambda: (Everything(rngs()), BATCH)),
    "decoder": (next_token, lambda: (Decoder(rngs()), TOKENS)),
    "scanned": (squares, lambda: (Scanned(rngs()), BATCH)),
    "distilled": (distilled, lambda: (Layer(rngs()), Layer(rngs(4)), BATCH)),
}
"""Name -> (loss function, a function that makes new arguments)."""


def unsharded(loss: Callable[..., Any], args: tuple[Any, ...], steps: int, parts: int = 1) -> list[Any]:
    """The losses of steps written as in Flax's guides. Updates args. parts: the number of micro-batches of a step."""
    model, *_, batch = args
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    has_aux = loss is distilled

    @nnx.jit
    def step(model: Any, optimizer: Any, *rest: Any) -> Any:
        *others, batch = rest
        summed, losses = None, []
        for k in range(parts):
            part = jax.tree.map(lambda x, k=k: x[k::parts], batch)
            value, grads = nnx.value_and_grad(loss, has_aux=has_aux)(model, *others, part)
            losses.append(value[0] if has_aux else value)
            summed = grads if summed is None else jax.tree.map(jnp.add, summed, grads)
        optimizer.update(model, jax.tree.map(lambda g: g / parts, summed))
        return sum(losses) / parts

    return [float(step(model, optimizer, *args[1:-1], batch)) for _ in range(steps)]


def variables(*modules: Any) -> dict[str, np.ndarray]:
    """Path -> array, for the arrays of modules."""
    state = jax.tree_util.tree_flatten_with_path(nnx.state(tuple(modules)))[0]

    def raw(x: Any) -> np.ndarray:
        return np.asarray(jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return {jax.tree_util.keystr(path): raw(x) for path, x in state}


def assert_alike(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert got.keys() == wanted.keys()
    for path, x in wanted.items():
        np.testing.assert_allclose(got[path], x, rtol=1e-4, atol=5e-5, err_msg=path)
        assert got[path].dtype == x.dtype, path
