"""Each baseline sends the collectives that its authors describe, or says why it does not apply."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from pase.baselines import Skipped, baselines, roles
from pase.baselines.masks import PERSISTENT_ELEMENTS
from pase.frontends.jax.frontend import trace
from pase.ir import named, simplify
from tests.baselines.helpers import (
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
    assert gradients == LAYERS * block * 2 + 4 * VOCAB * WIDTH + SEQ * WIDTH * 2 + norms


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


def test_fsdp_says_which_dims_the_devices_do_not_divide():
    """6 divides 1026 only, so only the first weight is split."""
    model = "mlp?batch=48&features=1026&classes=1024&layers=3"
    total, whole = (1026 + 2 * 4096 + 1024) * 4096 * 4, (2 * 4096 + 1024) * 4096 * 4
    for name in ("fsdp", "zero2"):
        (note,) = made(model, 6, name).notes
        assert f"6 divides none of the dims (4096, 1024) of {whole / 2**20:.3g} MiB of the" in note
        assert f"{total / 2**20:.3g} MiB" in note
    assert not made(model, 6, "data_parallel").notes
    assert not made(model, 2, "fsdp").notes


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


MIXTRAL = "mixtral_8x7b?layers=2&batch=64&seq=256&vocab=1024&remat=0"


MADE_OF_WEIGHTS = {
    "gelu": lambda w, a: jax.nn.gelu(w),
    "divided by its norm": lambda w, a: w / jnp.linalg.norm(w, axis=1, keepdims=True),
    "standardised": lambda w, a: (w - w.mean(1, keepdims=True)) / jnp.sqrt(w.var(1, keepdims=True) + 1e-5),
    "merged": lambda w, a: w + a @ a.T,
}


@pytest.mark.parametrize("made_of", MADE_OF_WEIGHTS.values(), ids=MADE_OF_WEIGHTS)
def test_fsdp_gathers_what_is_made_of_weights_and_scatters_its_gradient(made_of):
    """As much as for the weights themselves. It was made whole on every device, and its gradient all-reduced."""

    def loss(p, x):
        for w, a in p:
            x = jnp.tanh(x @ made_of(w, a))
        return jnp.mean(x)

    shape = jax.ShapeDtypeStruct
    p = [(shape((2048, 2048), "float32"), shape((2048, 8), "float32")) for _ in range(3)]
    graph = named(simplify(trace(loss, p, shape((4096, 2048), "float32")).graph))
    (b,) = baselines(graph, 8, H100, MODEL, only=("fsdp",))
    sent = Counter((c.kind, c.phase) for c in collectives(graph, b) if c.nbytes == 4 * 2048 * 2048)
    assert sent == {("all_gather", "forward"): 3, ("reduce_scatter", "backward"): 3}
    assert {w.parameter for w in roles(graph).weights} == {"0.0", "1.0", "2.0"}


@pytest.mark.parametrize("stored", [False, True])
def test_fewer_experts_than_devices_are_split_within_groups(stored):
    """GShard (Lepikhin et al. 2020, section 3.2): two all-to-alls a layer and direction, here within groups of 8.
    Gradients of experts are summed over the groups that have the same experts, all others over all devices."""
    graph = graph_of(MIXTRAL)
    b = made(MIXTRAL, 64, "expert_fsdp_8x8" if stored else "expert_8x8")
    sent = collectives(graph, b)
    tokens = Counter()
    for c in sent:
        if c.kind == "all_to_all":
            assert c.axes == ("expert",)
            tokens[c.phase] += c.times
    assert tokens == {"forward": 2 * 2, "backward": 2 * 2}
    experts = {w.parameter for w in roles(graph).weights if w.shared}
    assert experts == {f"blocks.ff.{w}" for w in ("gate", "up", "down")}
    sums = [
        c for c in sent if c.phase == "backward" and c.kind == ("reduce_scatter" if stored else "all_reduce")
    ]
    for c in sums:
        of = c.src.partition(":")[0]
        if of in experts:
            assert c.axes == ("data",), c
        elif of in weights(graph):
            assert c.axes == ("data", "expert"), c
    assert experts <= {c.src.partition(":")[0] for c in sums}


def test_context_parallelism_sends_keys_and_values_around_a_ring():
    """Beside parameters, which are gathered for use over all devices, only keys and values are sent."""
    model = "llama3_8b?layers=2&batch=2&seq=8192&vocab=1024&remat=0"
    graph = graph_of(model)
    b = made(model, 8, "context_2x4")
    between = [c for c in collectives(graph, b) if graph.node[c.src].kind != "parameter" and c.nbytes > 2**20]
    assert {(c.kind, c.axes) for c in between} == {("permute", ("context",))}
    assert {graph.node[c.src].kind for c in between} == {"attention"}
    for name in weights(graph):
        assert set(split(graph, b, name)) == {"data", "context"}, name
    assert "divides among all devices" in offered(GPT, 8)["context"].reason
