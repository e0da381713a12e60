"""Branches, loops and scans: what they are priced as, their weights, and remarks on trip counts that nobody knows."""

from __future__ import annotations

from typing import Any

import pytest

onnx = pytest.importorskip("onnx")

import numpy as np  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402

import pase  # noqa: E402
from pase.frontends.onnx import frontend as from_onnx  # noqa: E402
from pase.ir import Graph  # noqa: E402
from tests.frontends.onnx.cases import graph_of, model_of, node, ones, product, stored_as_w  # noqa: E402


def _branch(*nodes: Any, out: str = "z", weights: tuple[Any, ...] = ()) -> Any:
    return helper.make_graph(
        list(nodes), "branch", [], [helper.make_tensor_value_info(out, 1, None)], list(weights)
    )


def conditional(then: Any, other: Any, **more: Any) -> Any:
    nodes = [node("If", ["c"], ["y"], name="choice", then_branch=then, else_branch=other)]
    weights = {"a": (32, 32), "b": (32, 32)} | more
    return model_of(nodes, {"x": (16, 32), "c": (TensorProto.BOOL, [])}, ["y"], weights)


def test_branches_are_priced() -> None:
    """The more expensive branch costs as much as on its own."""
    wide = _branch(product("a", "p"), product("b", x="p"))
    model = conditional(wide, _branch(product("b")))
    plan = pase.compile(model, devices=4, mesh="4")
    alone = pase.compile(
        model_of(
            [product("a", "p"), product("b", "y", "p")],
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
    swapped = pase.compile(conditional(_branch(product("b")), wide), devices=4, mesh="4")
    assert swapped.work is not None and swapped.work.flops == pytest.approx(plan.work.flops, rel=1e-9)
    assert "else_branch" in swapped.remarks[0]


def test_branches_of_different_ranks() -> None:
    longer = _branch(product("a", "p"), node("Unsqueeze", ["p", "axis"], ["z"]))
    model = conditional(longer, _branch(product("b")), axis=np.array([0]))
    plan = pase.compile(model, devices=4, mesh="4")
    assert any("shapes [1, 16, 32] and [16, 32] in output 0" in r for r in plan.remarks)
    assert plan.work is not None and plan.work.flops > 2 * 16 * 32 * 32


def test_branches_with_weights_of_one_name() -> None:
    """Each branch has its own weight 'w', one as an initializer and one as a Constant."""
    w = stored_as_w(ones(32, 32))
    then = _branch(product("w"), weights=(w,))
    other = _branch(node("Constant", [], ["w"], value=stored_as_w(ones(32, 32))), product("w"))
    found = graph_of(conditional(then, other))
    assert len({t.path for t in found.parameters}) == 2 and all(t.needs_grad for t in found.parameters)


def _loop(turns: Any, *nodes: Any) -> Any:
    """A loop h = h @ w that starts from x, with w in a Constant of the body. turns: its trip count."""
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            node("Constant", [], ["w"], value=stored_as_w(ones(32, 32))),
            product("w", "h1", "h"),
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
    unrolled = [product("w", f"h{k + 1}", f"h{k}" if k else "x") for k in range(5)]
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
        [product("v", "p", "slice"), node("Add", ["state", "p"], ["next"]), node("Tanh", ["next"], ["made"])],
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
        _branch(*[inner, node("Identity", ["y"], ["z"])]), _branch(product("a")), n=np.array(3)
    )
    model.graph.node[0].output[0] = model.graph.output[0].name = "out"
    assert sorted(_products(graph_of(model))) == [(1, 0.001), (3, 1.0)]


def test_an_outer_view_does_not_belong_to_a_branch() -> None:
    """A reshape before the If that is first read in the cheap branch costs as much as outside of it."""
    cheap = _branch(node("Relu", ["r"], ["z"]))
    dear = _branch(product("a", "p", "r"), product("b", x="p"))
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
