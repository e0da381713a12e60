"""Writes the ONNX model itself, annotated with DeviceConfigurationProto and ShardingSpecProto.

Every node gets the layouts in which it reads its inputs and computes its outputs. ONNX cannot express a partial sum, so
that is written in the layout that it has after the sum. ONNX also cannot express how weights and inputs are *stored*,
which may differ from how they are read; the file's metadata contains that ("pase.layout").

The file is copied at the level of its wire format, and the annotations are added. Weights are therefore copied without
being parsed.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pase.backends.emit.onnx_sharding import check, from_spec, to_spec
from pase.backends.registry import BACKENDS, Backend
from pase.errors import PaseError
from pase.files.atomic import write_atomically
from pase.frontends.onnx import frontend as from_onnx
from pase.frontends.onnx.wire import Buffer, Malformed, fields, varint
from pase.machine import Mesh
from pase.plan.types import PlanData
from pase.tables.axis_layout import AxisLayout

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from onnx import ModelProto

__all__ = ["Annotated", "emit", "layouts", "read"]

_KEY = "pase.layout"
_IR_VERSION = 11  # the first with device configurations


@dataclass(frozen=True, kw_only=True)
class Annotated:
    """The contents of a file's annotations.

    layouts: (index of a node, tensor) -> layout.
    stored: initializer or input -> the mesh axes that split each of its dims.
    """

    mesh: Mesh
    layouts: Mapping[tuple[int, str], AxisLayout]
    stored: Mapping[str, tuple[tuple[str, ...], ...]]


def layouts(plan: PlanData) -> dict[tuple[int, str], tuple[tuple[int, ...], AxisLayout]]:
    """(index of a node, value) -> (shape, layout), for all values that the model's own nodes read and write."""
    traced = plan.traced
    assert isinstance(traced, from_onnx.TracedOnnx)
    names: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for value, (name, shape) in traced.values.items():
        names.setdefault(name, []).append((value, shape))
    out: dict[tuple[int, str], tuple[tuple[int, ...], AxisLayout]] = {}
    for at, equation in plan.laid_out.items():
        index = at.number_in("")
        if index is None:
            continue
        for name, layout in (*equation.reads.items(), *equation.writes.items()):
            tensor = traced.graph.tensors[name]
            if any(not isinstance(s, int) for s in tensor.shape):
                continue
            for value, shape in names.get(name, ()):
                if value not in traced.operands[index]:
                    continue
                same = layout.reshaped(tensor.shape, shape, plan.mesh)  # type: ignore[arg-type]
                if same is not None:
                    out.setdefault((index, value), (shape, same))
    return out


def emit(plan: PlanData, path: Path, *, model: Any) -> str:
    """Write the annotated model; see the module's docstring. Raises PaseError if the plan is not for this model."""
    if not isinstance(plan.traced, from_onnx.TracedOnnx):
        if not from_onnx.reads(model):
            raise PaseError(
                "it is not an ONNX model, but --to onnx annotates the ONNX file that was compiled "
                "(pase compile model.onnx)",
                where=str(model),
                fix="for other models use --to names, dtensor or mesh-tf (see pase emit --help)",
            )
        dims = json.loads(plan.provenance.get("dims", "{}"))
        plan = plan.with_model(from_onnx.trace(model, name=plan.model, dims=dims or None))
    found = layouts(plan)
    if isinstance(model, (str, Path)):
        if Path(model).resolve() == path.resolve():
            raise PaseError("it is the model itself", where=str(path), fix="choose another output file")
        try:
            with Path(model).open("rb") as f:
                view = memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
            external = _write(plan, found, view, path)
        except (OSError, Malformed) as e:
            raise PaseError(f"the model cannot be copied to {path}: {e}", where=str(model)) from e
    else:
        external = _write(plan, found, model.SerializeToString(), path)
    beside = " (its external data must be in the same folder)" if external else ""
    return f"wrote {path}: {len(found)} shardings on {plan.devices} devices{beside}"


def _write(
    plan: PlanData,
    found: Mapping[tuple[int, str], tuple[tuple[int, ...], AxisLayout]],
    buf: Buffer,
    path: Path,
) -> bool:
    """Copy the model with annotations. Returns whether it refers to external data."""
    name = f"pase.{plan.devices}"
    by_node: dict[int, list[tuple[str, tuple[int, ...], AxisLayout]]] = {}
    for (i, value), (shape, layout) in found.items():
        by_node.setdefault(i, []).append((value, shape, layout))
    pieces: list[Buffer] = [b""]  # the IR version
    external = False
    version = _IR_VERSION
    for f in fields(buf, 0, len(buf)):
        if f.number == 1 and f.wire == 0:
            version = max(varint(buf, f.payload, f.end)[0], _IR_VERSION)
        elif f.number == 7 and f.wire == 2:
            body, refers = _graph(buf, f.payload, f.end, by_node, plan.mesh, name)
            external = external or refers
            pieces += [_tag(7, sum(map(len, body))), *body]
        elif (f.number == 26 and _text(buf, f.payload, f.end, 1) == name) or (
            f.number == 14 and _text(buf, f.payload, f.end, 1) == _KEY
        ):
            continue  # skip earlier annotations
        else:
            pieces.append(buf[f.start : f.end])
    pieces[0] = _head(1, version)
    pieces += _about(plan, name)
    write_atomically(path, pieces)
    return external


