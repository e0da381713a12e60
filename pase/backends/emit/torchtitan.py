"""Writes a plan that is equivalent to torchtitan's data and tensor parallelism as sections of its TOML file:
``[parallelism]``, the batch, and whether layers are recomputed.

torchtitan's tensor parallelism splits positions between layers (sequence parallelism), and the vocabulary in the loss.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pase.backends.emit.torch_styles import data_style, tensor_style
from pase.backends.emit.tp_plan import tensor_axis
from pase.backends.registry import BACKENDS, Backend, NotExpressed
from pase.plan.targets import TARGETS, PlanTarget, TargetAxis, TargetForm, limited_to

if TYPE_CHECKING:
    from pase.plan.types import PlanData

__all__ = ["emit", "to_toml"]

_FILE = """# {model} on {devices} devices, as pase planned it.

[parallelism]
data_parallel_replicate_degree = {replicate}
data_parallel_shard_degree = {shard}
fsdp_reshard_after_forward = "{reshard}"
tensor_parallel_degree = {tensor}
context_parallel_degree = 1
pipeline_parallel_degree = 1

[training]
local_batch_size = {local}
global_batch_size = {examples}

[activation_checkpoint]
mode = "{checkpoint}"
"""


def to_toml(plan: PlanData) -> str:
    """The TOML text. Raises PaseError if the plan is not equivalent to this parallelism."""
    target = "torchtitan's"
    batch = {a for t in plan.inputs.values() for axes in t.storage[:1] for a in axes}
    pure = all(n == 1 or a in batch for a, n in zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    axis = () if pure else (tensor_axis(plan, target),)
    limited = limited_to(plan, "torchtitan")
    style = data_style(plan, target, other_axes=axis, limited=limited)
    for a in axis:
        if not tensor_style(plan, target, a, sequence=True):
            raise NotExpressed(
                f"this plan is not {target}: it splits no layer over {a}",
                where=f"the plan for '{plan.model}'",
                fix="run it with plan.torch",
            )
    sizes = plan.mesh.by_name
    ways = style.ways(plan, style.replicate) * style.ways(plan, style.shard)
    examples = None if plan.work is None else plan.work.examples
    if examples is None:
        raise NotExpressed("its model has no batch", where=f"the plan for '{plan.model}'")
    return _FILE.format(
        model=plan.model,
        devices=plan.devices,
        replicate=style.ways(plan, style.replicate),
        shard=style.ways(plan, style.shard),
        reshard="always" if style.gathered else "never",
        tensor=sizes[axis[0]] if axis else 1,
        local=examples // (ways * plan.accumulate),
        examples=examples,
        checkpoint="full" if plan.remat else "none",
    )


def emit(plan: PlanData, path: Path, *, model: object) -> str:
    """Write the TOML. An interrupted write leaves no partial file."""
    from pase.files.atomic import write_atomically

    write_atomically(path, to_toml(plan))
    return f"{path}: [parallelism], [training] and [activation_checkpoint] of a torchtitan TOML"


_REPLICATE = TargetAxis(name="replicate", use="replicate")
_TENSOR = TargetAxis(name="tensor", use="tensor_sequence")
TARGETS.add(
    "torchtitan",
    PlanTarget(
        program="torchtitan",
        says="HSDP with tensor and sequence parallelism",
        micro_batches=True,
        recomputes=True,
        forms=(
            TargetForm(name="parameters", axes=(_REPLICATE, TargetAxis(name="shard", use="shard"), _TENSOR)),
            TargetForm(
                name="state",
                axes=(_REPLICATE, TargetAxis(name="shard", use="shard_state", at_least=2), _TENSOR),
            ),
        ),
    ),
)
BACKENDS.add(
    "torchtitan", Backend(writes="torchtitan's [parallelism], if it can express the plan", emit=emit)
)
