"""Weights in all places where a file may store them: equivalent models give the same graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper  # noqa: E402

import pase  # noqa: E402
from pase.backends.emit.onnx import emit, read  # noqa: E402
from pase.errors import PaseError  # noqa: E402
from pase.frontends.onnx import frontend as from_onnx  # noqa: E402
from pase.ir import verify  # noqa: E402
from tests.frontends.onnx.cases import (  # noqa: E402
    graph_of,
    light,
    model_of,
    node,
    ones,
    product,
    stored_as_w,
    stored_models,
)


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


@pytest.mark.some(3)
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


def _behind(*nodes: Any, shape: tuple[int, ...] = (32, 48), dtype: str = "float32") -> Callable[[], Any]:
    """A model of x @ w, with w made from the Constant 'w0' by these nodes."""

    def model() -> Any:
        stored = node("Constant", [], ["w0"], value=stored_as_w(ones(*shape, dtype=dtype)))
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
        node("Constant", [], ["g0"], value=stored_as_w(ones(4))),
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
    own = node("Constant", [], ["w"], value=stored_as_w(ones(32, 32)))
    given = node("Constant", [], ["v"])
    given.attribute.append(
        onnx.AttributeProto(name="value", ref_attr_name="given", type=onnx.AttributeProto.TENSOR)
    )
    body = [own, given, node("MatMul", ["a", "w"], ["p"]), node("MatMul", ["p", "v"], ["q"])]
    opset = helper.make_opsetid("", 21)
    f = helper.make_function("own", "Layer", ["a"], ["q"], body, [opset], ["given"])
    calls = [
        node("Layer", [i], [o], name=f"call{i}", domain="own", given=stored_as_w(ones(32, 32)))
        for i, o in (("x", "h"), ("h", "y"))
    ]
    model = model_of(calls, {"x": (8, 32)}, ["y"], opsets=[helper.make_opsetid("own", 1)], functions=[f])
    paths = [t.path for t in from_onnx.trace(model).graph.parameters]
    assert len(paths) == 3 and paths[0] == "Layer.w" and len(set(paths)) == 3


def test_written_annotations(tmp_path: Path) -> None:
    """Readers of a weight in a Constant node have its layout, and its storage has its name."""
    weights = {"a": (64, 256), "b": (256, 64)}
    nodes = [product("a", "p"), node("Relu", ["p"], ["q"]), product("b", "y", "q")]
    model = in_constants(model_of(nodes, {"x": (64, 64)}, ["y"], weights))
    plan = pase.compile(model, devices=4, mesh="4")
    out = tmp_path / "annotated.onnx"
    emit(plan, out, model=model)
    found = read(out)
    assert {"a", "b"} <= set(found.stored)
    assert {name for _, name in found.layouts} >= {"a", "b", "y"}


def test_stored_outside() -> None:
    """A Constant whose data is outside of the model's folder is refused, like an initializer."""
    t = stored_as_w(ones(32, 32))
    t.ClearField("raw_data")
    t.data_location = TensorProto.EXTERNAL
    t.external_data.add(key="location", value="../../etc/passwd")
    model = model_of([node("Constant", [], ["w"], value=t), product("w", "y")], {"x": (8, 32)}, ["y"])
    with pytest.raises(PaseError, match="passwd") as e:
        from_onnx.trace(model)
    assert "Constant" in e.value.where and "folder" in e.value.fix
