"""Each baseline sends the collectives that its authors describe."""

from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from pase import costmodels, machine
from pase.baselines import Intent, Skipped, baselines, roles
from pase.baselines.masks import PERSISTENT_ELEMENTS
from pase.baselines.rules import RULES
from pase.frontends.jax.frontend import trace
from pase.ir import named, simplify
from tests.baselines.helpers import collectives, graph_of

S = jax.ShapeDtypeStruct
H100 = machine.load("h100x8")
MODEL = costmodels.get("analytic", H100)
LAYERS, BATCH, SEQ, WIDTH, VOCAB = 3, 128, 1024, 768, 50304
GPT = f"gpt2?layers={LAYERS}&vocab={VOCAB}&remat=0"
GPT_REMAT = f"gpt2?layers={LAYERS}&vocab={VOCAB}&remat=1"


@cache
def made(model, devices, name):
    """The strategy of this name."""
    (found,) = baselines(graph_of(model), devices, H100, MODEL, only=(name,))
    return found


def offered(model, devices):
    """What each baseline offers before the search fills it in: name -> intent, or the reason if there is none."""
    return {m.name: m for rule in RULES.values() for m in rule(graph_of(model), devices, H100)}


def split(graph, b, node):
    """Axis -> dim that it splits, by name, for one node."""
    dims = graph.node[node].space.dims
    return {b.mesh.names[a]: dims[d].name for a, d in enumerate(b.strategy[node]) if d >= 0}


def weights(graph):
    return {w.parameter for w in roles(graph).weights}


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
    assert any("divisible by 16" in note for note in b.notes)


def test_fsdp_gathers_each_weight_for_use_and_scatters_its_gradient():
    """Rajbhandari et al. 2020, section 7.1: a gather of each parameter in forward, one in backward (here for
    recomputation, when forward runs again), and a reduce-scatter of its gradient."""
    graph = graph_of(GPT_REMAT)
    b = made(GPT_REMAT, 32, "fsdp")
    sent = collectives(graph, b)
    for name in weights(graph) - {"wte"}:
        kinds = Counter()
        dims = [d.size for d in graph.node[name].space if d.kind == "parallel"]
        elements = 1
        for size in dims:
            elements *= size
        if elements < PERSISTENT_ELEMENTS:
            continue
        for c in sent:
            if c.src == name:
                assert c.nbytes == elements * 2, "the cast to bfloat16 is sent"
                kinds[c.kind, c.phase] += c.times / LAYERS
        assert kinds == {("all_gather", "forward"): 2, ("reduce_scatter", "backward"): 1}, name
    assert not [c for c in sent if c.kind == "all_reduce" and c.nbytes > 4 * PERSISTENT_ELEMENTS]


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


def test_data_parallel_all_reduces_each_gradient_once():
    """One all-reduce per use of a parameter, with the gradient's bytes in the dtype of that use."""
    graph = graph_of(GPT)
    b = made(GPT, 32, "data_parallel")
    sent = collectives(graph, b)
    assert {c.kind for c in sent} == {"all_reduce"}
    for e in graph.edges:
        if graph.node[e.src].kind == "parameter":
            mine = [c for c in sent if (c.src, c.dst) == (e.src, e.dst)]
            t = graph.tensors[e.tensor]
            assert [c.nbytes for c in mine] == [t.nbytes], e
            assert mine[0].times == e.op.times and mine[0].phase == "backward"
    gradients = sum(c.nbytes * c.times for c in sent if graph.node[c.src].kind == "parameter")
    # bfloat16 weights, the embedding twice (float32 for the look-up, bfloat16 for logits), float32 norms
    block = 12 * WIDTH**2 + 9 * WIDTH
    norms = (4 * LAYERS + 2) * WIDTH * 4
    assert gradients == LAYERS * block * 2 + (4 + 2) * VOCAB * WIDTH + SEQ * WIDTH * 2 + norms


