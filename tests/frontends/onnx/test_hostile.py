"""Files that are damaged, malformed or malicious: each gives one PaseError, in bounded time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

onnx = pytest.importorskip("onnx")

import numpy as np  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402

from pase.errors import PaseError  # noqa: E402
from pase.frontends.onnx import frontend as from_onnx  # noqa: E402
from pase.frontends.registry import UnknownOp  # noqa: E402
from pase.ir import verify  # noqa: E402
from tests.frontends.onnx.cases import node, small, stored_models  # noqa: E402


def refuses(model: Any, *words: str, where: str = "", **options: Any) -> PaseError:
    """The error for a model. words: in its message. where: in the place that it names."""
    with pytest.raises(PaseError) as e:
        from_onnx.trace(model, **options)
    assert where in e.value.where and all(w in str(e.value) for w in words), str(e.value)
    return e.value


def test_the_small_model_is_sound() -> None:
    found = from_onnx.trace(small())
    assert (found.param_paths, found.input_paths, found.frontend) == (("w",), ("x",), "onnx")


def test_no_such_file(tmp_path: Path) -> None:
    refuses(str(tmp_path / "none.onnx"), "cannot read", "No such file", where="none.onnx")
    empty = tmp_path / "empty.onnx"
    empty.touch()
    refuses(empty, "0 bytes", where="empty.onnx")


def test_not_a_model(tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(b"PK\x03\x04 this is no protocol buffer" * 9)
    refuses(path, "not an ONNX model", where="x.onnx")
    path.write_bytes(onnx.ModelProto(ir_version=9).SerializeToString())
    refuses(path, "no graph", where="x.onnx")


def test_cycle() -> None:
    a, b = node("Relu", ["z"], ["y2"], name="a"), node("Relu", ["y2"], ["z"], name="b")
    refuses(small(a, b), "cycle", "Relu 'a'")


def test_unsorted_is_sorted() -> None:
    model = small(node("Relu", ["y"], ["z"]))
    swapped = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(swapped)
    assert [n.ops[0].name for n in from_onnx.trace(model).graph.nodes][-2:] == ["max", "output"]


@pytest.mark.parametrize(
    ("bad", "where", "words"),
    [
        (node("MatMul", ["y", "w"], ["z"]), "MatMul '1'", ["[4, 16]", "[8, 16]", "16 columns"]),
        (node("Add", ["y", "x"], ["z"]), "Add '1'", ["[4, 16]", "[4, 8]"]),
        (node("Concat", ["y", "x"], ["z"], axis=0), "Concat '1'", ["[4, 16]", "[4, 8]", "dim 0"]),
        (node("Transpose", ["y"], ["z"], perm=[0, 0]), "Transpose '1'", ["[0, 0]"]),
        (node("Softmax", ["y"], ["z"], axis=7), "Softmax '1'", ["7", "2 dims"]),
        (node("Relu", ["nowhere"], ["z"]), "Relu '1'", ["'nowhere'"]),
        (node("Relu", [], ["z"]), "Relu '1'", ["0 inputs", "opset 21"]),
        (node("Transpose", ["y"], ["z"], perm="ab"), "Transpose '1'", ["'perm'", "wrong type"]),
        (node("Concat", ["y"], ["z"]), "Concat '1'", ["'axis'", "missing"]),
        (node("Frobnicate", ["y"], ["z"]), "Frobnicate '1'", ["'Frobnicate'"]),
        (node("Relu", ["y"], ["z"], domain="evil"), "Relu '1'", ["'evil:Relu'"]),
        (node("Relu", ["y"], ["y"]), "", ["two nodes make 'y'", "Relu"]),
        (node("Einsum", ["y"], ["z"], equation="i->"), "Einsum '1'", ["'i->'"]),
        (node("Split", ["y"], ["z", "t"], axis=0, num_outputs=9), "Split '1'", ["9 parts", "2 outputs"]),
        (node("LSTM", ["y", "w", "w"], ["z"], hidden_size=4), "LSTM '1'", ["three dims"]),
    ],
)
def test_unsound_nodes(bad: Any, where: str, words: list[str]) -> None:
    refuses(small(bad), *words, where=where)


def test_unknown_ops_may_be_replicated() -> None:
    """An unknown op with a declared shape is replicated, at the price of its memory traffic. Others are refused."""
    info = helper.make_tensor_value_info("z", TensorProto.FLOAT, [4, 3])
    model = small(node("Frobnicate", ["y"], ["z"]), node("Relu", ["z"], ["t"]), value_info=[info])
    with pytest.raises(UnknownOp, match="pass unknown='replicate'"):
        from_onnx.trace(model)
    found = verify(from_onnx.trace(model, unknown="replicate").graph)
    (op,) = (n.ops[0] for n in found.nodes if n.kind == "opaque")
    assert {d.kind for n in found.nodes if n.kind == "opaque" for d in n.space} == {
        "replicated"
    } and op.differentiable
    e = refuses(small(node("Frobnicate", ["y"], ["z"])), "output 'z'", unknown="replicate")
    assert "value_info" in e.fix


def test_huge_and_negative_sizes() -> None:
    refuses(small(inputs={"x": (2**62, 8)}), "too large", where="input 'x'")
    shape = {"s": np.array([2**40, 2**40])}
    refuses(small(node("Expand", ["y", "s"], ["z"]), weights=shape), f"{2**40}", where="Expand")
    negative = {"s": np.array([-3, 2])}
    refuses(small(node("Reshape", ["y", "s"], ["z"]), weights=negative), "[-3, 2]", where="Reshape")
    pads = {"s": np.array([0, 0, 2**62, 2**62])}
    refuses(small(node("Pad", ["y", "s"], ["z"]), weights=pads), f"{2**62 + 4}", where="Pad")
    model = small()
    model.graph.initializer[0].dims[0] = -8
    refuses(model, "[-8, 16]", where="initializer 'w'")


def test_symbols_that_are_no_code() -> None:
    """A size is parsed and never evaluated. Text that is no expression is a name."""
    for text in ("9**9**9", "__import__('os').system('true')", "(" * 300, "a" * 5000, "batch size"):
        model = small()
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = text
        refuses(model, "symbolic sizes", "--dim")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch size"
    assert from_onnx.trace(model, dims={"batch size": 4}).graph.inputs[0].shape == (4, 8)
    model.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    assert from_onnx.trace(model, dims={"x.0": 4}).graph.inputs[0].shape == (4, 8)


@pytest.mark.parametrize(
    "where", ["../w.bin", "/etc/passwd", "a/../../w", "C:\\\\w.bin", "\\\\\\\\host\\\\w", ""]
)
def test_external_data_outside_is_refused(where: str) -> None:
    model = small()
    t = model.graph.initializer[0]
    t.ClearField("raw_data")
    t.data_location = TensorProto.EXTERNAL
    t.external_data.add(key="location", value=where)
    refuses(model, f"'{where}'", where="initializer 'w'")
    t.external_data[0].value = "weights/w.bin"  # inside of the folder: it does not exist, and is not read
    assert from_onnx.trace(model).param_paths == ("w",)


def nested(levels: int, calls: int) -> Any:
    """Functions that call one another: calls**levels nodes after inlining."""
    opset = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    functions = []
    for i in range(levels):
        inner = [node(f"F{i + 1}", [f"v{k}"], [f"v{k + 1}"], domain="f") for k in range(calls)]
        if i == levels - 1:
            inner = [node("Relu", [f"v{k}"], [f"v{k + 1}"]) for k in range(calls)]
        functions.append(helper.make_function("f", f"F{i}", ["v0"], [f"v{calls}"], inner, opset))
    call = node("F0", ["y"], ["z"], domain="f")
    return small(call, functions=functions, opsets=[helper.make_opsetid("f", 1)])


def test_functions_are_inlined_within_bounds() -> None:
    found = from_onnx.trace(nested(3, 2)).graph
    assert sum(n.ops[0].name == "max" for n in found.nodes) == 8
    assert [n.ops[0].eqn.path for n in found.nodes if n.ops[0].name == "max"][:3] == [
        "1.0.0.0",
        "1.0.0.1",
        "1.0.1.0",
    ]
    refuses(nested(12, 4), "far more nodes than the file has")
    refuses(nested(40, 1), "more than 24 levels")
    loop = nested(2, 1)
    loop.functions[1].node[0].op_type, loop.functions[1].node[0].domain = "F0", "f"
    assert "calls itself" in refuses(loop, "more than 24 levels").fix


def test_subgraphs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def branch(depth: int) -> Any:
        inner = [node("Relu", ["y"], [f"o{depth}"])]
        if depth:
            g = branch(depth - 1)
            inner = [node("If", ["c"], [f"o{depth}"], then_branch=g, else_branch=g)]
        return helper.make_graph(inner, "b", [], [helper.make_tensor_value_info(f"o{depth}", 1, [4, 16])])

    def model(depth: int) -> Any:
        g = branch(depth)
        both = node("If", ["c"], ["z"], then_branch=g, else_branch=g)
        return small(both, inputs={"c": (TensorProto.BOOL, ())})

    nodes = from_onnx.trace(model(3)).graph.nodes
    assert max(len(op.scope) for n in nodes for op in n.ops) == 4
    monkeypatch.setattr(from_onnx, "_FREE_NODES", 100)
    refuses(model(8), "far more nodes than the file has")


HUGE = [0, -1, 1, 7, 64, 2**31, 2**62, 2**63 - 1, -(2**63)]


def mutate(r: random.Random, data: bytes) -> bytes:
    """A damaged copy of a model's file, with changed bytes or changed fields."""
    if r.random() < 0.4:
        out, i = bytearray(data), r.randrange(len(data))
        match r.randrange(4):
            case 0:
                out[i] = r.randrange(256)
            case 1:
                del out[i:]
            case 2:
                out[i:i] = r.randbytes(r.randint(1, 20))
            case _:
                del out[i : i + r.randint(1, 99)]
        return bytes(out)
    m = onnx.ModelProto.FromString(data)
    g = m.graph
    names = [x for n in g.node for x in (*n.input, *n.output)] + [""]
    for _ in range(r.randint(1, 3)):
        n, t, v = r.choice(g.node), r.choice(g.initializer or [None]), r.choice(g.input or [None])
        a = r.choice(n.attribute or [None])
        match r.randrange(10):
            case 0:
                n.op_type = r.choice(g.node).op_type
            case 1 if a is not None and a.ints:
                a.ints[r.randrange(len(a.ints))] = r.choice(HUGE)
            case 2 if a is not None:
                a.i = r.choice(HUGE)
            case 3 if a is not None:
                a.type = r.randrange(15)
            case 4 if n.input:
                n.input[r.randrange(len(n.input))] = r.choice(names)
            case 5 if t is not None and t.dims:
                t.dims[r.randrange(len(t.dims))] = r.choice(HUGE)
            case 6 if t is not None:
                t.data_type = r.randrange(30)
            case 7 if v is not None and v.type.tensor_type.shape.dim:
                r.choice(v.type.tensor_type.shape.dim).dim_value = r.choice(HUGE)
            case 8 if m.opset_import:
                m.opset_import[0].version = r.choice([-1, 1, 5, 7, 11, 13, 18, 99, 2**40])
            case _:
                n.output[0] = r.choice(names) or "z"
    return m.SerializeToString()


@pytest.mark.parametrize("seed", range(6))
def test_mutated_real_models(seed: int, tmp_path: Path) -> None:
    """A mutated file is either read as a sound graph, or refused with a message. Both occur."""
    r = random.Random(seed)
    files = [p.read_bytes() for p in stored_models() if p.stat().st_size < 50_000]
    path = tmp_path / "m.onnx"
    read = 0
    for _ in range(60):
        path.write_bytes(mutate(r, r.choice(files)))
        try:
            found = from_onnx.trace(path, unknown=r.choice(["error", "replicate"]))
        except PaseError as e:
            assert str(e)
        else:
            verify(found.graph)
            read += 1
    assert 0 < read < 60
