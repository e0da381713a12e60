"""The parts that the zoo's models share: descriptions of parameters, and a few layers.

Models describe their parameters as trees of `Leaf`. `shapes` turns a tree into ``ShapeDtypeStruct``s for tracing, and
`arrays` turns it into arrays for running.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pase.pytree import Tree

__all__ = [
    "Built",
    "Leaf",
    "Stack",
    "Weights",
    "arrays",
    "bias",
    "cross_entropy",
    "dense",
    "full",
    "gelu",
    "integers",
    "layer_norm",
    "lookup",
    "normal",
    "ones",
    "repeat",
    "run_layers",
    "shapes",
    "silu",
    "token_loss",
    "weight",
]

Weights: TypeAlias = Tree
"""A pytree of parameters, of their descriptions, or of other arrays. Python's types cannot express it."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """The description of an array, by ``kind``.

    "normal": normal numbers with standard deviation ``scale``. "ones": ones. "integers": random integers below
    ``scale``. "full": the integer ``scale`` everywhere.
    """

    shape: tuple[int, ...]
    kind: Literal["normal", "ones", "integers", "full"]
    scale: float


@dataclass(frozen=True, kw_only=True)
class Built:
    """What a builder returns: the function of the task, and trees of `Leaf` for its arguments.

    loss_fn: the loss for task "train"; otherwise a function of (params, batch), and of the cache if there is one, which
    returns (next token, cache). decode: the function that runs after ``loss_fn`` in task "generate". stored: the dtype
    of parameters and cache.
    """

    loss_fn: Callable[..., Weights]
    params: Weights
    batch: Weights
    task: str = "train"
    cache: Weights = None
    decode: Callable[..., Weights] | None = None
    stored: str = "float32"

    @property
    def inputs(self) -> tuple[Weights, ...]:
        """The arguments of ``loss_fn`` after the parameters."""
        return (self.batch,) if self.cache is None else (self.batch, self.cache)


def normal(*shape: int, std: float = 0.02) -> Leaf:
    """An embedding, classifier or input: normal with the given standard deviation."""
    return Leaf(shape=shape, kind="normal", scale=std)


def weight(*shape: int, fan_in: int, gain: float = 1.0) -> Leaf:
    """A matrix or kernel that keeps its input's variance times ``gain`` (2 before a ReLU: He et al. 2015)."""
    return Leaf(shape=shape, kind="normal", scale=math.sqrt(gain / fan_in))


def bias(*shape: int) -> Leaf:
    """A bias. It has small numbers instead of zeros, because a wrong layout of zeros would not be noticed."""
    return normal(*shape)


def ones(*shape: int) -> Leaf:
    """The scale of a norm."""
    return Leaf(shape=shape, kind="ones", scale=1.0)


def integers(*shape: int, below: int) -> Leaf:
    """Tokens, labels and masks: int32 in [0, below)."""
    return Leaf(shape=shape, kind="integers", scale=below)


def full(*shape: int, value: int) -> Leaf:
    """An array with the same integer everywhere."""
    return Leaf(shape=shape, kind="full", scale=value)


def repeat(block: Weights, layers: int, *, scan: int) -> Weights:
    """Parameters of a stack of equal layers: leaves with a leading layer dim if ``scan``, otherwise a list of trees."""
    if not scan:
        return [block] * layers
    return jax.tree.map(lambda leaf: replace(leaf, shape=(layers, *leaf.shape)), block)


def shapes(tree: Weights, dtype: str = "float32") -> Weights:
    """The tree's ShapeDtypeStructs. Parameters and inputs are stored in ``dtype``, integers in int32."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, _dtype(leaf, dtype)), tree)


def arrays(tree: Weights, seed: int, dtype: str = "float32") -> Weights:
    """The tree's arrays in the dtypes of `shapes`, drawn in the tree's order from one numpy generator."""
    rng = np.random.default_rng(seed)

    def draw(leaf: Leaf) -> jax.Array:
        if leaf.kind == "integers":
            return jnp.asarray(rng.integers(0, int(leaf.scale), leaf.shape, dtype=np.int32))
        if leaf.kind == "ones":
            return jnp.asarray(np.ones(leaf.shape, np.float32), dtype)
        if leaf.kind == "full":
            return jnp.full(leaf.shape, int(leaf.scale), jnp.int32)
        return jnp.asarray(rng.standard_normal(leaf.shape, dtype=np.float32) * np.float32(leaf.scale), dtype)

    return jax.tree.map(draw, tree)


def _dtype(leaf: Leaf, dtype: str) -> Weights:
    return jnp.int32 if leaf.kind in ("integers", "full") else jnp.dtype(dtype)


# Layers. Each casts its parameters to x's dtype where it uses them.


def run_layers(
    layer: Callable[[Weights, Weights], Weights], x: Weights, layers: Weights, *, scan: int, remat: int
) -> Weights:
    """Apply ``x = layer(x, p)`` for the parameters p of each layer, which have the form of `repeat`.

    With ``remat``, backward recomputes each layer, so that only the layers' inputs are residuals.
    """
    if remat:
        # Under scan, the loop itself prevents XLA from merging the recomputation with the forward pass.
        layer = jax.checkpoint(layer, prevent_cse=not scan)
    if scan:
        return jax.lax.scan(lambda carry, p: (layer(carry, p), None), x, layers)[0]
    for p in layers:
        x = layer(x, p)
    return x


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The settings that all transformers have: equal blocks of width ``d``, and how they run.

    attention: "plain" or "fused". scan: one loop over the blocks. remat: backward recomputes each of them.
    """

    layers: int
    d: int
    dtype: str
    attention: str
    scan: int
    remat: int

    def leaves(self, block: Weights) -> Weights:
        """The parameters of all blocks, given those of one."""
        return repeat(block, self.layers, scan=self.scan)

    def run(self, block: Callable[[Weights, Weights], Weights], x: Weights, blocks: Weights) -> Weights:
        """`run_layers` of all blocks."""
        return run_layers(block, x, blocks, scan=self.scan, remat=self.remat)

    def lookup(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """`lookup` in the dtype of the blocks."""
        return lookup(table, tokens, self.dtype)

    def scores(self, x: jax.Array, table: jax.Array) -> jax.Array:
        """Logits [b, s, vocab] in float32, from x [b, s, d] and a table of embeddings [vocab, d]."""
        return jnp.einsum("bsd,vd->bsv", x, table.astype(self.dtype), preferred_element_type=jnp.float32)


def dense(x: jax.Array, p: Weights) -> jax.Array:
    """x w + b over the last dim."""
    return x @ p["w"].astype(x.dtype) + p["b"].astype(x.dtype)


def layer_norm(x: jax.Array, p: Weights, *, eps: float = 1e-5) -> jax.Array:
    """Normalize the last dim to mean 0 and variance 1 in float32, then apply scale and bias."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * p["scale"] + p["bias"]).astype(x.dtype)


def silu(x: jax.Array) -> jax.Array:
    """x · sigmoid(x)."""
    return jax.nn.silu(x)


def gelu(x: jax.Array) -> jax.Array:
    """The Gaussian error linear unit in its tanh form, as in GPT-2."""
    return jax.nn.gelu(x)


def lookup(table: jax.Array, tokens: jax.Array, dtype: str) -> jax.Array:
    """Rows of a [vocabulary, d] table for integer tokens of any shape."""
    return jnp.take(table, tokens, axis=0, mode="clip").astype(dtype)


def token_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-log softmax(logits)[label] for logits [..., classes] and integer labels [...]."""
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1, mode="clip")[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean of `token_loss`. Logits are float32."""
    return jnp.mean(token_loss(logits, labels))
