"""Attention by a kernel is one op: it is read, priced and emitted without an array of scores."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

import pase
from bench.cases.plans import TOLERANCE, measured
from pase import costmodels, machine, zoo
from pase.frontends.jax.frontend import trace
from pase.ir import Graph, Node, simplify
from pase.machine import mesh_from
from pase.memory.residuals import kept
from pase.search import brute_force, solve
from pase.tables.build import build, work_price
from pase.tables.itemize import collectives
from pase.tables.work import node_work

B, S, KV, G, D = 4, 256, 2, 3, 64
FORWARD = 4 * B * KV * G * S * S * D


def arrays(order: tuple[int, ...] = (0, 1, 2, 3)) -> list[jax.ShapeDtypeStruct]:
    shapes = [(B, S, KV * G, D), (B, S, KV, D), (B, S, KV, D)]
    return [jax.ShapeDtypeStruct(tuple(s[i] for i in order), jnp.bfloat16) for s in shapes]


def graph_of(attend: Any, q: Any, k: Any, v: Any) -> Graph:
    def loss(params: Any) -> jax.Array:
        return jnp.sum(attend(*params).astype(jnp.float32) ** 2)

    return simplify(trace(loss, (q, k, v)).graph)


def attention_of(graph: Graph) -> Node | None:
    return next((n for n in graph.nodes if n.kind == "attention"), None)


def work_of(graph: Graph, **split: int) -> dict[str, float]:
    """The FLOPs per device of the products, by phase, with one mesh axis on each dim of ``split``."""
    node = attention_of(graph)
    assert node is not None
    mesh = mesh_from(
        ",".join(f"{d}={n}" for d, n in split.items()) or "x=1", int(np.prod([1, *split.values()]))
    )
    index = {d.name: i for i, d in enumerate(node.space)}
    cfg = np.array([[index[d] for d in split] or [-1]], np.int8)
    out = {"forward": 0.0, "backward": 0.0}
    for w in node_work(graph, node, cfg, mesh):
        if w.kind == "attention":
            out[w.phase] += float(w.flops[0]) * w.times
    return out


kernel = partial(jax.nn.dot_product_attention, implementation="cudnn")


@pytest.mark.parametrize("causal", [False, True])
def test_cudnns_attention_is_one_op_on_any_machine(causal: bool) -> None:
    """JAX itself can trace it only on a GPU."""
    graph = graph_of(partial(kernel, is_causal=causal), *arrays())
    assert not any(n.kind == "matmul" for n in graph.nodes)
    work = work_of(graph)
    forward = FORWARD / (2 if causal else 1)
    assert work == {"forward": forward, "backward": 2.5 * forward}
    node = attention_of(graph)
    assert node is not None and "test_attention.py" in node.source.place


@pytest.mark.parametrize("implementation", ["xla", None])
def test_xlas_own_attention_stores_its_scores(implementation: Any) -> None:
    """JAX's default is XLA's own attention, which is no kernel on any device."""
    graph = graph_of(partial(jax.nn.dot_product_attention, implementation=implementation), *arrays())
    assert attention_of(graph) is None
    assert sum(n.kind == "matmul" for n in graph.nodes) == 2
    assert [t for t in kept(graph) if graph.tensors[t].shape.count(S) > 1]


def test_jax_is_left_as_it_was() -> None:
    graph_of(kernel, *arrays())
    with pytest.raises((RuntimeError, ValueError), match=r"cuDNN|cudnn"):
        jax.jit(kernel).lower(*arrays())


def test_pallas_kernel_has_heads_before_positions() -> None:
    q = arrays((0, 2, 1, 3))[0]
    full = graph_of(partial(flash_attention, causal=False), q, q, q)
    half = graph_of(partial(flash_attention, causal=True), q, q, q)
    assert work_of(full)["forward"] == 2 * work_of(half)["forward"] == FORWARD


@pytest.mark.parametrize("fused", [True, False])
def test_flax_runs_the_attention_that_it_is_given(fused: bool) -> None:
    given = {"attention_fn": lambda q, k, v, **_: kernel(q, k, v)} if fused else {}
    layer = nnx.eval_shape(lambda: nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0), **given))
    definition, params, rest = nnx.split(layer, nnx.Param, ...)

    def loss(params: Any, x: Any) -> jax.Array:
        return jnp.sum(nnx.merge(definition, params, rest, copy=True)(x) ** 2)

    x = jax.ShapeDtypeStruct((2, 16, 32), jnp.bfloat16)
    assert (attention_of(simplify(trace(loss, params, x).graph)) is not None) == fused


def test_what_is_written_out_is_priced_as_written() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        weights = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k))
        return jnp.einsum("bhqs,bshk->bqhk", weights, v)

    q, _, _ = arrays()
    graph = graph_of(attend, q, q, q)
    assert attention_of(graph) is None
    assert sum(n.kind == "matmul" for n in graph.nodes) == 2


def test_lengths_and_windows_are_written_out() -> None:
    lengths = jnp.full((B,), 7, jnp.int32)
    for settings in ({"key_value_seq_lengths": lengths}, {"local_window_size": (8, 0), "is_causal": True}):
        assert attention_of(graph_of(partial(kernel, **settings), *arrays())) is None


def dims(node: Node) -> dict[str, str]:
    """The dims, read from the maps: positions of queries, of keys and of both, kv heads, groups, batch."""
    q, k = node.main.reads[0].map.walks, node.main.reads[1].map.walks
    (heads,) = k[2].dims
    (group,) = set(q[2].dims) - {heads}
    (ring, queries), (_, keys) = q[1].dims, k[1].dims
    return {"b": q[0].dims[0], "q": queries, "s": keys, "r": ring, "h": heads, "g": group}


def test_parts_of_a_causal_attention_are_unequal() -> None:
    """Of n contiguous parts of the queries, the last is the slowest. The oracle counts the mask by brute force."""
    graph = graph_of(partial(kernel, is_causal=True), *arrays())
    node = attention_of(graph)
    assert node is not None
    for n in (2, 4, 8):
        seen = np.tril(np.ones((S, S))).reshape(n, S // n, S).sum(axis=(1, 2)).max()
        ratio = work_of(graph, **{dims(node)["q"]: n})["forward"] / (4 * B * KV * G * D * seen)
        assert 1 - 2 / S < ratio <= 1, "half a diagonal apart"


def test_keys_and_widths_are_not_split() -> None:
    node = attention_of(graph_of(kernel, *arrays()))
    assert node is not None
    assert {d.name for d in node.space if d.kind == "parallel"} == {dims(node)[x] for x in "bqhg"}
    assert [d.kind for d in node.space if d.name == dims(node)["r"]] == ["ring"]


def test_split_queries_gather_keys_and_scatter_their_gradients() -> None:
    """Llama 3's context parallelism: storage is split by position, keys and values are all-gathered, and their
    gradients are reduce-scattered over the queries' devices."""
    graph = graph_of(kernel, *arrays())
    node = attention_of(graph)
    assert node is not None
    mesh = mesh_from("context=4", 4)
    model = costmodels.get("analytic", machine.load("h100x8"))
    configs = {}
    for n in graph.nodes:
        index = {d.name: i for i, d in enumerate(n.space)}
        position = n.ops[0].writes[0].map.walks[1].dims if n.kind in ("parameter", "copy") else ()
        at = index[dims(node)["q"]] if n is node else index[position[-1]] if position else -1
        configs[n.name] = np.array([at], np.int8)
    moved = {(c.kind, c.nbytes) for c in collectives(graph, mesh, configs, model) if c.source != node.name}
    keys = 2 * B * S * KV * D
    assert ("all_gather", keys) in moved and ("reduce_scatter", keys) in moved


