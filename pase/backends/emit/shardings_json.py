"""A plan's shardings by name, as JSON. A program in another framework can apply them to its own arrays, for example for
a model that came from ONNX or TensorFlow. ``SCHEMA`` is the file's format; it does not change within a version.

    {"schema": "pase.names/1", "model": …, "frontend": …, "devices": 4,
     "mesh": {"data": 2, "model": 2},
     "parameters": {"dense/kernel": {"shape": [64, 256], "dtype": "float32", "spec": [[], ["model"]],
                                     "used_as": [], "state": null}},
     "inputs": {"x": {"shape": [8, 64], "dtype": "float32", "spec": [["data"], []]}},
     "activations": {"dense/MatMul:0": {"shape": [8, 256], "dtype": "float32", "spec": [["data"], ["model"]]}}}

A spec has the mesh axes that split each dim of the tensor, major to minor. In JAX it is
``PartitionSpec(*map(tuple, spec))``. The mesh's axes are in the order of the devices: the last axis is innermost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pase.backends.registry import BACKENDS, Backend
from pase.errors import PaseError
from pase.files.codec import read_json
from pase.files.json_values import JsonObject
from pase.machine.jax_devices import as_linked

if TYPE_CHECKING:
    from jax import Device as JaxDevice
    from jax.sharding import NamedSharding

    from pase.ir import Place, Tensor
    from pase.plan.types import PlanData, TensorPlan

__all__ = ["SCHEMA", "emit", "jax_shardings", "load", "to_json"]

NAME = "pase.names/1"

_SPEC = {"type": "array", "items": {"type": "array", "items": {"type": "string"}}}
_TENSOR = {
    "type": "object",
    "required": ["shape", "dtype", "spec"],
    "properties": {
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 1}},
        "dtype": {"type": "string"},
        "spec": _SPEC,
        "used_as": {
            "type": "array",
            "items": _SPEC,
            "description": "layouts into which it is gathered for its uses",
        },
        "state": {
            "anyOf": [_SPEC, {"type": "null"}],
            "description": "layout of its optimizer state; null: the same as spec",
        },
    },
}
_TENSORS = {"type": "object", "additionalProperties": _TENSOR}
SCHEMA: JsonObject = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Shardings by name",
    "type": "object",
    "required": ["schema", "model", "frontend", "devices", "mesh", "parameters", "inputs", "activations"],
    "properties": {
        "schema": {"const": NAME},
        "model": {"type": "string"},
        "frontend": {
            "type": "string",
            "description": "the frontend whose names these are; empty if the plan does not say",
        },
        "devices": {"type": "integer", "minimum": 1},
        "mesh": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}},
        "parameters": _TENSORS,
        "inputs": _TENSORS,
        "activations": _TENSORS,
    },
}
"""The JSON Schema of the file."""


def to_json(plan: PlanData) -> JsonObject:
    """The plan's shardings as the object that ``load`` reads.

    Activations need the model's trace. A plan that was loaded from a file has none, so its ``activations`` are empty.
    """

    def tensor(t: TensorPlan, *, stored: bool) -> JsonObject:
        out: JsonObject = {"shape": t.shape, "dtype": t.dtype, "spec": t.storage}
        return out | ({"used_as": t.used_as, "state": t.state} if stored else {})

    out = {
        "schema": NAME,
        "model": plan.model,
        "frontend": plan.traced.frontend if plan.traced is not None else "",
        "devices": plan.devices,
        "mesh": plan.mesh.by_name,
        "parameters": {path: tensor(t, stored=True) for path, t in plan.parameters.items()},
        "inputs": {path: tensor(t, stored=False) for path, t in plan.inputs.items()},
        "activations": {
            name: {"shape": t.shape, "dtype": t.dtype, "spec": plan.define[t.name].layouts[-1]}
            for name, t in _named(plan)
            if t.name in plan.define and plan.define[t.name].layouts
        },
    }
    plain: JsonObject = json.loads(json.dumps(out))
    return plain


def _named(plan: PlanData) -> Iterator[tuple[str, Tensor]]:
    """(the framework's name NODE:OUTPUT, the tensor) for each activation. If an activation has several names, the first
    one is used.
    """
    results: Mapping[Place, tuple[str, ...]] = getattr(plan.traced, "results", None) or {}
    tensors = plan.traced.graph.tensors if plan.traced is not None else {}
    seen: set[str] = set()
    for where, made in results.items():
        if where.part is not None:
            continue  # a copy that pase made around a loop or a branch
        for k, name in enumerate(made):
            if name in tensors and name not in seen and tensors[name].role == "activation":
                seen.add(name)
                yield f"{where}:{k}", tensors[name]


def emit(plan: PlanData, path: Path, *, model: object) -> str:
    """Write the file. An interrupted write leaves no partial file."""
    from pase.files.atomic import write_atomically

    data = to_json(plan)
    write_atomically(path, json.dumps(data, indent=1) + "\n")
    split = sum(any(t["spec"]) for t in data["parameters"].values())
    known = (
        f"{len(data['activations'])} activations"
        if data["activations"]
        else (
            "no activations (a layout from a file has no names for them: call "
            "pase.backends.emit.shardings_json.emit on the plan "
            "that pase.compile returns)"
        )
    )
    return f"{path}: {len(data['parameters'])} parameters, {split} of them split, {len(data['inputs'])} inputs, {known}"


def load(path: str | Path) -> JsonObject:
    """Read such a file. Raises PaseError if it has another format, or if its contents are inconsistent."""
    import jsonschema

    data = read_json(path, "a file of names and shardings", 512 << 20)
    error = next(iter(jsonschema.Draft202012Validator(SCHEMA).iter_errors(data)), None)
    if error is not None:
        place = "/".join(map(str, error.absolute_path)) or "the top"
        raise PaseError(error.message[:300], where=f"{path} at {place}")
    sizes: dict[str, int] = data["mesh"]
    for kind in ("parameters", "inputs", "activations"):
        for name, t in data[kind].items():
            used = [a for axes in t["spec"] for a in axes]
            if len(t["spec"]) != len(t["shape"]) or set(used) - set(sizes) or len(set(used)) != len(used):
                raise PaseError(
                    f"spec {t['spec']} does not fit shape {t['shape']} and mesh {sizes}",
                    where=f"{path} at {kind}/{name}",
                )
    return data  # type: ignore[no-any-return]


def jax_shardings(data: JsonObject, devices: Sequence[JaxDevice] | None = None) -> dict[str, NamedSharding]:
    """name -> jax.sharding.NamedSharding, for every parameter, input and activation of a file that ``load`` read.

    devices: at least as many devices as the plan has, with the mesh's last axis innermost. By default, JAX's devices in
        the order of their links.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    wanted = int(np.prod(list(data["mesh"].values()), dtype=int))
    have = np.array(as_linked(jax.devices()) if devices is None else devices).reshape(-1)
    if len(have) < wanted:
        raise PaseError(
            f"the plan is for {wanted} devices, but there are {len(have)}",
            where="devices",
            fix=f"run with {wanted} devices, or compile for {len(have)}",
        )
    mesh = Mesh(have[:wanted].reshape(tuple(data["mesh"].values())), tuple(data["mesh"]))
    return {
        name: NamedSharding(mesh, PartitionSpec(*(tuple(axes) or None for axes in t["spec"])))
        for kind in ("parameters", "inputs", "activations")
        for name, t in data[kind].items()
    }


BACKENDS.add("names", Backend(writes="JSON: every parameter's and input's sharding, by name", emit=emit))