def test_one_weird_trick():
    graph = graph_of("alexnet")
    b = made("alexnet", 8, "owt")
    for n in graph.nodes:
        if n.kind == "conv":
            assert [n.space[d].size for d in split(graph, b, n.name).values()] == [128]
    full = [n for n in graph.nodes if n.kind == "matmul"]
    assert [[n.space[d].size for d in split(graph, b, n.name).values()] for n in full] == [
        [4096],
        [4096],
        [1000],
    ]
    sent = collectives(graph, b)
    assert not [c for c in sent if c.src in {"fc.0.w", "fc.1.w", "fc.2.w"}]
    convolved = [c for c in sent if c.src in {f"conv.{i}.w" for i in range(5)}]
    assert Counter(c.kind for c in convolved) == {"all_reduce": 5}


def test_one_weird_trick_says_which_layer_it_cannot_split():
    b = made("alexnet", 32, "owt")
    (note,) = b.notes
    assert note.startswith("1000 out-channels")


@pytest.mark.parametrize(
    ("model", "devices", "name", "words"),
    [
        ("gpt2?batch=24", 32, "data_parallel", ("batch of 24", "by 32")),
        ("gpt2?batch=24", 32, "fsdp", ("batch of 24", "by 32")),
        ("gpt2?batch=24", 32, "megatron_16x2", ("batch of 24", "by 16")),
        ("gpt2", 32, "owt", ("0 convolutions",)),
        ("alexnet", 32, "megatron", ("no dim",)),
        ("gpt2", 8, "hsdp", ("h100x8", "fsdp")),
        ("vit_l16", 8, "megatron_sp_4x2", ("[197]", "by 2")),
    ],
)
def test_a_method_that_does_not_apply_says_why(model, devices, name, words):
    found = offered(model, devices)[name]
    assert isinstance(found, Skipped)
    assert all(word in found.reason for word in words), found.reason


def test_small_batches_leave_tensor_parallelism():
    found = offered("gpt2?batch=8", 32)
    assert isinstance(found["data_parallel"], Skipped)
    assert isinstance(found["megatron_8x4"], Intent)


def two_streams(joined):
    """An encoder of width 64, and a decoder of width 96 that reads the encoder's output. joined: whether a weight maps
    one width directly to the other, as if the two were consecutive layers."""
    wide, heads = (64, 96), 128

    def loss(p, x, y):
        for up, down in p["encoder"]:
            x = x + jnp.tanh(x @ up) @ down
        for up, down in p["decoder"]:
            y = y + jnp.tanh(y @ up) @ down
        met = x @ p["join"] if joined else jnp.tanh((x @ p["key"]) * (y @ p["query"])) @ p["out"]
        return (y + met).sum()

    def layers(width):
        return [(S((width, 4 * width), "float32"), S((4 * width, width), "float32"))] * 3

    across = {"key": S((wide[0], heads), "float32"), "query": S((wide[1], heads), "float32")}
    across |= {"out": S((heads, wide[1]), "float32")}
    p = {"encoder": layers(wide[0]), "decoder": layers(wide[1])}
    p |= {"join": S(wide, "float32")} if joined else across
    batch = [S((32, 16, w), "float32") for w in wide]
    return named(simplify(trace(loss, p, *batch).graph))


def test_an_encoder_and_a_decoder_have_a_stream_each():
    graph = two_streams(joined=False)
    r = roles(graph)
    assert len(r.model) == 2 and r.sizes(graph, r.model) == [64, 96]
    assert r.sizes(graph, r.tensor) == [128, 256, 384] and not r.ends
    (b,) = baselines(graph, 8, H100, MODEL, only=("megatron_2x4",))
    for name in weights(graph):
        (dim,) = split(graph, b, name).values()
        assert r.classes[name, dim] in r.tensor
    # The result of each of the 3 + 3 + 1 pairs of weights is reduced once in the forward pass.
    assert Counter(c.phase for c in collectives(graph, b) if "model" in c.axes)["forward"] == 7
    assert not roles(two_streams(joined=True)).model