def test_a_ring_shares_a_causal_attention_evenly() -> None:
    """The oracle counts the mask by brute force, in the chunks that each device gets."""
    graph = graph_of(partial(kernel, is_causal=True), *arrays())
    node = attention_of(graph)
    assert node is not None
    for n in (2, 4, 8):
        chunks = np.tril(np.ones((S, S))).reshape(2 * n, S // (2 * n), S).sum(axis=(1, 2))
        seen = chunks + chunks[::-1]
        assert len(set(seen)) == 1
        ratio = work_of(graph, **{dims(node)["r"]: n})["forward"] / (4 * B * KV * G * D * seen[0])
        assert 1 - 2 / S < ratio <= 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bandwidth", [1e9, 450e9, 1e15])
def test_each_turn_of_a_ring_takes_the_longer_of_compute_and_transfer(bandwidth: float, causal: bool) -> None:
    """In each round except the last, keys and values (in backward also their gradients) are sent while the devices
    compute."""
    graph = graph_of(partial(kernel, is_causal=causal), *arrays())
    node = attention_of(graph)
    assert node is not None
    h100 = machine.load("h100x8")
    level = replace(h100.levels[0], bandwidth_bytes_per_s=bandwidth)
    model = costmodels.get("analytic", replace(h100, levels=(level, *h100.levels[1:])))
    mesh = mesh_from("ring=8", 8)
    tables, space = build(graph, mesh, model)
    v = graph.nodes.index(node)
    at = [d.name for d in node.space].index(dims(node)["r"])
    priced = tables.node_costs[v][np.flatnonzero((space.configs[v] == at).all(axis=1))[0]]
    config = np.array([[at]], np.int8)

    def sent(nbytes: float) -> float:
        return float(model.collective("permute", mesh, np.array([1]), np.array([float(nbytes)]))[0])

    part, keys = 2 * B * S * KV * G * D / 8, 2 * 2 * B * S * KV * D / 8
    total = 0.0
    for w in node_work(graph, node, config, mesh):
        backward = w.phase == "backward"
        each = float(np.ravel(work_price(w, model))[0]) / 8
        total += sum(
            max(each, sent(3 * keys if backward else keys) if turn < 7 else 0.0) for turn in range(8)
        )
        total += sent(2 * keys) if backward else 0.0
        dealt = (3 if backward else 2) * part + keys
        total += 2 * sent(dealt / 2) if causal else 0.0
    assert priced == pytest.approx(total, rel=1e-9)


def test_the_search_finds_a_ring_by_itself() -> None:
    """One long sequence with one head, against brute force over all strategies."""
    q = jax.ShapeDtypeStruct((1, 1 << 17, 1, 128), jnp.bfloat16)
    graph = graph_of(partial(kernel, is_causal=True), q, q, q)
    tables, space = build(graph, mesh_from("8", 8), costmodels.get("analytic", machine.load("h100x8")))
    found = solve(tables)
    assert found.cost == pytest.approx(brute_force(tables).cost, rel=1e-12)
    (v,) = (i for i, n in enumerate(graph.nodes) if n.kind == "attention")
    (axis,) = space.configs[v][found.choice[v]]
    assert graph.nodes[v].space.dims[axis].kind == "ring"


def test_no_ring_where_a_mask_is_given() -> None:
    mask = jnp.ones((1, 1, S, S), bool)
    node = attention_of(graph_of(partial(kernel, mask=mask), *arrays()))
    assert node is not None and "ring" not in {d.kind for d in node.space}


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("model", "strategy"),
    [("llama3_8b", "random2@2x2x2"), ("gpt2", "random3@2x4"), ("gpt2", "ours@2x2x2")],
)
def test_step_equals_unsharded(model: str, strategy: str) -> None:
    off, rows = measured(f"{model}?attention=fused", strategy)
    assert sum(r.compiled for r in rows) > 1000
    assert {k: v for k, v in off.items() if v > TOLERANCE[k]} == {}


