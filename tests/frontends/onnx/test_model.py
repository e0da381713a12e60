"""Weights in all places where a file may store them, and control flow: equivalent models give the same graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

import pase  # noqa: E402
from pase.backends.emit.onnx import emit, read  # noqa: E402
from pase.errors import PaseError  # noqa: E402
from pase.frontends.onnx import frontend as from_onnx  # noqa: E402
from pase.ir import Graph, named, simplify, verify  # noqa: E402
from tests.frontends.onnx.cases import light, model_of, stored_models  # noqa: E402

node = helper.make_node


def in_constants(model: Any) -> Any:
    """The model with its initializers in Constant nodes, as Paddle's exporter writes it."""
    out = onnx.ModelProto()
    out.CopyFrom(model)
    _move(out.graph)
    return out


def _move(graph: Any) -> None:
    for n in graph.node:
        for a in n.attribute:
            if a.HasField("g"):
                _move(a.g)
    stored = {t.name: node("Constant", [], [t.name], value=t) for t in graph.initializer}
    for s in graph.sparse_initializer:
        stored[s.values.name] = node("Constant", [], [s.values.name], sparse_value=s)
    nodes = [*stored.values(), *graph.node]
    inputs = [v for v in graph.input if v.name not in stored]
    for part, kept in (("node", nodes), ("input", inputs), ("initializer", []), ("sparse_initializer", [])):
        graph.ClearField(part)
        getattr(graph, part).extend(kept)


def graph_of(model: Any) -> Graph:
    return verify(named(simplify(verify(from_onnx.trace(model).graph))))


def work(model: Any) -> tuple[Any, ...]:
    """The parameters, inputs and loop nests of a model, without the numbers of the nodes."""
    found = verify(from_onnx.trace(model).graph)
    stored = sorted((t.path, t.shape, t.dtype, t.needs_grad) for t in found.parameters)
    nests = sorted(
        (op.name, str(op.function), op.times, op.chance, tuple(d.size for d in n.space))
        for n in found.nodes
        for op in n.ops
        if op.kind not in ("constant", "view")
    )
    return stored, [t.path for t in found.inputs], nests


@pytest.mark.parametrize("path", [p for p in light() if p.stem != "light_densenet121"], ids=lambda p: p.stem)
def test_light_models_in_constants(path: Path) -> None:
    model = onnx.load(path)
    assert work(in_constants(model)) == work(model)


def test_every_stored_model_in_constants() -> None:
    """All stored models of the onnx package give the same graph with their weights in Constants."""
    compared = False
    for path in stored_models():
        model = onnx.load(path, load_external_data=False)
        if path.parent.name == "light" or not (model.graph.initializer or model.graph.sparse_initializer):
            continue
        try:
            expected = work(model)
        except PaseError:
            continue
        assert work(in_constants(model)) == expected, path
        compared = True
    assert compared


