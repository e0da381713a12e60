"""Writes a plan that is equivalent to torchtitan's data and tensor parallelism: its degrees, the batch, and whether
layers are recomputed.

torchtitan 0.3 takes options after ``--module`` and ``--config``, and reads no file (``torchtitan/config/manager.py``).
Up to 0.2 it reads a TOML file, which is written if the name ends in ``.toml``.

torchtitan's tensor parallelism splits positions between layers (sequence parallelism), and the vocabulary in the loss.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from pase.backends.emit.torch_styles import batch_axes, data_style, gathers_per_run, tensor_style
from pase.backends.emit.tp_plan import tensor_axis
from pase.backends.registry import BACKENDS, Backend, NotExpressed
from pase.plan.targets import TARGETS, PlanTarget, TargetAxis, TargetForm, limited_to

if TYPE_CHECKING:
    from pase.plan.types import PlanData

__all__ = ["emit", "to_options", "to_toml"]

_BySection = dict[str, dict[str, int | str]]


def to_toml(plan: PlanData) -> str:
    """The TOML text, for torchtitan up to 0.2. Raises PaseError if the plan is not equivalent to this parallelism."""
    lines = [f"# {plan.model} on {plan.devices} devices, as pase planned it."]
    for section, values in _sections(plan).items():
        lines += ["", f"[{section}]", *(f"{k} = {json.dumps(v)}" for k, v in values.items())]
    return "\n".join(lines) + "\n"


def to_options(plan: PlanData) -> str:
    """The options of torchtitan 0.3, one a line. Raises PaseError if the plan is not equivalent to this parallelism."""
    found = _sections(plan)
    checkpoint = found.pop("activation_checkpoint")["mode"]
    options = [f"--{section}.{k}={v}" for section, values in found.items() for k, v in values.items()]
    return "\n".join([*options, f"activation-checkpoint:{checkpoint}"]) + "\n"  # the subcommand comes last


def _sections(plan: PlanData) -> _BySection:
    """torchtitan's settings by section."""
    target = "torchtitan's"
    batch = batch_axes(plan)
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
    return {
        "parallelism": {
            "data_parallel_replicate_degree": style.ways(plan, style.replicate),
            "data_parallel_shard_degree": style.ways(plan, style.shard),
            "fsdp_reshard_after_forward": "always"
            if max(gathers_per_run(plan).values(), default=0) > 1
            else "never",
            "tensor_parallel_degree": sizes[axis[0]] if axis else 1,
            "context_parallel_degree": 1,
            "pipeline_parallel_degree": 1,
        },
        "training": {
            "local_batch_size": examples // (ways * plan.accumulate),
            "global_batch_size": examples,
        },
        "activation_checkpoint": {"mode": "full" if plan.remat else "none"},
    }


def emit(plan: PlanData, path: Path, *, model: object) -> str:
    """Write the options, or TOML if the name ends in ``.toml``. An interrupted write leaves no partial file."""
    from pase.files.atomic import write_atomically

    if path.suffix == ".toml":
        write_atomically(path, to_toml(plan))
        return (
            f"{path}: [parallelism], [training] and [activation_checkpoint] of a TOML file, which torchtitan reads "
            f"up to 0.2; for 0.3, write to a name that does not end in .toml"
        )
    write_atomically(path, to_options(plan))
    return f"{path}: options of torchtitan 0.3; torchrun … -m torchtitan.train --module … --config … $(cat {path})"


_REPLICATE = TargetAxis(name="replicate", use="replicate")
_TENSOR = TargetAxis(name="tensor", use="tensor_sequence")
TARGETS.add(
    "torchtitan",
    PlanTarget(
        program="torchtitan",
        says="HSDP with tensor and sequence parallelism",
        micro_batches=True,
        recomputes=True,
        regathers=True,
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
    "torchtitan",
    Backend(writes="torchtitan's options (.toml: its file), if it can express the plan", emit=emit),
)