@pytest.mark.parametrize("model", ["gpt2", "llama3_8b"])
def test_operands_result_and_sums_are_kept_and_no_scores(model: str) -> None:
    positions = 48  # no other dim has as many elements
    m = zoo.reduced(model, attention="fused", remat=0, seq=positions)
    graph = simplify(trace(m.loss_fn, m.params, m.batch).graph)
    node = attention_of(graph)
    assert node is not None
    assert not [t for t in kept(graph) if graph.tensors[t].shape.count(positions) > 1]
    assert {a.tensor for a in node.main.writes} <= set(kept(graph))
    for a in node.main.reads:  # each operand as it is, or as the node recomputes it
        made = [op for op in node.ops if a.tensor in {w.tensor for w in op.writes}]
        assert a.tensor in kept(graph) or made


@pytest.mark.parametrize(
    "op", ["Attention", "com.microsoft:MultiHeadAttention", "com.microsoft:GroupQueryAttention"]
)
def test_a_block_of_onnx_costs_what_it_costs_from_jax(op: str) -> None:
    """Projections, causal attention and its output have the same work and the same cost of the best strategy."""
    h, h_kv = KV * G, KV if op != "com.microsoft:MultiHeadAttention" else KV * G
    d = h * D
    shapes = {"q": (d, h * D), "k": (d, h_kv * D), "v": (d, h_kv * D), "o": (h * D, d)}

    def loss(params: Any, x: Any) -> jax.Array:
        q, k, v = ((x @ params[n]).reshape(B, S, -1, D) for n in "qkv")
        y = kernel(q, k, v, is_causal=True)
        return jnp.mean(y.reshape(B, S, h * D) @ params["o"])

    f32 = jnp.float32
    params = {n: jax.ShapeDtypeStruct(s, f32) for n, s in shapes.items()}
    from_jax = pase.compile(loss, params, jax.ShapeDtypeStruct((B, S, d), f32), **OPTIONS)
    from_onnx = pase.compile(onnx_block(op, shapes, h, h_kv), **OPTIONS)
    (ours,), (theirs,) = ([n for n in p.nodes if n.op == "attention"] for p in (from_jax, from_onnx))
    assert ours.cost == theirs.cost and ours.split == theirs.split
    assert from_onnx.cost == pytest.approx(from_jax.cost, rel=1e-3)