def _w(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.ones(shape, dtype)


def _f(values: Any) -> Any:
    return numpy_helper.from_array(values, "w")


def _behind(*nodes: Any, shape: tuple[int, ...] = (32, 48), dtype: str = "float32") -> Callable[[], Any]:
    """A model of x @ w, with w made from the Constant 'w0' by these nodes."""

    def model() -> Any:
        stored = node("Constant", [], ["w0"], value=_f(_w(*shape, dtype=dtype)))
        return model_of([stored, *nodes, node("MatMul", ["x", "w"], ["y"])], {"x": (8, 32)}, ["y"])

    return model


def _ints(name: str, *values: int) -> Any:
    return node("Constant", [], [name], value_ints=list(values))


FORMS = {
    "identity": _behind(node("Identity", ["w0"], ["w"])),
    "cast": _behind(node("Cast", ["w0"], ["w"], to=TensorProto.FLOAT), dtype="float16"),
    "transpose": _behind(node("Transpose", ["w0"], ["w"]), shape=(48, 32)),
    "reshape": _behind(_ints("s", 32, 48), node("Reshape", ["w0", "s"], ["w"]), shape=(32 * 48,)),
    "unsqueeze": _behind(
        _ints("s", 0), node("Squeeze", ["w0", "s"], ["v"]), node("Identity", ["v"], ["w"]), shape=(1, 32, 48)
    ),
    "quantized": _behind(
        node("Constant", [], ["scale"], value_float=0.5),
        node("DequantizeLinear", ["w0", "scale"], ["w"]),
        dtype="int8",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_behind_views(form: str) -> None:
    (weight,) = graph_of(FORMS[form]()).parameters
    assert weight.path == "w0" and math.prod(map(int, weight.shape)) == 32 * 48
    assert weight.needs_grad == (form != "quantized")


def test_small_and_in_other_attributes() -> None:
    """A small bias after the views that Paddle's exporter writes, numbers given as floats, and a sparse value."""
    values = helper.make_tensor("s", TensorProto.FLOAT, [2], [1.0, 2.0])
    indices = helper.make_tensor("i", TensorProto.INT64, [2], [0, 5])
    nodes = [
        node("Constant", [], ["w"], sparse_value=helper.make_sparse_tensor(values, indices, [32, 4])),
        node("Constant", [], ["b0"], value_floats=[1.0, 2.0, 3.0, 4.0]),
        node("Constant", [], ["g0"], value=_f(_w(4))),
        _ints("s", 1, 4),
        node("Reshape", ["b0", "s"], ["b"]),
        node("Cast", ["g0"], ["g1"], to=TensorProto.FLOAT16),
        node("Cast", ["g1"], ["g"], to=TensorProto.FLOAT),
        node("MatMul", ["x", "w"], ["p"]),
        node("Mul", ["p", "g"], ["q"]),
        node("Add", ["q", "b"], ["y"]),
    ]
    found = graph_of(model_of(nodes, {"x": (8, 32)}, ["y"]))
    assert {t.path: t.shape for t in found.parameters} == {"w": (32, 4), "b0": (4,), "g0": (4,)}


def test_numbers_of_ops_stay_numbers() -> None:
    """Scales of a Resize that are concatenated from Constants are no weights."""
    nodes = [
        node("Constant", [], ["one"], value_floats=[1.0, 1.0]),
        node("Constant", [], ["two"], value_floats=[2.0, 2.0]),
        node("Concat", ["one", "two"], ["scales"], axis=0),
        node("Resize", ["x", "", "scales"], ["y"], mode="nearest"),
        node("Constant", [], ["p"], value_float=0.0),
        node("Mul", ["y", "p"], ["z"]),
    ]
    found = from_onnx.trace(model_of(nodes, {"x": (1, 3, 8, 8)}, ["z"])).graph
    assert not found.parameters and found.tensors[found.outputs[0]].shape == (1, 3, 16, 16)


def test_shape_left_out() -> None:
    """A ConstantOfShape stands for a weight if its shape is in a Constant node, as if it were in an initializer."""
    fill = helper.make_tensor("f", TensorProto.FLOAT, [1], [0.02])
    nodes = [
        _ints("s", 32, 48),
        node("ConstantOfShape", ["s"], ["w"], value=fill),
        node("MatMul", ["x", "w"], ["y"]),
    ]
    assert [t.path for t in graph_of(model_of(nodes, {"x": (8, 32)}, ["y"])).parameters] == ["w"]


def test_in_functions() -> None:
    """A function that is called twice has its Constants once. Attributes of a call belong to the call."""
    own = node("Constant", [], ["w"], value=_f(_w(32, 32)))
    given = node("Constant", [], ["v"])
    given.attribute.append(
        onnx.AttributeProto(name="value", ref_attr_name="given", type=onnx.AttributeProto.TENSOR)
    )
    body = [own, given, node("MatMul", ["a", "w"], ["p"]), node("MatMul", ["p", "v"], ["q"])]
    opset = helper.make_opsetid("", 21)
    f = helper.make_function("own", "Layer", ["a"], ["q"], body, [opset], ["given"])
    calls = [
        node("Layer", [i], [o], name=f"call{i}", domain="own", given=_f(_w(32, 32)))
        for i, o in (("x", "h"), ("h", "y"))
    ]
    model = model_of(calls, {"x": (8, 32)}, ["y"], opsets=[helper.make_opsetid("own", 1)], functions=[f])
    paths = [t.path for t in from_onnx.trace(model).graph.parameters]
    assert len(paths) == 3 and paths[0] == "Layer.w" and len(set(paths)) == 3


def _branch(*nodes: Any, out: str = "z", weights: tuple[Any, ...] = ()) -> Any:
    return helper.make_graph(
        list(nodes), "branch", [], [helper.make_tensor_value_info(out, 1, None)], list(weights)
    )


def conditional(then: Any, other: Any, **more: Any) -> Any:
    nodes = [node("If", ["c"], ["y"], name="choice", then_branch=then, else_branch=other)]
    weights = {"a": (32, 32), "b": (32, 32)} | more
    return model_of(nodes, {"x": (16, 32), "c": (TensorProto.BOOL, [])}, ["y"], weights)


def _matmul(w: str, out: str = "z", x: str = "x") -> Any:
    return node("MatMul", [x, w], [out])


def test_branches_are_priced() -> None:
    """The more expensive branch costs as much as on its own."""
    wide = _branch(_matmul("a", "p"), _matmul("b", x="p"))
    model = conditional(wide, _branch(_matmul("b")))
    plan = pase.compile(model, devices=4, mesh="4")
    alone = pase.compile(
        model_of(
            [_matmul("a", "p"), _matmul("b", "y", "p")],
            {"x": (16, 32)},
            ["y"],
            {"a": (32, 32), "b": (32, 32)},
        ),
        devices=4,
        mesh="4",
    )
    assert set(plan.parameters) == {"a", "b"}
    assert plan.work is not None and alone.work is not None
    assert plan.work.flops == pytest.approx(alone.work.flops, rel=2e-3)
    (remark,) = plan.remarks
    assert "If 'choice'" in remark and "then_branch, the more expensive one" in remark
    swapped = pase.compile(conditional(_branch(_matmul("b")), wide), devices=4, mesh="4")
    assert swapped.work is not None and swapped.work.flops == pytest.approx(plan.work.flops, rel=1e-9)
    assert "else_branch" in swapped.remarks[0]


def test_branches_of_different_ranks() -> None:
    longer = _branch(_matmul("a", "p"), node("Unsqueeze", ["p", "axis"], ["z"]))
    model = conditional(longer, _branch(_matmul("b")), axis=np.array([0]))
    plan = pase.compile(model, devices=4, mesh="4")
    assert any("shapes [1, 16, 32] and [16, 32] in output 0" in r for r in plan.remarks)
    assert plan.work is not None and plan.work.flops > 2 * 16 * 32 * 32


def test_branches_with_weights_of_one_name() -> None:
    """Each branch has its own weight 'w', one as an initializer and one as a Constant."""
    w = _f(_w(32, 32))
    then = _branch(_matmul("w"), weights=(w,))
    other = _branch(node("Constant", [], ["w"], value=_f(_w(32, 32))), _matmul("w"))
    found = graph_of(conditional(then, other))
    assert len({t.path for t in found.parameters}) == 2 and all(t.needs_grad for t in found.parameters)


def _loop(turns: Any, *nodes: Any) -> Any:
    """A loop h = h @ w that starts from x, with w in a Constant of the body. turns: its trip count."""
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            node("Constant", [], ["w"], value=_f(_w(32, 32))),
            _matmul("w", "h1", "h"),
            *(nodes or (node("Identity", ["go"], ["go1"]),)),
        ],
        "body",
        [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("h", 1, [16, 32])],
        [value("go1", TensorProto.BOOL, []), value("h1", 1, [16, 32])],
    )
    inputs: dict[str, Any] = {"x": (16, 32)}
    weights = {} if turns is None else {"n": np.array(turns)}
    inputs |= {} if weights else {"n": (TensorProto.INT64, [])}
    return model_of([node("Loop", ["n", "", "x"], ["y"], name="turns", body=body)], inputs, ["y"], weights)


def _products(g: Graph) -> list[tuple[int, float]]:
    """(trip count, chance) of each product."""
    return [(int(op.times), op.chance) for n in g.nodes for op in n.ops if op.kind == "matmul"]


def test_a_loop_with_a_known_trip_count() -> None:
    found = graph_of(_loop(5))
    assert [t.path for t in found.parameters] == ["turns.w"] and not found.remarks
    assert _products(found) == [(5, 1.0)]
    plan = pase.compile(_loop(5), devices=4, mesh="4")
    unrolled = [_matmul("w", f"h{k + 1}", f"h{k}" if k else "x") for k in range(5)]
    alone = pase.compile(
        model_of(unrolled, {"x": (16, 32)}, ["h5"], {"w": (32, 32)}), devices=4, mesh="4", baselines=False
    )
    assert plan.work is not None and alone.work is not None
    first = 2 * 16 * 32 * 32  # unrolled, the first product needs no gradient of its input
    assert plan.work.flops - alone.work.flops == first


def test_a_loop_that_may_end_earlier_or_never_is_remarked_on() -> None:
    positive = [
        node("ReduceMax", ["h1"], ["m"], keepdims=0),
        node("Cast", ["m"], ["go1"], to=TensorProto.BOOL),
    ]
    (remark,) = graph_of(_loop(5, *positive)).remarks
    assert remark.kind == "assumed" and "'turns' is priced as 5 iterations" in remark.what
    for turns in (None, 2**63 - 1):
        found = graph_of(_loop(turns))
        assert [r.kind for r in found.remarks] == ["trip_count", "opaque"]
        assert [t.path for t in found.parameters] == ["turns.w"]


def test_a_scan() -> None:
    """A scan along the second dim that reads a view of an outer weight and stacks results along the last dim."""
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [_matmul("v", "p", "slice"), node("Add", ["state", "p"], ["next"]), node("Tanh", ["next"], ["made"])],
        "body",
        [value("state", 1, [4, 32]), value("slice", 1, [4, 32])],
        [value("next", 1, [4, 32]), value("made", 1, [4, 32])],
    )
    scan = node(
        "Scan",
        ["s", "xs"],
        ["last", "ys"],
        body=body,
        num_scan_inputs=1,
        scan_input_axes=[1],
        scan_output_axes=[2],
    )
    nodes = [node("Transpose", ["w"], ["v"]), scan]
    model = model_of(nodes, {"s": (4, 32), "xs": (4, 10, 32)}, ["last", "ys"], {"w": (32, 32)})
    traced = from_onnx.trace(model)
    assert [traced.values[k][1] for k in ("last", "ys")] == [(4, 32), (4, 32, 10)]
    assert not graph_of(model).remarks and _products(graph_of(model)) == [(10, 1.0)]
    assert pase.compile(model, devices=4, mesh="4", baselines=False).sound


