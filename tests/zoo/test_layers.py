"""Norms, losses and lookups against independent references: numpy, and the layers of Flax."""

from __future__ import annotations

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np

from pase.zoo.convolution import batch_norm
from pase.zoo.layers import cross_entropy, layer_norm, lookup, token_loss
from pase.zoo.llama import rms_norm
from tests.zoo.helpers import RNG, close, draw


def test_norms_are_flaxs() -> None:
    x, scale, bias = draw(3, 5, 8) * 3 + 1, draw(8), draw(8)
    p = {"scale": scale, "bias": bias}
    close(layer_norm(x, p), flax.linen.LayerNorm(epsilon=1e-5).apply({"params": p}, x))
    rms = flax.linen.RMSNorm(epsilon=1e-5).apply({"params": {"scale": scale}}, x)
    close(rms_norm(x, scale), rms)
    images = draw(4, 6, 6, 8) * 2 - 1
    norm = flax.linen.BatchNorm(use_running_average=False, epsilon=1e-5)
    state = {"batch_stats": {"mean": jnp.zeros(8), "var": jnp.ones(8)}}
    expected, _ = norm.apply({"params": p} | state, images, mutable=["batch_stats"])
    close(batch_norm(images, p), expected)


def test_token_loss_is_minus_log_softmax() -> None:
    logits, labels = draw(3, 5, 11) * 4, jnp.asarray(RNG.integers(0, 11, (3, 5)))
    expected = -np.log(jax.nn.softmax(logits))[np.arange(3)[:, None], np.arange(5), labels]
    close(jax.jit(token_loss)(logits, labels), expected)
    close(jax.jit(cross_entropy)(logits, labels), expected.mean())


def test_lookup_is_indexing() -> None:
    table, tokens = draw(11, 4), jnp.asarray(RNG.integers(0, 11, (3, 5)))
    close(lookup(table, tokens, "float32"), table[tokens])
