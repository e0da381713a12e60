"""Merged products under tensor parallelism: a rank has its own columns of each part, as of separate weights."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pase.frontends import registry
from pase.frontends.jax.frontend import trace
from pase.stated.columns import with_own_columns
from pase.stated.parts import Part
from tests.stated.test_mixtures import priced

D, HEADS, HIDDEN = 64, 8, 96
BATCH, SEQ, LAYERS = 16, 32, 3
HEAD = D // HEADS


def heads(*parts: Any) -> list[Any]:
    return [t.reshape(BATCH, SEQ, -1, HEAD) for t in parts]


def split(x: Any, p: Any, few: int) -> list[Any]:
    return heads(*jnp.split(x @ p["qkv"], [D, D + few * HEAD], -1))


def sliced(x: Any, p: Any, few: int) -> list[Any]:
    y, at = x @ p["qkv"], D + few * HEAD
    return heads(y[..., :D], y[..., D:at], y[..., at:])


def nested(x: Any, p: Any, few: int) -> list[Any]:
    q, kv = jnp.split(x @ p["qkv"], [D], -1)
    return heads(q, *jnp.split(kv, 2, -1))


def biased(x: Any, p: Any, few: int) -> list[Any]:
    return heads(*jnp.split(x @ p["qkv"] + p["bias"], [D, D + few * HEAD], -1))


def by_head(x: Any, p: Any, few: int) -> list[Any]:
    y = (x @ p["qkv"]).reshape(BATCH, SEQ, HEADS + 2 * few, HEAD)
    return jnp.split(y, [HEADS, HEADS + few], 2)


def stacked(x: Any, p: Any, few: int) -> list[Any]:
    y = (x @ p["qkv"]).reshape(BATCH, SEQ, 3, HEADS, HEAD)
    return [y[:, :, i] for i in range(3)]


def unstacked(x: Any, p: Any, few: int) -> Any:
    return jnp.unstack((x @ p["qkv"]).reshape(BATCH, SEQ, 3, HEADS, HEAD), axis=2)


def apart(x: Any, p: Any, few: int) -> list[Any]:
    return heads(*(x @ w for w in p["qkv"]))


@cache
def traced(attend: Any, few: int, gated: str = "split") -> Any:
    """Decoder layers with ``few`` heads of keys and values, and a gated network."""

    def gate_and_up(x: Any, p: Any) -> Any:
        if gated == "apart":
            return [x @ w for w in p["up"]]
        y = x @ p["up"]
        return jnp.split(y, 2, -1) if gated == "split" else (y[..., ::2], y[..., 1::2])

    def loss(layers: Any, x: Any) -> Any:
        for p in layers:
            y = jax.nn.dot_product_attention(*attend(x, p, few)).reshape(x.shape)
            x = x + y @ p["o"]
            gate, up = gate_and_up(x, p)
            x = x + (jax.nn.silu(gate) * up) @ p["down"]
        return (x**2).mean()

    def of(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, "float32")

    widths = [D, few * HEAD, few * HEAD]
    layer = {"qkv": of(D, sum(widths)), "up": of(D, 2 * HIDDEN), "o": of(D, D), "down": of(HIDDEN, D)}
    layer |= {"bias": of(sum(widths))} if attend is biased else {}
    layer |= {"qkv": [of(D, w) for w in widths]} if attend is apart else {}
    layer |= {"up": [of(D, HIDDEN)] * 2} if gated == "apart" else {}
    return registry.trace(loss, [layer] * LAYERS, of(BATCH, SEQ, D))


def sent(part: Part) -> Counter[Any]:
    """Bytes between products, by kind of collective."""
    found: Counter[Any] = Counter()
    for c in part.sent:
        found[c.kind] += round(c.nbytes * c.times)
    return found


@cache
def of_separate_weights(few: int, text: str) -> Any:
    """The price of the layers with a weight for each part, and its parts."""
    return priced(traced(apart, few, "apart"), text)


@pytest.mark.some(8)
@pytest.mark.parametrize("text", ["tp=8", "dp=2,tp=4", "dp=4,tp=2,sp"])
@pytest.mark.parametrize("gated", ["split", "turns"])
@pytest.mark.parametrize(
    ("merged", "few"),
    [(f, 8) for f in (split, sliced, nested, biased, by_head, stacked, unstacked)]
    + [(f, 2) for f in (split, sliced, nested, biased)],
    ids=lambda v: v if isinstance(v, int) else v.__name__,
)
def test_a_merged_product_costs_a_rank_what_separate_ones_do(
    merged: Any, few: int, gated: str, text: str
) -> None:
    """The same parameters, and the same sums and scatters between products. With sequence parallelism, gathers are
    fewer, because one serves all parts."""
    (p, parts), (q, separate) = priced(traced(merged, few, gated), text), of_separate_weights(few, text)
    biases = LAYERS * (D + 2 * few * HEAD) if merged is biased else 0
    ways = int(text.partition("tp=")[2][0])
    assert p.memory.parameters == pytest.approx(q.memory.parameters + 4 * biases / ways)
    mine, theirs = sent(parts.block), sent(separate.block)
    assert mine.keys() == theirs.keys()
    for kind in mine.keys() - {"all_gather"}:
        assert mine[kind] == pytest.approx(theirs[kind], rel=0.01)
    assert p.seconds["between products"] <= 1.02 * q.seconds["between products"]
    assert p.memory.activations <= 1.1 * q.memory.activations
    assert parts.block.forward_s <= separate.block.forward_s


def test_cuts_without_a_share_for_each_rank_stay_as_they_are() -> None:
    def loss(w: Any, x: Any) -> Any:
        y = x @ w
        overlap = y[:, :16] * y[:, 8:24]  # a rank's columns of one are not its columns of the other
        uneven = jnp.split(jnp.tanh(x @ w), [10], -1)  # 4 ranks do not divide 10
        rows = (x @ w)[:8]  # not columns
        inputs = x[:, :4]  # no product's
        return overlap.sum() + sum(t.sum() for t in (*uneven, rows, inputs))

    w, x = jax.ShapeDtypeStruct((32, 32), "float32"), jax.ShapeDtypeStruct((16, 32), "float32")
    raw = trace(loss, w, x).graph
    assert with_own_columns(raw, 4) == raw


@pytest.mark.some(1)
@pytest.mark.torch
@pytest.mark.parametrize("few", [8, 2])
def test_phi_3_has_the_parameters_and_collectives_of_a_llama(few: int) -> None:
    """Phi-3 is a Llama with merged projections."""
    settings = {"batch": 8, "sequence": 32, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
    settings |= {
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": few,
        "pad_token_id": 0,
    }
    words = "&".join(f"{k}={v}" for k, v in settings.items())
    (p, phi), (q, llama) = (
        priced(registry.trace(f"hf:{name}?{words}"), "tp=8")
        for name in ("Phi3ForCausalLM", "LlamaForCausalLM")
    )
    assert p.memory.parameters == pytest.approx(q.memory.parameters)
    # Eager PyTorch keeps a part as a view of the whole result.
    assert q.memory.activations <= p.memory.activations <= 1.03 * q.memory.activations
    assert sent(phi.block) == sent(llama.block)


@pytest.mark.torch
def test_interleaved_gate_and_up_of_experts_are_split_too() -> None:
    """GPT-OSS: every other column of one weight per expert, and a bias picked for each row."""
    words = "batch=8&sequence=64&vocab_size=256&hidden_size=64&intermediate_size=64&num_hidden_layers=3"
    words += "&num_attention_heads=8&num_key_value_heads=4&num_local_experts=4&head_dim=8"
    trace_ = registry.trace(f"hf:GptOssForCausalLM?{words}")
    (p, _), (q, _) = (priced(trace_, text) for text in ("dp=8", "dp=2,tp=4"))
    assert q.memory.parameters < 0.26 * p.memory.parameters