def test_a_loop_in_a_branch_and_a_branch_in_a_loop() -> None:
    inner = _loop(3).graph.node[0]
    inner.input[2] = "x"
    model = conditional(
        _branch(*[inner, node("Identity", ["y"], ["z"])]), _branch(_matmul("a")), n=np.array(3)
    )
    model.graph.node[0].output[0] = model.graph.output[0].name = "out"
    assert sorted(_products(graph_of(model))) == [(1, 0.001), (3, 1.0)]


def test_an_outer_view_does_not_belong_to_a_branch() -> None:
    """A reshape before the If that is first read in the cheap branch costs as much as outside of it."""
    cheap = _branch(node("Relu", ["r"], ["z"]))
    dear = _branch(_matmul("a", "p", "r"), _matmul("b", x="p"))
    nodes = [
        node("Reshape", ["x", "s"], ["r"]),
        node("If", ["c"], ["h"], then_branch=cheap, else_branch=dear),
        node("Add", ["h", "r"], ["y"]),
    ]
    weights: dict[str, Any] = {"a": (32, 32), "b": (32, 32), "s": np.array([16, 32])}
    traced = from_onnx.trace(model_of(nodes, {"x": (4, 4, 32), "c": (TensorProto.BOOL, [])}, ["y"], weights))
    made = traced.values["r"][0]
    (reshape,) = [op for n in traced.graph.nodes for op in n.ops if any(w.tensor == made for w in op.writes)]
    assert reshape.name == "reshape" and reshape.chance == 1 and not reshape.scope


