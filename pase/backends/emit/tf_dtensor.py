"""Writes a plan as TensorFlow DTensor layouts, by variable name.

DTensor splits a dim of a tensor along one dim of its mesh. A plan may split a dim along several axes of its mesh. If
these axes are used together in every layout of the plan, they become one dim of DTensor's mesh. Otherwise DTensor
cannot express the plan, and that is an error. ``target="dtensor"`` of ``pase.compile`` searches only plans that DTensor
can express.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pase.backends.registry import BACKENDS, Backend, NotExpressed
from pase.files.json_values import JsonObject
from pase.plan.targets import TARGETS, PlanTarget, TargetForm
from pase.pytree import Tree

if TYPE_CHECKING:
    from pase.plan.types import PlanData
    from pase.tables.axis_layout import Placement

__all__ = ["emit", "layouts", "read_layouts", "to_json"]

NAME = "pase.dtensor/1"
UNSHARDED = "unsharded"
"""DTensor's term for a dim that is not split."""


def to_json(plan: PlanData) -> JsonObject:
    """{"schema", "model", "mesh": {dim: size}, "variables": {path: [mesh dim or "unsharded"]}, "state": {…},
    "reads": {…}, "inputs": {…}}.

    state: the variables whose gradient and optimizer state are split further than the variables themselves.
    reads: the variables that are read in another layout than they are stored in.

    Raises PaseError if DTensor has no layout for a tensor.
    """
    stored = {path: t.storage for path, t in plan.parameters.items()}
    arrives = {path: t.storage for path, t in plan.inputs.items()}
    state = {path: t.state for path, t in plan.parameters.items() if t.state is not None}
    joined = _joined(plan, [*stored.items(), *state.items(), *arrives.items()])
    sizes = plan.mesh.by_name
    mesh: dict[str, int] = {}
    for axis in sizes:
        name = joined[axis]
        mesh[name] = mesh.get(name, 1) * sizes[axis]

    def layout(placement: Placement) -> list[str]:
        return [joined[axes[0]] if axes else UNSHARDED for axes in placement]

    def read(path: str, used: Sequence[Placement]) -> list[str]:
        """The layout in which ops read it, if there is only one on this mesh; else unsharded, which is always valid."""
        rank = len(stored[path])
        (one, *more) = used
        if more or len(one) != rank:
            return [UNSHARDED] * rank
        return [name if (name := "_".join(axes)) in mesh else UNSHARDED for axes in one]

    return {
        "schema": NAME,
        "model": plan.model,
        "mesh": mesh,
        "variables": {path: layout(p) for path, p in stored.items()},
        "state": {path: layout(p) for path, p in state.items()},
        "reads": {path: read(path, t.used_as) for path, t in plan.parameters.items() if t.used_as},
        "inputs": {path: layout(p) for path, p in arrives.items()},
    }


def _other_step(plan: PlanData, mesh: Mapping[str, int]) -> bool:
    """Whether the plan splits a layer along several axes, or along one that this mesh only has merged with others."""
    return any(axes and "_".join(axes) not in mesh for n in plan.nodes for axes in n.split.values())


def _joined(plan: PlanData, tensors: Sequence[tuple[str, Placement]]) -> dict[str, str]:
    """Mesh axis -> the dim of DTensor's mesh that contains it."""
    names = list(plan.mesh.names)
    groups = {axes for _, placement in tensors for axes in placement if axes}
    owner: dict[str, tuple[str, ...]] = {}
    for axes in sorted(groups, key=lambda g: (-len(g), g)):
        at = [names.index(a) for a in axes]
        for a in axes:
            if owner.setdefault(a, axes) != axes:
                where = next(path for path, p in tensors if axes in p or owner[a] in p)
                wide = " and ".join(axes if len(axes) > len(owner[a]) else owner[a])
                raise NotExpressed(
                    f"DTensor splits a tensor's dim along one mesh dim, but this plan splits one along {wide}, which "
                    f"it also uses separately",
                    where=f"tensor '{where}'",
                    fix="write its layouts with emit --to names",
                )
        if at != list(range(at[0], at[0] + len(at))):
            raise NotExpressed(
                f"DTensor splits a tensor's dim along one mesh dim, but this plan splits one along {', '.join(axes)}, "
                f"which are not adjacent in its mesh {'×'.join(map(str, plan.mesh.sizes))}",
                where=f"the plan for '{plan.model}'",
                fix="write its layouts with emit --to names",
            )
    return {a: "_".join(owner.get(a, (a,))) for a in names}


def emit(plan: PlanData, path: Path, *, model: object) -> str:
    """Write the layouts. An interrupted write leaves no partial file."""
    from pase.files.atomic import write_atomically

    data = to_json(plan)
    write_atomically(path, json.dumps(data, indent=1) + "\n")
    said = f"{path}: DTensor layouts of {len(data['variables'])} variables on mesh {data['mesh']}"
    if _other_step(plan, data["mesh"]):
        said += (
            "; it stores these as planned, but splits some layers in ways that DTensor cannot, so its step will differ "
            "from the predicted one: compile --for dtensor to search only what DTensor can express"
        )
    return said


def layouts(data: JsonObject, devices: list[str] | None = None) -> tuple[Tree, dict[str, Tree]]:
    """(tf.experimental.dtensor.Mesh, {path: Layout}) for the variables and inputs in the result of ``to_json``.

    devices: the names of as many DTensor devices as the plan has. By default, DTensor chooses logical devices.
    """
    from tensorflow.experimental import dtensor

    dims = [(name, int(size)) for name, size in data["mesh"].items()]
    if devices is None:
        mesh = dtensor.create_mesh(dims)
    else:
        mesh = dtensor.create_mesh(dims, devices=devices)
    out = {
        path: dtensor.Layout(specs, mesh)
        for kind in ("variables", "inputs")
        for path, specs in data[kind].items()
    }
    return mesh, out


def read_layouts(data: JsonObject, mesh: Tree) -> dict[str, Tree]:
    """{path: Layout} of the variables that a step must reshard before it reads them:
    ``dtensor.relayout(variable, layout)``, whose derivative reshards the gradient back. Without it, DTensor refuses a
    product if the stored layouts of its operands split the summed dim along different mesh dims.

    data: the result of ``to_json``. mesh: the mesh from ``layouts``.
    """
    from tensorflow.experimental import dtensor

    return {path: dtensor.Layout(specs, mesh) for path, specs in data.get("reads", {}).items()}


TARGETS.add(
    "dtensor",
    PlanTarget(
        program="DTensor",
        says="each dim of a tensor along one mesh dim",
        forms=(TargetForm(one_axis_a_dim=True),),
    ),
)
BACKENDS.add("dtensor", Backend(writes="TensorFlow DTensor layouts, by variable name", emit=emit))
