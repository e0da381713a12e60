"""The zoo's layers against independent references: plain loops, and the layers of JAX and Flax."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pase.zoo.attention import attend
from pase.zoo.convolution import average_pool, batch_norm, conv, max_pool
from pase.zoo.layers import arrays, cross_entropy, layer_norm, lookup, normal, token_loss
from pase.zoo.llama import attend_grouped, fused_grouped, grouped_attention, rms_norm, rotary, rotate
from pase.zoo.moe import expert_leaves, experts_forward, slots
from pase.zoo.rnn import lstm
from pase.zoo.seq2seq import positions

RNG = np.random.default_rng(0)


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape, dtype=np.float32))


def close(x: Any, y: Any, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
def test_attend_is_dot_product_attention(causal: bool) -> None:
    q, k, v = draw(2, 6, 4, 8), draw(2, 6, 4, 8), draw(2, 6, 4, 8)
    reference = jax.jit(partial(jax.nn.dot_product_attention, is_causal=causal))
    close(jax.jit(partial(attend, causal=causal))(q, k, v), reference(q, k, v))


def test_grouped_attention_is_dot_product_attention_with_shared_heads() -> None:
    d, heads, group, k, seq = 16, 2, 3, 4, 5
    x = draw(2, seq, d)
    p = {"wq": draw(d, heads, group, k), "wk": draw(d, heads, k), "wv": draw(d, heads, k)}
    p["wo"] = draw(heads, group, k, d)
    cos, sin = rotary(seq, k, 10_000.0)

    @jax.jit
    def reference(x: jax.Array) -> jax.Array:
        q = jnp.einsum("bsd,dhk->bshk", x, p["wq"].reshape(d, heads * group, k))
        keys, values = (jnp.einsum("bsd,dhk->bshk", x, p[name]) for name in ("wk", "wv"))
        y = jax.nn.dot_product_attention(rotate(q, cos, sin), rotate(keys, cos, sin), values, is_causal=True)
        return jnp.einsum("bshk,hkd->bsd", y, p["wo"].reshape(heads * group, k, d))

    for function in (attend_grouped, fused_grouped):
        close(jax.jit(partial(grouped_attention, attend=function))(x, p, cos, sin), reference(x), 1e-4)


def test_rotary_scores_depend_on_distance_alone() -> None:
    cos, sin = rotary(9, 8, 500_000.0)
    q, k = draw(8), draw(8)
    rows = (1, 9, 8)
    turned_q = rotate(jnp.broadcast_to(q, rows), cos, sin)[0]
    turned_k = rotate(jnp.broadcast_to(k, rows), cos, sin)[0]
    scores = turned_q @ turned_k.T
    for distance in range(5):
        along = jnp.diagonal(scores, -distance)
        close(along, jnp.full(along.shape, along[0]), 1e-4)
    close(turned_q[0], q)
    assert abs(float(scores[4, 0] - scores[0, 0])) > 1e-3


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


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize(("window", "stride"), [(3, 2), (2, 2), (3, 1)])
def test_pools_and_convolutions_are_flaxs(window: int, stride: int, padding: str) -> None:
    x, w = draw(2, 9, 9, 4), draw(window, window, 4, 6)
    sizes, steps = (window, window), (stride, stride)
    close(
        average_pool(x, window=window, stride=stride, padding=padding),
        flax.linen.avg_pool(x, sizes, steps, padding),
    )
    close(
        max_pool(x, window=window, stride=stride, padding=padding),
        flax.linen.max_pool(x, sizes, steps, padding),
    )
    layer = flax.linen.Conv(6, sizes, steps, padding, use_bias=False)
    expected = layer.apply({"params": {"kernel": w}}, x)
    close(conv(x, w, stride=stride, padding=padding), expected, 1e-4)


def test_lstm_is_a_loop_of_cells() -> None:
    d, hidden = 5, 7
    x = draw(4, 3, d)
    p = {"wx": draw(d, 4, hidden), "wh": draw(hidden, 4, hidden), "b": draw(4, hidden)}
    cell = flax.linen.LSTMCell(hidden)
    weights = {}
    for gate, letter in enumerate("ifgo"):
        weights[f"i{letter}"] = {"kernel": p["wx"][:, gate]}
        weights[f"h{letter}"] = {"kernel": p["wh"][:, gate], "bias": p["b"][gate]}
    state = (jnp.zeros((3, hidden)), jnp.zeros((3, hidden)))
    outputs: list[Any] = []
    for step in x:
        state, y = cell.apply({"params": weights}, state, step)
        outputs.append(y)
    close(lstm(x, p), jnp.stack(outputs))


def test_token_loss_is_minus_log_softmax() -> None:
    logits, labels = draw(3, 5, 11) * 4, jnp.asarray(RNG.integers(0, 11, (3, 5)))
    expected = -np.log(jax.nn.softmax(logits))[np.arange(3)[:, None], np.arange(5), labels]
    close(jax.jit(token_loss)(logits, labels), expected)
    close(jax.jit(cross_entropy)(logits, labels), expected.mean())


def test_lookup_is_indexing() -> None:
    table, tokens = draw(11, 4), jnp.asarray(RNG.integers(0, 11, (3, 5)))
    close(lookup(table, tokens, "float32"), table[tokens])


def test_sinusoids() -> None:
    table = positions(6, 8)
    for position in range(6):
        for i in range(4):
            angle = position / 10_000 ** (2 * i / 8)
            close(table[position, i], np.sin(angle))
            close(table[position, i + 4], np.cos(angle))


def dense_experts(x: Any, p: Any, chosen: int, capacity: int) -> np.ndarray:
    """For each token, the sum of its experts' results, weighted by its gates.

    Its experts are those with the largest logits, as long as they have capacity left.
    """
    p = {key: np.asarray(value, np.float64) for key, value in p.items()}
    y = np.zeros(x.shape)
    for row in range(x.shape[0]):
        used = dict.fromkeys(range(p["router"].shape[1]), 0)
        for position in range(x.shape[1]):
            token = np.asarray(x[row, position], np.float64)
            logits = token @ p["router"]
            best = np.argsort(-logits)[:chosen]
            gates = np.exp(logits[best]) / np.exp(logits[best]).sum()
            for expert, gate in zip(best.tolist(), gates, strict=True):
                used[expert] += 1
                if used[expert] <= capacity:
                    a = token @ p["gate"][expert]
                    hidden = a / (1 + np.exp(-a)) * (token @ p["up"][expert])
                    y[row, position] += gate * (hidden @ p["down"][expert])
    return y


@pytest.mark.parametrize(("capacity_percent", "drops"), [(400, False), (100, True), (50, True)])
def test_experts_are_the_per_token_reference(capacity_percent: int, drops: bool) -> None:
    """At 400% of the even share of 2 in 8, each expert has capacity for every token, so nothing is dropped."""
    seq, experts, chosen = 12, 8, 2
    x = draw(3, seq, 16)
    p = arrays(expert_leaves(16, 24, experts) | {"router": normal(16, experts, std=1.0)}, 1)
    capacity = slots(seq, experts, chosen, capacity_percent)
    y = jax.jit(partial(experts_forward, chosen=chosen, capacity_percent=capacity_percent))(x, p)
    close(y, dense_experts(x, p, chosen, capacity), 1e-4)
    unlimited = dense_experts(x, p, chosen, seq)
    assert bool(np.abs(unlimited - y).max() > 1e-2) == drops