def test_written_annotations(tmp_path: Path) -> None:
    """Readers of a weight in a Constant node have its layout, and its storage has its name."""
    weights = {"a": (64, 256), "b": (256, 64)}
    nodes = [_matmul("a", "p"), node("Relu", ["p"], ["q"]), _matmul("b", "y", "q")]
    model = in_constants(model_of(nodes, {"x": (64, 64)}, ["y"], weights))
    plan = pase.compile(model, devices=4, mesh="4")
    out = tmp_path / "annotated.onnx"
    emit(plan, out, model=model)
    found = read(out)
    assert {"a", "b"} <= set(found.stored)
    assert {name for _, name in found.layouts} >= {"a", "b", "y"}


def test_stored_outside() -> None:
    """A Constant whose data is outside of the model's folder is refused, like an initializer."""
    t = _f(_w(32, 32))
    t.ClearField("raw_data")
    t.data_location = TensorProto.EXTERNAL
    t.external_data.add(key="location", value="../../etc/passwd")
    model = model_of([node("Constant", [], ["w"], value=t), _matmul("w", "y")], {"x": (8, 32)}, ["y"])
    with pytest.raises(PaseError, match="passwd") as e:
        from_onnx.trace(model)
    assert "Constant" in e.value.where and "folder" in e.value.fix
