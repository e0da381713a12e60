"""Reads SavedModel folders and frozen GraphDef files as protos. Nothing in them is run and no weight is restored."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pase.errors import PaseError
from pase.frontends.registry import DimSizes
from pase.frontends.tf.graph import dtype_name, static_shape
from pase.frontends.tf.graph_def import graph_of
from pase.frontends.tf.sources import InputSpec, TfSource, Variable, bound, distinct

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from tensorflow.core.framework.graph_pb2 import GraphDef
    from tensorflow.core.framework.node_def_pb2 import NodeDef
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

__all__ = ["from_path", "frozen"]

Proto = TypeVar("Proto", bound="Message")
_MOST_BYTES = 2 << 30
"""The largest size of a protobuf message."""

_WAS_READ = re.compile(r"(^|/)(read|ReadVariableOp(_\d+)?)$")
"""Names of nodes that read a variable. Freezing (in TensorFlow 1 and 2) turns them into an Identity of a constant."""

_ENDS = frozenset(
    {"Const", "Placeholder", "PlaceholderV2", "NoOp", "Assert", "VarHandleOp", "Variable", "VariableV2"}
)
_EFFECTS = (
    "Assign",
    "Save",
    "Restore",
    "MergeV2",
    "Summary",
    "Print",
    "Lookup",
    "HashTable",
    "Shard",
    "Queue",
)


def from_path(path: Path, name: str, dims: DimSizes) -> TfSource:
    """Read the folder of a SavedModel, its saved_model.pb, or a GraphDef in a .pb file."""
    if path.is_dir():
        path = path / "saved_model.pb"
    data = _bytes(path)
    if path.name != "saved_model.pb":
        graph_def = _parsed(_protos().GraphDef, data, path, "GraphDef")
        if graph_def.node:
            return frozen(graph_def, name, dims)
    saved = _parsed(_protos().SavedModel, data, path, "SavedModel")
    if not saved.meta_graphs:
        raise PaseError("it contains no graph", where=str(path), fix="give a frozen GraphDef or a SavedModel")
    return _saved_model(saved, name, dims)


def _bytes(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise PaseError(
                f"it has {size} bytes, but a protobuf file has at most {_MOST_BYTES}", where=str(path)
            )
        return path.read_bytes()
    except OSError as e:
        raise PaseError(f"cannot read it: {e.strerror}", where=str(path)) from e


class _Protos:
    def __init__(self) -> None:
        from tensorflow.core.framework.graph_pb2 import GraphDef
        from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

        self.GraphDef, self.SavedModel = GraphDef, SavedModel


def _protos() -> _Protos:
    return _Protos()


def _parsed(kind: type[Proto], data: bytes, path: Path, what: str) -> Proto:
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(data)
    except (DecodeError, RecursionError, ValueError) as e:
        raise PaseError(f"it is not a {what}, or is cut off: {e}", where=str(path)) from e


# -- frozen graphs --


def frozen(graph_def: GraphDef, name: str, dims: DimSizes) -> TfSource:
    """A GraphDef whose variables have become constants. These become parameters again, by the names of the variables.

    Constants that freezing made (read through ``…/read`` or ``…/ReadVariableOp``) are parameters. If there are none,
    all floating-point constants with a dim are parameters. Inputs are the placeholders; outputs are the floating-point
    results that no node reads.
    """
    read: set[str] = set()
    for n in graph_def.node:
        read.update(re.sub(r":\d+$", "", r).lstrip("^") for r in n.input)
    outputs = [
        n.name
        for n in graph_def.node
        if n.name not in read and n.op not in _ENDS and n.input and not n.op.startswith(_EFFECTS)
    ]
    needed = _needed(graph_def, outputs)
    specs = {
        n.name: n for n in graph_def.node if n.op in ("Placeholder", "PlaceholderV2") and n.name in needed
    }
    found = []
    for node_name, n in specs.items():
        shape = static_shape(n.attr["shape"].shape) if "shape" in n.attr else None
        if shape is None and "_output_shapes" in n.attr and n.attr["_output_shapes"].list.shape:
            shape = static_shape(n.attr["_output_shapes"].list.shape[0])
        dtype = dtype_name(n.attr["dtype"].type) if "dtype" in n.attr else "float32"
        if shape is None:
            raise PaseError(
                "it has no static rank",
                where=f"placeholder '{node_name}' of '{name}'",
                fix="freeze the graph with a shape for it",
            )
        found.append(InputSpec(name=node_name, shape=shape, dtype=dtype))
    if not outputs:
        raise PaseError(
            "the graph has no result: it is empty, or every output is read by another node", where=name
        )
    inputs = dict(zip([f"{s.name}:0" for s in found], bound(found, dims, name), strict=True))
    consts = {n.name: n for n in graph_def.node if n.op == "Const"}
    marked = {
        n.input[0].partition(":")[0]
        for n in graph_def.node
        if n.op == "Identity" and n.input and _WAS_READ.search(n.name)
    } & set(consts)
    weights = marked or {k for k, n in consts.items() if _is_weight(n)}
    return TfSource(
        name=name,
        graph=graph_of(graph_def, outputs, list(inputs)),
        inputs=inputs,
        weights=frozenset(weights),
        variables=_variables(graph_def, {}),
    )


def _needed(graph_def: GraphDef, outputs: list[str]) -> set[str]:
    """The names of the nodes that the outputs depend on."""
    inputs = {n.name: [r.partition(":")[0] for r in n.input if not r.startswith("^")] for n in graph_def.node}
    seen: set[str] = set()
    stack = list(outputs)
    while stack:
        name = stack.pop()
        if name not in seen:
            seen.add(name)
            stack += inputs.get(name, ())
    return seen


def _is_weight(node: NodeDef) -> bool:
    """Whether a constant is floating-point and has a dim of more than one element."""
    tensor = node.attr["value"].tensor
    sizes = [d.size for d in tensor.tensor_shape.dim]
    return tensor.dtype in (1, 2, 14, 19) and any(s > 1 for s in sizes)


def _variables(graph_def: GraphDef, trainable: dict[str, bool]) -> dict[str, Variable]:
    """Name of a node -> the variable that it makes, with the shape that the node declares."""
    found: dict[str, Variable] = {}
    nodes = [n for n in graph_def.node if n.op in ("VarHandleOp", "VariableV2", "Variable")]
    paths = distinct([n.attr["shared_name"].s.decode("utf-8", "replace") or n.name for n in nodes])
    for n, path in zip(nodes, paths, strict=True):
        shape = static_shape(n.attr["shape"].shape) if "shape" in n.attr else None
        if shape is None or any(s is None for s in shape):
            continue  # reported as an error if the outputs need the variable
        whole = tuple(s for s in shape if s is not None)
        dtype = dtype_name(n.attr["dtype"].type)
        found[n.name] = Variable(path=path, shape=whole, dtype=dtype, trainable=trainable.get(path, True))
    return found


# -- SavedModel --


def _saved_model(saved: SavedModel, name: str, dims: DimSizes) -> TfSource:
    """The graph with the tag "serve" (or else the first graph), from the inputs to the outputs of its signature.

    The signature is ``serving_default``, or else the first one by name, as ``saved_model_cli show`` lists them.
    """
    graphs = sorted(saved.meta_graphs, key=lambda m: "serve" not in m.meta_info_def.tags)
    meta = graphs[0]
    signatures = {k: v for k, v in meta.signature_def.items() if not k.startswith("__")}
    key = "serving_default" if "serving_default" in signatures else next(iter(sorted(signatures)), None)
    if key is None:
        raise PaseError(
            "the SavedModel has no signature",
            where=name,
            fix="save it with one: model.export(path) or tf.saved_model.save(module, path, signatures=…)",
        )
    signature = signatures[key]
    specs, refs = [], []
    for label, info in sorted(signature.inputs.items()):
        shape = static_shape(info.tensor_shape)
        if shape is None:
            raise PaseError(
                "it has no static rank",
                where=f"input '{label}' of '{name}'",
                fix="save the model with a shape for it",
            )
        specs.append(InputSpec(name=label, shape=shape, dtype=dtype_name(info.dtype)))
        refs.append(info.name)
    outputs = [i.name for _, i in sorted(signature.outputs.items()) if dtype_name(i.dtype).count("float")]
    if not outputs:
        raise PaseError("it returns no floating-point tensor", where=f"signature '{key}' of '{name}'")
    trainable: dict[str, bool] = {}
    for node in meta.object_graph_def.nodes:
        if node.HasField("variable"):
            trainable[node.variable.name] = node.variable.trainable
    inputs = dict(zip(refs, bound(specs, dims, name), strict=True))
    graph = graph_of(meta.graph_def, outputs, list(inputs))
    used = {n.name for n in graph.main.nodes}
    variables = {k: v for k, v in _variables(meta.graph_def, trainable).items() if k in used}
    return TfSource(name=name, graph=graph, inputs=inputs, variables=_renamed(variables, trainable))


def _renamed(variables: dict[str, Variable], trainable: dict[str, bool]) -> dict[str, Variable]:
    """The variables by the model's own names, because saving may number a node (``dense/kernel_1``)."""
    own = {
        k: re.sub(r"_\d+$", "", v.path) if v.path not in trainable else v.path for k, v in variables.items()
    }
    count = Counter(own.values())
    return {
        k: replace(v, path=own[k], trainable=trainable[own[k]])
        if own[k] in trainable and count[own[k]] == 1
        else v
        for k, v in variables.items()
    }