OPTIONS: dict[str, Any] = {"devices": 8, "mesh": "2x4", "baselines": False}


def onnx_block(op: str, shapes: dict[str, tuple[int, int]], heads: int, kv_heads: int) -> Any:
    """x q, x k, x v -> op -> o -> mean, as an onnx.ModelProto without weights' data."""
    import onnx
    from onnx import TensorProto, helper

    domain, _, name = op.rpartition(":")
    weights = [
        helper.make_tensor(n, TensorProto.FLOAT, s, np.zeros(s, np.float32).tobytes(), raw=True)
        for n, s in shapes.items()
    ]
    settings: dict[str, dict[str, int]] = {
        "Attention": {"q_num_heads": heads, "kv_num_heads": kv_heads, "is_causal": 1},
        "MultiHeadAttention": {"num_heads": heads, "unidirectional": 1},
        "GroupQueryAttention": {"num_heads": heads, "kv_num_heads": kv_heads},
    }
    nodes = [helper.make_node("MatMul", ["x", n], [f"x{n}"]) for n in "qkv"]
    nodes.append(helper.make_node(name, ["xq", "xk", "xv"], ["y"], domain=domain, **settings[name]))
    nodes.append(helper.make_node("MatMul", ["y", "o"], ["z"]))
    nodes.append(helper.make_node("ReduceMean", ["z"], ["loss"], keepdims=0))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (B, S, shapes["q"][0]))
    out = helper.make_tensor_value_info("loss", TensorProto.FLOAT, ())
    graph = helper.make_graph(nodes, "block", [x], [out], weights)
    versions = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=versions)