def _about(plan: PlanData, name: str) -> list[bytes]:
    """The device configuration, and the metadata for which ONNX has no field."""
    import onnx

    mesh = plan.mesh
    conf = onnx.DeviceConfigurationProto(name=name, num_devices=plan.devices)
    for device in range(plan.devices):
        at, rest = [], device
        for axis, size in zip(reversed(mesh.names), reversed(mesh.sizes), strict=True):
            rest, k = divmod(rest, size)
            at.append(f"{axis}={k}")
        conf.device.append(",".join(reversed(at)))
    stored = {k: t.storage for k, t in (*plan.parameters.items(), *plan.inputs.items())}
    about = {"mesh": mesh.by_name, "configuration": name, "stored": stored}
    entry = onnx.StringStringEntryProto(key=_KEY, value=json.dumps(about))
    out = []
    for number, message in ((26, conf), (14, entry)):
        data = message.SerializeToString()
        out += [_tag(number, len(data)), data]
    return out


def _graph(
    buf: Buffer,
    start: int,
    end: int,
    by_node: Mapping[int, list[tuple[str, tuple[int, ...], AxisLayout]]],
    mesh: Mesh,
    name: str,
) -> tuple[list[Buffer], bool]:
    """(the pieces of the GraphProto with annotated nodes, whether an initializer is stored outside the file)."""
    import onnx

    pieces: list[Buffer] = []
    since, index, external = start, -1, False
    for f in fields(buf, start, end):
        if f.number == 5 and f.wire == 2:
            external = external or any(
                g.number == 14 and varint(buf, g.payload, g.end)[0] == 1
                for g in fields(buf, f.payload, f.end)
                if g.wire == 0
            )
        if f.number != 1 or f.wire != 2:
            continue
        index += 1
        old = [
            g
            for g in fields(buf, f.payload, f.end)
            if g.number == 10 and _text(buf, g.payload, g.end, 1) == name
        ]
        if index not in by_node and not old:
            continue
        kept: list[Buffer] = []
        at = f.payload
        for g in old:
            kept.append(buf[at : g.start])
            at = g.end
        kept.append(buf[at : f.end])
        if index in by_node:
            conf = onnx.NodeDeviceConfigurationProto(configuration_id=name)
            for value, shape, layout in by_node[index]:
                conf.sharding_spec.append(to_spec(value, shape, layout, mesh))
            data = conf.SerializeToString()
            kept += [_tag(10, len(data)), data]
        pieces += [buf[since : f.start], _tag(1, sum(map(len, kept))), *kept]
        since = f.end
    pieces.append(buf[since:end])
    return pieces, external


def _text(buf: Buffer, start: int, end: int, number: int) -> str:
    """A string field of a message."""
    for f in fields(buf, start, end):
        if f.number == number and f.wire == 2:
            return bytes(buf[f.payload : f.end]).decode("utf-8", "replace")
    return ""


def _number(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _tag(number: int, length: int) -> bytes:
    return _number(number << 3 | 2) + _number(length)


def _head(number: int, value: int) -> bytes:
    return _number(number << 3) + _number(value)


def read(model: ModelProto | str | Path) -> Annotated:
    """The layouts in an annotated file or ModelProto, after a check. Raises PaseError if pase did not annotate it."""
    import onnx

    from pase.frontends.onnx.model import skeleton_of

    proto = model if isinstance(model, onnx.ModelProto) else skeleton_of(Path(model))
    check(proto)
    about = next((json.loads(p.value) for p in proto.metadata_props if p.key == _KEY), None)
    if about is None:
        raise PaseError(
            "the model's metadata contains no layout from pase",
            where="model",
            fix="annotate it with pase emit --to onnx",
        )
    mesh = Mesh(names=tuple(about["mesh"]), sizes=tuple(about["mesh"].values()))
    return Annotated(
        mesh=mesh,
        layouts=dict(_specs(proto, about["configuration"], mesh)),
        stored={k: tuple(map(tuple, v)) for k, v in about["stored"].items()},
    )


def _specs(proto: Message, name: str, mesh: Mesh) -> Iterator[tuple[tuple[int, str], AxisLayout]]:
    for i, node in enumerate(proto.graph.node):
        for conf in node.device_configurations:
            if conf.configuration_id == name:
                for spec in conf.sharding_spec:
                    yield (i, spec.tensor_name), from_spec(spec, mesh)


BACKENDS.add(
    "onnx",
    Backend(
        writes="the .onnx model with ONNX's own sharding annotations",
        emit=emit,
    ),
)
