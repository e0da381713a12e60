"""Reads the structure of an ONNX file without its weights, and binds its symbolic sizes. Invalid files are refused."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from pase.errors import PaseError
from pase.frontends.onnx.wire import Malformed, skeleton
from pase.frontends.registry import DimSizes, check_dims
from pase.ir import parse_size
from pase.ir.sizes import bind_size, free_symbols

if TYPE_CHECKING:
    from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

    from pase.ir import Size

__all__ = ["DTYPES", "OnnxModel", "dtype_name", "load", "ordered", "sizes_of", "skeleton_of", "symbols"]

_MOST_BYTES = 64 << 30
_MOST_RANK = 64

DTYPES: dict[int, str] = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    8: "string",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    14: "complex64",
    15: "complex128",
    16: "bfloat16",
    17: "float8_e4m3fn",
    18: "float8_e4m3fnuz",
    19: "float8_e5m2",
    20: "float8_e5m2fnuz",
    21: "uint4",
    22: "int4",
    23: "float8_e2m1fn",
    24: "float8_e8m0fnu",
    25: "uint4",
    26: "int4",
}
"""TensorProto.DataType -> dtype. Types of four and of two bits are priced at one byte per element, as in memory."""


@dataclass(frozen=True, kw_only=True)
class OnnxModel:
    """A checked ModelProto, possibly without the contents of its weights."""

    name: str
    """The model's name in messages: its path, or the name of its graph."""
    proto: ModelProto
    opsets: Mapping[str, int]
    functions: Mapping[tuple[str, str], FunctionProto]
    dims: Mapping[str, int]
    """Symbolic size -> integer."""

    @property
    def graph(self) -> GraphProto:
        return self.proto.graph

    def shape(self, value_info: ValueInfoProto) -> tuple[int, ...] | None:
        """The declared shape with symbolic sizes bound; None if a part of it is unknown."""
        out = sizes_of(value_info, self.dims)
        return out if out is None or all(isinstance(s, int) for s in out) else None  # type: ignore[return-value]


def dtype_name(code: int, where: str) -> str:
    """The dtype for a TensorProto.DataType. where: names the tensor in the message."""
    if code not in DTYPES:
        raise PaseError(f"{code} is not a data type of ONNX", where=where)
    return DTYPES[code]


