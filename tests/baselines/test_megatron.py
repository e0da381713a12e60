"""Tensor parallelism sends the collectives that its authors describe."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from pase.baselines import Intent, Skipped, baselines, roles
from pase.frontends.jax.frontend import trace
from pase.ir import named, simplify
from tests.baselines.helpers import (
    BATCH,
    GPT,
    GPT_REMAT,
    H100,
    LAYERS,
    MODEL,
    SEQ,
    VOCAB,
    WIDTH,
    collectives,
    graph_of,
    made,
    offered,
    split,
    weights,
)


def between_layers(graph, b, axis):
    """(kind, phase) -> how often an activation of the residual stream is sent within a block."""
    data = dict(zip(b.mesh.names, b.mesh.sizes, strict=True)).get("data", 1)
    stream = BATCH // data * SEQ * WIDTH * 2
    counts = Counter()
    for c in collectives(graph, b):
        if axis in c.axes and graph.node[c.src].kind != "parameter" and c.times >= LAYERS:
            assert c.nbytes == stream, c
            counts[c.kind, c.phase] += c.times / LAYERS
    return counts


def test_megatron_all_reduces_twice_forward_and_twice_backward():
    """Shoeybi et al. 2019, figure 4 and section 3: two all-reduces in the forward pass of a layer and two in the
    backward pass, each of batch × sequence × width."""
    graph = graph_of(GPT)
    b = made(GPT, 32, "megatron_8x4")
    assert between_layers(graph, b, "model") == {("all_reduce", "forward"): 2, ("all_reduce", "backward"): 2}


def test_sequence_parallelism_halves_each_all_reduce():
    """Korthikanti et al. 2022, section 4.2.2: each all-reduce becomes an all-gather and a reduce-scatter.

    The paper gathers the input again in the backward pass instead of keeping it; pase keeps it.
    """
    graph = graph_of(GPT)
    b = made(GPT, 32, "megatron_sp_8x4")
    kinds = ("all_gather", "reduce_scatter")
    assert between_layers(graph, b, "model") == {(k, p): 2 for k in kinds for p in ("forward", "backward")}


def test_megatron_with_recomputation_sends_the_forward_again():
    """All-reduces: up to 4 in forward and its recomputation, fewer if no gradient needs one again; 2 in backward."""
    graph = graph_of(GPT_REMAT)
    counts = between_layers(graph, made(GPT_REMAT, 32, "megatron_8x4"), "model")
    assert counts["all_reduce", "backward"] == 2
    assert 3 <= counts["all_reduce", "forward"] <= 4


def test_megatron_splits_columns_then_rows_and_the_vocabulary():
    graph = graph_of(GPT)
    b = made(GPT, 32, "megatron_8x4")
    r = roles(graph)
    for name in ("blocks.attention.wq", "blocks.attention.wo", "blocks.ff.w1", "blocks.ff.w2", "wte"):
        (dim,) = split(graph, b, name).values()
        assert split(graph, b, name) == {"model": dim}
        assert r.classes[name, dim] in r.tensor
    assert [graph.node[n].space[split(graph, b, n)["model"]].size for n in ("blocks.ff.w1", "wte")] == [
        3072,
        VOCAB,
    ]
    # The look-up's partial sums and the logits' gradient are each all-reduced once.
    ends = [c for c in collectives(graph, b) if "model" in c.axes and c.times == 1 and c.nbytes > 2**24]
    assert Counter(c.phase for c in ends) == {"forward": 1, "backward": 1}


def test_key_value_heads_are_repeated_where_they_do_not_divide():
    graph = graph_of("llama3_8b")
    b = made("llama3_8b", 32, "megatron_2x16")
    assert b.mesh.sizes[0] == 2 and sorted(b.mesh.sizes[1:]) == [2, 8]

    def ways(node):
        sizes = dict(zip(b.mesh.names, b.mesh.sizes, strict=True))
        out = 1
        for axis in split(graph, b, node):
            out *= sizes[axis]
        return out

    assert ways("blocks.attention.wq") == ways("blocks.ff.up") == 16
    assert ways("blocks.attention.wk") == ways("blocks.attention.wv") == 8
    assert b.notes[0].startswith("16 does not divide 4, 8,")


def test_tensor_parallelism_with_stored_splits():
    """Weights are split over both axes and gathered over the data axis only; their gradients are reduce-scattered."""
    graph = graph_of(GPT)
    b = made(GPT, 32, "megatron_sp_fsdp_8x4")
    assert between_layers(graph, b, "model") == between_layers(
        graph, made(GPT, 32, "megatron_sp_8x4"), "model"
    )
    for name in ("blocks.attention.wq", "blocks.attention.wo", "blocks.ff.w1", "blocks.ff.w2"):
        assert set(split(graph, b, name)) == {"data", "model"}
        mine = [c for c in collectives(graph, b) if c.src == name]
        assert {(c.kind, c.phase, c.axes) for c in mine} == {
            ("all_gather", "forward", ("data",)),
            ("reduce_scatter", "backward", ("data",)),
        }


def test_small_batches_leave_tensor_parallelism():
    found = offered("gpt2?batch=8", 32)
    assert isinstance(found["data_parallel"], Skipped)
    assert isinstance(found["megatron_8x4"], Intent)


def merged_heads():
    """Three decoder layers whose projections have one dim (heads features), as PyTorch's and Flax's Linear have, with
    fewer heads of keys and values than of queries."""
    heads, few, width, hidden = 8, 4, 64, 128

    def loss(p, x):
        b, s, _ = x.shape
        for layer in p:
            q, k, v = (
                (x @ layer[name]).reshape(b, s, n, width // heads)
                for name, n in (("q", heads), ("k", few), ("v", few))
            )
            y = jax.nn.dot_product_attention(q, k, v).reshape(b, s, width)
            x = x + y @ layer["o"]
            x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        return (x**2).mean()

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, "float32")

    narrow = width * few // heads
    layer = {"q": shape(width, width), "k": shape(width, narrow), "v": shape(width, narrow)}
    layer |= {"o": shape(width, width), "up": shape(width, hidden), "down": shape(hidden, width)}
    return named(simplify(trace(loss, [layer] * 3, shape(16, 32, width)).graph))


def test_projections_to_all_heads_at_once_are_split_too():
    """Heads are a factor of the projections' dim. Without that, every model device would project all heads."""
    graph = merged_heads()
    (b,) = baselines(graph, 8, H100, MODEL, only=("megatron_2x4",))
    for name in weights(graph):
        assert list(split(graph, b, name)) == ["model"], name
    # Two all-reduces a layer in the forward pass, as with separate heads, and nothing else.
    sent = [c for c in collectives(graph, b) if "model" in c.axes and c.phase == "forward"]
    assert [c.kind for c in sent] == ["all_reduce"] * (2 * 3)


