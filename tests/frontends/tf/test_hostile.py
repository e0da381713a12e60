"""Hostile and broken graphs: each gives a PaseError, without a traceback or a hang."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.frontends.registry import UnknownOp
from pase.frontends.tf import frontend as from_tf
from pase.frontends.tf.frontend import trace
from pase.frontends.tf.rules import RULES
from pase.ir import simplify, verify
from tests.frontends.tf.graphs import frozen, graph

PRODUCT = ("y", "MatMul", ["x", "w"], {"T": tf.float32})
OPS = sorted({*RULES, "While", "PartitionedCall", "Merge", "Switch", "Enter", "Nonsense"})


def refused(graph_def: Any, *words: str, **options: Any) -> None:
    with pytest.raises(PaseError) as e:
        trace(graph_def, **options)
    for word in words:
        assert word in str(e.value), str(e.value)


def test_the_graph_itself_is_read() -> None:
    t = trace(graph(PRODUCT))
    assert (t.param_paths, t.input_paths, t.frontend) == (("w",), ("x",), "tensorflow")


def test_cycles() -> None:
    refused(
        graph(("y", "Add", ["x", "z"], {}), ("z", "MatMul", ["y", "w"], {}), ("o", "Exp", ["z"], {})), "cycle"
    )


def test_missing_and_doubled_nodes() -> None:
    refused(graph(("y", "MatMul", ["x", "gone"], {})), "'gone'", "does not exist")
    refused(graph(PRODUCT, PRODUCT), "two nodes", "'y'")
    refused(graph(("y", "MatMul", ["x:3", "w"], {})), "'x:3'", "no such output")
    refused(graph(("y", "MatMul", ["x"], {})), "1 operands")
    refused(tf.compat.v1.GraphDef(), "no result")


def test_shapes() -> None:
    refused(graph(PRODUCT, shape=(4, 5)), "'MatMul' at y", "(4, 5)", "cannot be multiplied")
    refused(graph(PRODUCT, shape=(0, 4)), "'x'", "0 elements")
    unknown = graph(PRODUCT)
    unknown.node[0].attr["shape"].shape.dim[0].size = -1
    refused(unknown, "--dim batch=64", "'x'")
    assert trace(unknown, dims={"batch": 6}).graph.inputs[0].shape == (6, 4)
    assert trace(unknown, dims={"x.0": 6}).graph.inputs[0].shape == (6, 4)
    refused(unknown, "no dim 'rows'", "batch, x.0", dims={"rows": 3, "batch": 2})
    refused(unknown, "positive whole number", dims={"batch": 0})


def test_huge_dims_cost_no_memory() -> None:
    huge = 2**40
    t = trace(graph(PRODUCT, shape=(huge, 4)))
    assert t.graph.inputs[0].shape == (huge, 4)
    dims = tf.make_tensor_proto([huge, huge], "int64")
    const: Any = ("d", "Const", [], {"value": tf.compat.v1.AttrValue(tensor=dims)})
    zero: Any = ("z", "Const", [], {"value": tf.compat.v1.AttrValue(tensor=tf.make_tensor_proto(0.0))})
    t = trace(
        graph(
            const,
            zero,
            ("f", "Fill", ["d", "z"], {}),
            ("s", "Max", ["f", "a"], {}),
            ("a", "Range", ["i0", "i2", "i1"], {}),
            *(
                (f"i{k}", "Const", [], {"value": tf.compat.v1.AttrValue(tensor=tf.make_tensor_proto(k))})
                for k in range(3)
            ),
            PRODUCT,
            ("o", "Add", ["y", "s"], {}),
        )
    )
    assert t.graph.outputs


def test_unknown_ops() -> None:
    g = graph(("y", "MyCustomOp", ["x", "w"], {}))
    with pytest.raises(UnknownOp) as e:
        trace(g)
    assert "'MyCustomOp' at y" in e.value.where and "unknown='replicate'" in e.value.fix
    refused(g, "'MyCustomOp' at y", "static shape", unknown="replicate")
    g.node[2].attr["_output_shapes"].list.shape.add().CopyFrom(tf.TensorShape((4, 4)).as_proto())
    traced = trace(g, unknown="replicate")
    assert [(r.kind, "MyCustomOp" in r.what) for r in traced.graph.remarks] == [("unknown", True)]
    (node,) = [n for n in simplify(traced.graph).nodes if n.main.name == "MyCustomOp"]
    assert {d.kind for d in node.space} == {"replicated"}


def _library(calls: dict[str, list[str]]) -> Any:
    """A graph that calls f0. Each function passes its argument through the functions listed for it."""
    g = graph(
        ("y", "PartitionedCall", ["x"], {"f": tf.compat.v1.AttrValue(func={"name": "f0"})}),
        ("o", "MatMul", ["y", "w"], {}),
    )
    for name, inner in calls.items():
        f = g.library.function.add()
        f.signature.name = name
        f.signature.input_arg.add(name="a", type=1)
        f.signature.output_arg.add(name="r", type=1)
        last = "a"
        for k, callee in enumerate(inner):
            n = f.node_def.add(name=f"c{k}", op="PartitionedCall", input=[last])
            n.attr["f"].func.name = callee
            n.attr["Tout"].list.type.append(1)
            last = f"c{k}:output:0"
        f.ret["r"] = last
    return g


def test_functions_that_explode() -> None:
    refused(_library({"f0": ["f0"]}), "'f0'", "calls itself")
    refused(_library({"f0": ["f1"], "f1": ["f0"]}), "calls itself")
    refused(_library({"f0": ["gone"]}), "'gone'")
    bomb = {f"f{k}": [f"f{k + 1}"] * 2 for k in range(40)} | {"f40": []}
    refused(_library(bomb), "nodes, but pase reads at most")
    deep = {f"f{k}": [f"f{k + 1}"] for k in range(400)} | {"f400": []}
    refused(_library(deep), "100 levels deep")
    fine = {f"f{k}": [f"f{k + 1}"] * 2 for k in range(6)} | {"f6": []}
    assert trace(_library(fine)).param_paths == ("w",)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "model.pb"
    data = graph(PRODUCT).SerializeToString()
    path.write_bytes(data)
    assert trace(str(path)).param_paths == ("w",)
    for cut in (1, len(data) // 3, len(data) - 1):
        path.write_bytes(data[:cut])
        refused(str(path))
    path.write_bytes(b"")
    refused(str(path), "no graph")
    path.write_bytes(b"\x00" * 1000)
    refused(str(path), "model.pb")
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "saved_model.pb").write_bytes(data[: len(data) // 2])
    assert from_tf.reads(folder)
    refused(folder, "saved_model.pb")
    refused(tmp_path / "none.pb", "cannot read")


def _mutated(g: Any, rng: random.Random) -> None:
    """Change the graph as a broken exporter or an attacker might."""
    bodies = [g.node, *(f.node_def for f in g.library.function)]
    nodes = rng.choice([b for b in bodies if len(b)])
    n = rng.choice(nodes)
    match rng.randrange(9):
        case 0:
            n.op = rng.choice(OPS)
        case 1 if n.input:
            n.input[rng.randrange(len(n.input))] = rng.choice(nodes).name + rng.choice(
                ["", ":0", ":1", ":out:0"]
            )
        case 2 if n.input:
            del n.input[rng.randrange(len(n.input))]
        case 3 if n.attr:
            del n.attr[rng.choice(sorted(n.attr))]
        case 4:
            consts = [m for m in nodes if m.op == "Const" and m.attr["value"].tensor.dtype == 3]
            if consts:
                tensor = rng.choice(consts).attr["value"].tensor
                sizes = [d.size for d in tensor.tensor_shape.dim]
                if all(0 <= s < 100 for s in sizes):
                    values = [rng.choice([-1, 0, 1, 2, 7, 2**30]) for _ in range(max(sizes, default=1))]
                    tensor.CopyFrom(tf.make_tensor_proto(values, "int32"))
        case 5:
            for key in sorted(n.attr):
                value = n.attr[key]
                if value.HasField("shape") or key == "value":
                    shape = value.shape if value.HasField("shape") else value.tensor.tensor_shape
                    if shape.dim:
                        rng.choice(shape.dim).size = rng.choice([0, -1, 1, 3, 2**40, 2**62])
        case 6:
            for key in sorted(n.attr):
                value = n.attr[key]
                if value.list.i:
                    value.list.i[rng.randrange(len(value.list.i))] = rng.choice([-3, 0, 1, 5, 2**40])
                elif value.HasField("i"):
                    value.i = rng.choice([-3, 0, 1, 5, 2**40])
                elif value.HasField("s") and key != "shared_name":
                    value.s = rng.choice([b"SAME", b"VALID", b"NCHW", b"", b"\xff", b"ab,bc->ac", b"ii->i"])
        case 7:
            calls = [v for v in n.attr.values() if v.HasField("func")]
            if calls and g.library.function:
                rng.choice(calls).func.name = rng.choice(g.library.function).signature.name
        case 8:
            n.attr[rng.choice(["T", "dtype", "DstT", "axis"])].type = rng.choice(
                [0, 1, 3, 7, 10, 20, 21, 99, 101]
            )


@settings(max_examples=60)
@given(st.sampled_from(["lstm", "lstm v1", "transformer", "convnet"]), st.randoms(use_true_random=False))
def test_mutated_graphs(name: str, rng: random.Random) -> None:
    """A mutated graph is either read as a sound graph, or refused with a message."""
    g = tf.compat.v1.GraphDef()
    g.CopyFrom(frozen(name))
    for _ in range(rng.randrange(1, 4)):
        _mutated(g, rng)
    try:
        traced = trace(g, dims={"batch": 4}, unknown=rng.choice(["error", "replicate"]))
    except PaseError as e:
        assert str(e)
    else:
        verify(simplify(traced.graph))


@settings(max_examples=30)
@given(st.sampled_from(["lstm v1", "convnet"]), st.data())
def test_mutated_bytes(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject) -> None:
    raw = bytearray(frozen(name).SerializeToString())
    for _ in range(data.draw(st.integers(1, 5))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(raw), len(raw) - 7, len(raw) // 2]))
    path = tmp_path_factory.mktemp("pb") / "model.pb"
    path.write_bytes(bytes(raw[:cut]))
    try:
        traced = trace(path, dims={"batch": 4})
    except PaseError as e:
        assert str(e)
    else:
        verify(simplify(traced.graph))