def load(model: Any, dims: DimSizes | None, name: str | None = None) -> OnnxModel:
    """Read a file, or check a ModelProto. Raises PaseError if the model is invalid or a symbolic size is not bound.

    Neither the weights in the file nor external data are read.
    """
    import onnx

    if isinstance(model, onnx.ModelProto):
        proto, name = model, name or str(model.graph.name) or "ModelProto"
    else:
        name = name or str(model)
        proto = skeleton_of(Path(model))
    if not proto.HasField("graph") or not (proto.graph.node or proto.graph.output):
        raise PaseError("it contains no graph", where=str(name), fix="check that it is an ONNX model")
    _check_text(proto.graph, str(name))
    for f in proto.functions:
        _check_text(f, str(name))
    for o in (*proto.opset_import, *(o for f in proto.functions for o in f.opset_import)):
        if not isinstance(o.domain, str):
            raise PaseError("the name of a domain is not text; the file may be damaged", where=str(name))
    opsets = {_domain(o.domain): o.version for o in proto.opset_import} or {"": 1}
    functions: dict[tuple[str, str], FunctionProto] = {}
    for f in proto.functions:
        functions.setdefault((_domain(f.domain), f.name), f)
    found = symbols(proto.graph.input, {i.name for i in proto.graph.initializer})
    bound = check_dims(dims, found, name)
    if missing := [s for s in found if s not in bound]:
        raise PaseError(
            f"its symbolic sizes {', '.join(missing[:8])} (of {found[missing[0]]}) are not bound",
            where=str(name),
            fix=f"bind them with dims={{'{missing[0]}': 64}} or --dim '{missing[0]}=64'",
        )
    for graph in (proto.graph, *proto.functions):
        _check_stored(graph, name)
    return OnnxModel(name=name, proto=proto, opsets=opsets, functions=functions, dims=bound)


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def skeleton_of(path: Path) -> ModelProto:
    """The ModelProto of a file without the contents of its large tensors."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        with path.open("rb") as f:
            size = f.seek(0, 2)
            if not 0 < size <= _MOST_BYTES:
                raise PaseError(
                    f"its size is {size} bytes", where=str(path), fix="check that it is an ONNX model"
                )
            with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as m, memoryview(m) as view:
                small = skeleton(view)
    except OSError as e:
        raise PaseError(f"cannot read it: {e.strerror or e}", where=str(path)) from e
    except Malformed as e:
        raise PaseError(f"it is not an ONNX model, or is damaged: {e}", where=str(path)) from e
    try:
        return onnx.ModelProto.FromString(small)
    except DecodeError as e:
        raise PaseError(f"it is not an ONNX model, or is damaged: {e}", where=str(path)) from e


def _check_text(graph: GraphProto, where: str) -> None:
    """PaseError if a name is not valid UTF-8. In this case, protobuf returns bytes."""

    def check(*names: str) -> None:
        for n in names:
            if not isinstance(n, str):
                raise PaseError(f"the name {n[:40]!r} is not text; the file may be damaged", where=where)

    check(graph.name)
    for v in (*graph.input, *graph.output, *getattr(graph, "value_info", ())):
        check(*((v,) if isinstance(v, (str, bytes)) else (v.name,)))
        if not isinstance(v, (str, bytes)):
            check(*(d.dim_param for d in v.type.tensor_type.shape.dim))
    for t in getattr(graph, "initializer", ()):
        check(t.name, *(x for e in t.external_data for x in (e.key, e.value)))
    for t in getattr(graph, "sparse_initializer", ()):
        check(t.values.name)
    for n in graph.node:
        check(n.name, n.op_type, n.domain, *n.input, *n.output)
        check(*(x for p in n.metadata_props for x in (p.key, p.value)))
        for a in n.attribute:
            check(a.name, a.ref_attr_name)
            for g in (*([a.g] if a.HasField("g") else []), *a.graphs):
                _check_text(g, where)


def _check_stored(graph: GraphProto | FunctionProto, name: str) -> None:
    """PaseError if a tensor that the graph or a nested graph stores is invalid."""
    for t in getattr(graph, "initializer", ()):
        _check_tensor(t, f"{name}: initializer '{t.name}'")
    for n in graph.node:
        for a in n.attribute:
            for t in (*([a.t] if a.HasField("t") else []), *a.tensors):
                _check_tensor(t, f"{name}: {n.op_type} '{n.name or ''.join(n.output[:1])}'")
            for g in (*([a.g] if a.HasField("g") else []), *a.graphs):
                _check_stored(g, name)


def _check_tensor(t: TensorProto, where: str) -> None:
    dtype_name(t.data_type, where)
    if len(t.dims) > _MOST_RANK or any(d < 0 for d in t.dims):
        raise PaseError(
            f"its shape is {list(t.dims)[:8]}, but a shape has at most {_MOST_RANK} dims and no negative sizes",
            where=where,
        )
    if t.data_location != 1:
        return
    location = next((e.value for e in t.external_data if e.key == "location"), "")
    parts = {*PurePosixPath(location).parts, *PureWindowsPath(location).parts}
    if (
        not location
        or ".." in parts
        or PurePosixPath(location).is_absolute()
        or PureWindowsPath(location).anchor
    ):
        raise PaseError(
            f"its data is in '{location}', outside of the model's folder, and pase does not open it",
            where=where,
            fix="keep external data in the folder of the model",
        )


_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def _dim(text: str) -> Size:
    """The size for the text of a dim: an expression over symbols if it can be parsed, otherwise a symbol."""
    if _NAME.fullmatch(text):
        return text
    try:
        size = parse_size(text)
    except PaseError:
        return text
    return size


def _declared_dims(value_info: ValueInfoProto) -> list[tuple[int, Size]] | None:
    """(axis, number or symbolic size) of each declared dim; None if no shape is declared."""
    kind = value_info.type.WhichOneof("value")
    if kind != "tensor_type" or not value_info.type.tensor_type.HasField("shape"):
        return None
    out: list[tuple[int, Size]] = []
    for i, d in enumerate(value_info.type.tensor_type.shape.dim):
        if d.HasField("dim_value") and d.dim_value >= 0:
            out.append((i, int(d.dim_value)))
        elif d.dim_param:
            out.append((i, _dim(d.dim_param)))
        else:
            out.append((i, f"{value_info.name}.{i}"))
    if len(out) > _MOST_RANK:
        raise PaseError(f"it has {len(out)} dims, but pase reads at most {_MOST_RANK}", where=value_info.name)
    return out


def symbols(inputs: Iterable[ValueInfoProto], given: set[str]) -> dict[str, str]:
    """Symbolic size -> a description of the first input that has it. A dim without a name is called INPUT.AXIS.

    given: names of the inputs that have an initializer.
    """
    out: dict[str, str] = {}
    for v in inputs:
        for _, s in (_declared_dims(v) or ()) if v.name not in given else ():
            names = [s] if isinstance(s, str) else [] if isinstance(s, int) else sorted(free_symbols([s]))
            for n in names:
                out.setdefault(n, f"input '{v.name}'")
    return out


def sizes_of(value_info: ValueInfoProto, dims: Mapping[str, int]) -> tuple[Size, ...] | None:
    """The declared shape, with the symbols in ``dims`` bound; None if no shape is declared."""
    declared = _declared_dims(value_info)
    if declared is None:
        return None
    out: list[Size] = []
    for _, s in declared:
        if isinstance(s, str):
            out.append(dims.get(s, s))
        else:
            out.append(bind_size(s, dims))
    return tuple(out)


def ordered(nodes: Sequence[NodeProto], known: Iterable[str], name: str) -> list[tuple[int, NodeProto]]:
    """(index, node) for all nodes, sorted so that a node follows those that it reads. PaseError for a cycle.

    The order of the file is kept if it is sorted. known: values that exist before the nodes. name: of the model.
    """
    made = set(known)
    for n in nodes:
        if not all(x in made for x in n.input if x):
            break
        made.update(n.output)
    else:
        return list(enumerate(nodes))
    producer: dict[str, int] = {}
    for i, n in enumerate(nodes):
        for o in n.output:
            producer.setdefault(o, i)
    waits = [len({producer[x] for x in n.input if x in producer}) for n in nodes]
    feeds: list[list[int]] = [[] for _ in nodes]
    for i, n in enumerate(nodes):
        for p in {producer[x] for x in n.input if x in producer}:
            feeds[p].append(i)
    ready = [i for i, w in enumerate(waits) if w == 0]
    out: list[tuple[int, NodeProto]] = []
    for i in ready:  # the list grows during the iteration
        out.append((i, nodes[i]))
        for f in feeds[i]:
            waits[f] -= 1
            if waits[f] == 0:
                ready.append(f)
    if len(out) != len(nodes):
        stuck = next(n for n, w in zip(nodes, waits, strict=True) if w)
        raise PaseError(
            f"the graph has a cycle: {stuck.op_type} '{stuck.name}' depends on its own result", where=name
        )
    return out
