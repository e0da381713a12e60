"""Writes a plan as the degrees of parallelism of a MaxText configuration.

MaxText splits its mesh in two: ``ici_*`` axes within a slice (on GPUs, a node), and ``dcn_*`` axes across slices. Its
own rules from logical axes to mesh axes then give the layouts: ``embed`` over ``fsdp``; heads, hidden units and
vocabulary, and positions between layers, over ``tensor_sequence``; scales of norms are whole on every device
(src/maxtext/configs/base.yml of MaxText 0.2.5, October 2026).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from pase.backends.registry import BACKENDS, Backend, NotExpressed
from pase.plan.targets import TARGETS, PlanTarget, TargetAxis, TargetForm, limited_to

if TYPE_CHECKING:
    from pase.plan.types import PlanData

__all__ = ["emit", "to_yaml"]

_AXES = ("data", "fsdp", "tensor_sequence")

_FILE = """# {model} on {devices} devices of {machine}, as pase planned it.
# Start MaxText with this file, or add its lines to the file of your model.
base_config: "base.yml"

{degrees}
per_device_batch_size: {batch}
gradient_accumulation_steps: {micro}
# {remat_why}
remat_policy: "{remat}"
"""


def to_yaml(plan: PlanData) -> str:
    """The YAML text. Raises NotExpressed if the plan was not made for MaxText."""
    if not limited_to(plan, "maxtext"):
        raise NotExpressed(
            "MaxText's rules decide the layout of every array, and this plan was not searched under them",
            where=f"the plan for '{plan.model}'",
            fix="write its layouts with emit --to names",
        )
    within, across = _by_slice(plan)
    degrees = [f"ici_{a}_parallelism: {within.get(a, 1)}" for a in _AXES]
    degrees += [f"dcn_{a}_parallelism: {across.get(a, 1)}" for a in _AXES]
    examples = None if plan.work is None else plan.work.examples
    if examples is None:
        raise NotExpressed("its model has no batch", where=f"the plan for '{plan.model}'")
    return _FILE.format(
        model=plan.model,
        devices=plan.devices,
        machine=plan.machine,
        degrees="\n".join(degrees),
        batch=examples / (plan.devices * plan.accumulate),
        micro=plan.accumulate,
        remat="full" if plan.remat else "minimal_with_context",
        remat_why="Backward recomputes each layer."
        if plan.remat
        else "The plan recomputes nothing; this policy recomputes the least.",
    )


def _by_slice(plan: PlanData) -> tuple[dict[str, int], dict[str, int]]:
    """({axis: devices within a slice}, {axis: slices}). The machine's last link level joins slices."""
    from pase.machine import axis_levels
    from pase.machine import load as load_machine

    machine = load_machine(plan.machine)
    last = len(machine.levels) - 1
    within, across = {}, {}
    for name, ways in zip(plan.mesh.names, axis_levels(plan.mesh, machine), strict=True):
        across[name] = ways[last] if last else 1
        within[name] = math.prod(ways) // across[name]
    return within, across


def emit(plan: PlanData, path: Path, *, model: object) -> str:
    """Write the YAML. An interrupted write leaves no partial file."""
    from pase.files.atomic import write_atomically

    write_atomically(path, to_yaml(plan))
    return f"{path}: degrees of parallelism for MaxText"


TARGETS.add(
    "maxtext",
    PlanTarget(
        program="MaxText",
        says="data parallelism, FSDP over the model dim, and tensor with sequence parallelism",
        forms=(
            TargetForm(
                name="rules",
                axes=(
                    TargetAxis(name="data", use="replicate"),
                    TargetAxis(name="fsdp", use="shard", model_dim=True, weights_alone=True),
                    TargetAxis(name="tensor_sequence", use="tensor_sequence"),
                ),
            ),
        ),
        micro_batches=True,
        recomputes=True,
    ),
)
BACKENDS.add("maxtext", Backend(writes="a MaxText configuration: its degrees of parallelism", emit=emit))
