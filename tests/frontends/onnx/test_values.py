"""What a rule sees of a node: inputs and attributes, and one error for a node that ONNX's schema does not allow."""

from __future__ import annotations

from typing import Any

import pytest

onnx = pytest.importorskip("onnx")

import numpy as np  # noqa: E402

from pase.errors import PaseError  # noqa: E402
from pase.frontends.common.values import Value, known  # noqa: E402
from pase.frontends.onnx.values import OnnxCall  # noqa: E402
from pase.frontends.registry import trace  # noqa: E402
from tests.frontends.onnx.cases import node  # noqa: E402


def call(n: Any, *ins: Value | None, version: int = 21) -> OnnxCall:
    return OnnxCall(low=None, node=n, op=n.op_type, version=version, ins=list(ins), place="node '7'")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n", "version", "why"),
    [
        (node("Relu", [], ["y"]), 21, "0 inputs"),
        (node("Relu", ["a", "b"], ["y"]), 21, "2 inputs"),
        (node("Relu", ["a"], ["y", "z"]), 21, "2 outputs"),
        (node("Concat", ["a"], ["y"]), 21, "'axis' is missing"),
        (node("Concat", ["a"], ["y"], axis="x"), 21, "'axis' has the wrong type"),
        (node("Squeeze", ["a", "x"], ["y"]), 11, "opset 11 allows 1 to 1 inputs"),
    ],
)
def test_a_node_that_the_schema_does_not_allow_is_refused(n: Any, version: int, why: str) -> None:
    with pytest.raises(PaseError, match=why) as e:
        call(n, version=version).check()
    assert e.value.where == "node '7'"


def test_what_the_schema_allows_and_what_it_does_not_know_passes() -> None:
    call(node("Squeeze", ["a", "x"], ["y"])).check()
    call(node("Squeeze", ["a"], ["y"], axes=[0]), version=11).check()
    call(node("Anything", [], ["y"], domain="mine")).check()


def test_attributes_have_their_values_or_the_defaults() -> None:
    c = call(node("Any", ["a"], ["y"], i=3, f=0.5, s="text", v=[1, 2], to=onnx.TensorProto.FLOAT16))
    assert (c.integer("i"), c.real("f"), c.text("s"), c.ints("v"), c.dtype("to", "")) == (
        3,
        0.5,
        "text",
        [1, 2],
        "float16",
    )
    assert (c.integer("j", 7), c.real("g", 2.0), c.text("t", "none"), c.ints("w"), c.dtype("as", "int8")) == (
        7,
        2.0,
        "none",
        None,
        "int8",
    )
    assert c.has("i") and not c.has("j")


def test_in_a_function_a_reference_is_the_attribute_of_the_call_if_it_has_one() -> None:
    n = node("Any", ["a"], ["y"])
    for name in ("here", "gone"):
        n.attribute.append(
            onnx.AttributeProto(name=name, ref_attr_name=f"outer_{name}", type=onnx.AttributeProto.INT)
        )
    c = call(n)
    c.resolve({"outer_here": onnx.helper.make_attribute("outer_here", 5)})
    assert c.integer("here") == 5 and not c.has("gone")


def test_integers_of_an_input_must_be_known_and_be_integers() -> None:
    n = node("Any", ["a", "b"], ["y"])
    assert call(n, known(np.array([[3, -1]]))).ints_of(0, "axes") == [3, -1]
    for value, why in (
        (Value(shape=(2,), dtype="int64"), "computed from the model's data"),
        (known(0.5), "dtype float64"),
    ):
        with pytest.raises(PaseError, match=why) as e:
            call(n, value).ints_of(0, "axes")
        assert "the axes" in e.value.what
    with pytest.raises(PaseError, match="input 1 is missing"):
        call(n, known(1)).x(1)


def test_one_number_is_read_and_anything_else_is_the_default() -> None:
    c = call(node("Any", ["a", "b"], ["y"]), known(np.array([2.5])), known(np.array([1.0, 2.0])), None)
    assert [c.number_of(i, 9.0) for i in range(4)] == [2.5, 9.0, 9.0, 9.0]


_MIXED = {
    "MatMul": ("y = MatMul(x, w)", "input 0 is float32 and its input 1 is float16"),
    "Concat": ("y = Concat<axis = 0>(x, w)", "input 1 is float16"),
    "LayerNormalization": ("y = LayerNormalization(x, w, w)", "input 1 is float16"),
    "Where": ("c = Greater(x, x) y = Where(c, x, w)", "input 1 is float32 and its input 2 is float16"),
    "Gather": ("y = Gather(w, x)", "input 1 is float32, which ONNX does not allow"),
    "Not": ("n = Not(x) y = Cast<to = 1>(n)", "input 0 is float32, which ONNX does not allow"),
}


@pytest.mark.parametrize("op", _MIXED)
def test_types_that_onnx_refuses_are_refused(op: str) -> None:
    """ONNX's own checker is the oracle: it refuses each file, and takes it if ``w`` has the right type."""
    from onnx import numpy_helper, parser

    def file(body: str, w: str) -> Any:
        text = f"""<ir_version: 8, opset_import: ["": 18]> loss (float[8,8] x) => (float loss) {{
            {body} z = Cast<to = 1>(y) loss = ReduceMean<keepdims = 0>(z) }}"""
        model = parser.parse_model(text)
        model.graph.initializer.append(numpy_helper.from_array(np.ones((8, 8), w), "w"))
        return model

    body, said = _MIXED[op]
    with pytest.raises(onnx.shape_inference.InferenceError):
        onnx.checker.check_model(file(body, "float16"), full_check=True)
    with pytest.raises(PaseError, match=f"{op} '.*{said}"):
        trace(file(body, "float16"))
    if "float16" in said:
        onnx.checker.check_model(file(body, "float32"), full_check=True)
        assert trace(file(body, "float32")).graph.nodes