@pytest.mark.parametrize("stacked", [False, True])
def test_merged_projections_are_stored_split(stacked):
    """Of merged weights, a device stores a part. It computes what it could not without sending: a block of the columns
    is not a part of each of queries, keys and values. The baseline says so."""

    def loss(p, x):
        b, s, d = x.shape
        for layer in p:
            y = x @ layer["qkv"]
            parts = (
                [y.reshape(b, s, 3, 8, d // 8)[:, :, i] for i in range(3)]
                if stacked
                else [t.reshape(b, s, 8, d // 8) for t in jnp.split(y, 3, -1)]
            )
            x = x + jax.nn.dot_product_attention(*parts).reshape(b, s, d) @ layer["o"]
            gate, up = jnp.split(x @ layer["up"], 2, -1)
            x = x + (jax.nn.silu(gate) * up) @ layer["down"]
        return (x**2).mean()

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, "float32")

    layer = {"qkv": shape(256, 768), "o": shape(256, 256), "up": shape(256, 1024), "down": shape(512, 256)}
    graph = named(simplify(trace(loss, [layer] * 3, shape(16, 256, 256)).graph))
    (b,) = baselines(graph, 8, H100, MODEL, only=("megatron_2x4",))
    for name in weights(graph):
        assert list(split(graph, b, name)) == ["model"], name
    assert any("768, 1024 columns" in note for note in b.notes)


@pytest.mark.torch
def test_query_heads_of_a_group_are_split_beyond_key_value_heads():
    """Where a projection makes all query heads as one dim, too: each device attends with heads of its own."""
    import torch

    from pase.frontends.registry import trace as read

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o, self.up, self.down = (
                torch.nn.Linear(*sizes)
                for sizes in ((64, 64), (64, 16), (64, 16), (64, 64), (64, 96), (96, 64))
            )

        def forward(self, x):
            q, k, v = (m(x).unflatten(-1, (-1, 8)).transpose(1, 2) for m in (self.q, self.k, self.v))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            x = x + self.o(y.transpose(1, 2).flatten(2))
            return (x + self.down(self.up(x).relu())).square().mean()

    graph = named(simplify(read(Block(), torch.ones(8, 16, 64)).graph))
    (b,) = baselines(graph, 8, H100, MODEL, only=("megatron_2x4",))
    (node,) = (n for n in graph.nodes if n.kind == "attention")
    heads = {a: node.space[d].size for a, d in split(graph, b, node.name).items() if a != "data"}
    assert sorted(heads.values()) == [2, 4] and b.mesh.sizes == (2, 2, 2)
    assert {c.kind for c in collectives(graph, b) if c.src == node.name} <= {"all_reduce"}
