"""ONNX's own test cases of single ops, the models of the onnx package, and builders of small models."""

from __future__ import annotations

import os
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from pase.errors import PaseError
from pase.frontends.onnx.frontend import OnnxLowering, lowered, trace
from pase.frontends.onnx.model import load
from pase.ir import Graph, named, simplify, verify

__all__ = [
    "DATA",
    "graph_of",
    "light",
    "model_of",
    "node",
    "node_cases",
    "ones",
    "product",
    "read_case",
    "small",
    "stored_as_w",
    "stored_models",
]

DATA = Path(os.path.dirname(onnx.__file__)) / "backend" / "test" / "data"


def light() -> list[Path]:
    """The models of the ONNX zoo without weights, which are part of the onnx package."""
    return sorted((DATA / "light").glob("*.onnx"))


def stored_models() -> list[Path]:
    """Every model file in the onnx package."""
    return sorted(DATA.rglob("*.onnx"))


@cache
def node_cases(most: int | None = None) -> tuple[Any, ...]:
    """ONNX's own cases: models of one op (or its expansion), with inputs and expected outputs.

    most: how many of each op, evenly spread; all by default.
    """
    from onnx.backend.test.case import node

    cases = [c for c in node.collect_testcases(None) if c.model is not None and c.data_sets]
    of_op: dict[str, list[Any]] = defaultdict(list)
    for case in cases:
        of_op[case.model.graph.node[0].op_type].append(case)
    if most is None:
        return tuple(cases)
    return tuple(c for of in of_op.values() for c in of[:: max(1, len(of) // most)])


def read_case(case: Any) -> tuple[Any, OnnxLowering] | None:
    """A lowered case and its model; None if pase refuses it.

    If needed, small inputs (shapes and axes, which must be known) are made initializers: all but the first, or all.
    """
    for keep in (None, 0, -1):
        model = onnx.ModelProto()
        model.CopyFrom(case.model)
        if keep is not None:
            for k, (i, a) in enumerate(zip(list(model.graph.input), case.data_sets[0][0], strict=False)):
                if k != keep and isinstance(a, np.ndarray) and a.dtype.kind in "iufb" and a.size <= 64:
                    model.graph.initializer.append(numpy_helper.from_array(a, i.name))
        try:
            return model, lowered(load(model, {}))
        except PaseError:
            continue
    return None


def model_of(
    nodes: list[Any],
    inputs: dict[str, Any],
    outputs: Any,
    weights: dict[str, Any] | None = None,
    opset: int = 21,
    **more: Any,
) -> Any:
    """A ModelProto of these nodes.

    inputs, outputs: name -> shape or (dtype, shape). outputs may also be a list of names. weights: name -> array, or
    the shape of an array of zeros.
    """
    from onnx import TensorProto

    def info(name: str, shape: Any) -> Any:
        dtype = TensorProto.FLOAT
        if isinstance(shape, tuple) and len(shape) == 2 and isinstance(shape[1], (tuple, list)):
            dtype, shape = shape
        return helper.make_tensor_value_info(name, dtype, shape)

    tensors = [
        numpy_helper.from_array(w if isinstance(w, np.ndarray) else np.zeros(w, np.float32), name)
        for name, w in (weights or {}).items()
    ]
    graph = helper.make_graph(
        nodes,
        more.pop("name", "g"),
        [info(k, v) for k, v in inputs.items()],
        [info(k, outputs[k] if isinstance(outputs, dict) else None) for k in outputs],
        tensors,
        value_info=more.pop("value_info", []),
    )
    opsets = [helper.make_opsetid("", opset), *more.pop("opsets", [])]
    return helper.make_model(graph, opset_imports=opsets, **more)


node = helper.make_node


def graph_of(model: Any, **options: Any) -> Graph:
    """The simplified graph of a model, in which every node has a name."""
    return verify(named(simplify(verify(trace(model, **options).graph))))


def ones(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.ones(shape, dtype)


def stored_as_w(values: Any) -> Any:
    """A TensorProto named w."""
    return numpy_helper.from_array(values, "w")


def product(w: str, out: str = "z", x: str = "x") -> Any:
    """The node of x @ w."""
    return node("MatMul", [x, w], [out])


def small(*nodes: Any, **more: Any) -> Any:
    """A model with the product of x [4 8] and w [8 16], followed by these nodes."""
    first = node("MatMul", ["x", "w"], ["y"], name="product")
    more.setdefault("outputs", [nodes[-1].output[0] if nodes else "y"])
    weights = {"w": (8, 16)} | more.pop("weights", {})
    return model_of([first, *nodes], {"x": (4, 8)} | more.pop("inputs", {}), weights=weights, **more)
