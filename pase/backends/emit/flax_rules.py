"""Writes a plan as rules from Flax's logical axes to mesh axes.

A Flax model names the dims of its parameters (``nn.with_logical_partitioning``), and rules say which mesh axes split a
name. So one rule holds for all parameters with that name. A plan that splits a name in two ways is refused.
"""

from __future__ import annotations

import pprint
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pase.backends.registry import BACKENDS, Backend, NotExpressed
from pase.errors import PaseError
from pase.frontends.jax.frontend import TracedJax
from pase.plan.targets import TARGETS, PlanTarget, TargetAxis, TargetForm

if TYPE_CHECKING:
    from pase.plan.types import PlanData
    from pase.tables.axis_layout import Placement

__all__ = ["emit", "logical_names", "rules", "source"]

MeshAxes = tuple[str, ...]

_FILE = '''"""{model} on {devices} devices, as pase planned it: a mesh, and rules for Flax's logical axes."""

import flax.linen as nn
import jax

MESH = {mesh}
RULES = {rules}
# The mesh axes that split the first dim of the batch, under the names that models use for it in
# nn.with_logical_constraint. Change the names to those of your model.
RULES += [("batch", BATCH := {batch}), ("activation_batch", BATCH)]


def mesh():
    """The mesh, over all devices in the order of their links."""
    kinds = (jax.sharding.AxisType.Auto,) * len(MESH)
    return jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=kinds)


def shardings(variables):
    """The sharding of every variable. variables: what jax.eval_shape(model.init, …) returns."""
    return nn.logical_to_mesh_sharding(nn.get_partition_spec(variables), mesh(), RULES)
'''


def logical_names(traced: TracedJax) -> dict[str, tuple[str | None, ...]]:
    """Path of a parameter -> the logical name of each of its dims, for those to which the model gives names."""
    import jax
    from flax.core.meta import Partitioned
    from flax.linen.spmd import LogicallyPartitioned

    paths = [*traced.param_paths, *traced.input_paths]
    leaves = traced.in_tree.num_leaves
    arguments: Any = jax.tree.unflatten(traced.in_tree, [*paths, *[None] * (leaves - len(paths))])
    boxes = jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, (LogicallyPartitioned, Partitioned)))
    return {b.value: tuple(b.names) for b in boxes if isinstance(b, (LogicallyPartitioned, Partitioned))}


def rules(plan: PlanData) -> dict[str, MeshAxes]:
    """Logical name -> the mesh axes that split it. Raises NotExpressed if two parameters disagree."""
    traced = plan.traced_as(
        TracedJax, "fn, params, batch", "it has no Flax names; write its layouts with emit --to names"
    )
    names = logical_names(traced)
    if not names:
        raise PaseError(
            "its parameters have no logical names",
            where=f"the plan for '{plan.model}'",
            fix="name their dims with nn.with_logical_partitioning, and pass the variables as model.init returns them "
            "(not unboxed), or write the layouts with emit --to names",
        )
    found: dict[str, tuple[MeshAxes, str]] = {}
    for path, t in plan.parameters.items():
        _check_state(plan, path, t.storage, t.state)
        if path not in names:
            _check_unnamed(plan, path, t.storage)
            continue
        for name, axes in _named(names[path], t.storage):
            before, first = found.setdefault(name, (axes, path))
            if before != axes:
                raise NotExpressed(
                    f"'{name}' is split over {_text(before)} in '{first}', but over {_text(axes)} in '{path}'",
                    where=f"the plan for '{plan.model}'",
                )
    return {name: axes for name, (axes, _) in found.items()}


def _named(names: tuple[str | None, ...], storage: Placement) -> Iterator[tuple[str, MeshAxes]]:
    for name, axes in zip(names, storage, strict=True):
        if name is not None:
            yield name, tuple(axes)


def _check_state(plan: PlanData, path: str, storage: Placement, state: Placement | None) -> None:
    if state is not None and state != storage:
        raise NotExpressed(
            f"rules lay out optimizer state like its parameter, but that of '{path}' is split further",
            where=f"the plan for '{plan.model}'",
        )


def _check_unnamed(plan: PlanData, path: str, storage: Placement) -> None:
    if any(storage):
        raise NotExpressed(
            f"it splits '{path}', whose dims have no logical names",
            where=f"the plan for '{plan.model}'",
            fix="name its dims with nn.with_logical_partitioning",
        )


def _text(axes: MeshAxes) -> str:
    return " and ".join(axes) or "no axis"


def source(plan: PlanData) -> str:
    """The contents of the file. Raises PaseError if the plan has no such rules."""
    found: Mapping[str, MeshAxes] = rules(plan)
    batch = next((tuple(t.storage[0]) for t in plan.inputs.values() if t.storage and t.storage[0]), ())
    return _FILE.format(
        model=plan.model,
        devices=plan.devices,
        mesh=plan.mesh.by_name,
        rules=pprint.pformat([(name, axes or None) for name, axes in found.items()], width=100),
        batch=batch or None,
    )


def emit(plan: PlanData, path: Path, *, model: object) -> str:
    """Write the file. An interrupted write leaves no partial file."""
    from pase.files.atomic import write_atomically

    text = source(plan)
    write_atomically(path, text)
    return f"{path}: a mesh {plan.mesh.by_name} and rules for {len(rules(plan))} logical axes of Flax"


TARGETS.add(
    "flax-rules",
    PlanTarget(
        program="rules for Flax's logical axes",
        says="data parallelism, FSDP over the model dim, and tensor parallelism",
        forms=(
            TargetForm(
                name="rules",
                axes=(
                    TargetAxis(name="data", use="replicate"),
                    TargetAxis(name="fsdp", use="shard", model_dim=True),
                    TargetAxis(name="tensor", use="tensor"),
                ),
            ),
        ),
    ),
)
BACKENDS.add(
    "flax-rules",
    Backend(
        writes="a mesh and rules for Flax's logical axes, if they can express the plan",
        emit=emit,
        needs_model=True,
    ),
)
