"""Writes a plan that is equivalent to tensor parallelism as a ``tp_plan`` of transformers: {pattern of modules:
style}."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pase.backends.emit.torch_styles import TensorStyle, batch_axes, data_style, tensor_style
from pase.backends.registry import BACKENDS, Backend, NotExpressed
from pase.plan.targets import TARGETS, PlanTarget, TargetAxis, TargetForm, limited_to

if TYPE_CHECKING:
    from pase.plan.types import PlanData

__all__ = ["emit", "tensor_axis", "to_json"]


def tensor_axis(plan: PlanData, target: str) -> str:
    """The only axis that does not split the batch. Raises PaseError if there is none, or if there are several."""
    batch = batch_axes(plan)
    others = [a for a, n in zip(plan.mesh.names, plan.mesh.sizes, strict=True) if n > 1 and a not in batch]
    if len(others) != 1:
        raise NotExpressed(
            f"this plan is not {target}: {len(others)} axes of its mesh {'×'.join(map(str, plan.mesh.sizes))} do not "
            f"split the batch, but tensor parallelism has only one such axis",
            where=f"the plan for '{plan.model}'",
            fix="run it with plan.torch, or write its layouts with emit --to names",
        )
    return others[0]


def to_json(plan: PlanData) -> dict[str, TensorStyle]:
    """{"layers.*.self_attn.q_proj": "colwise", …}. Raises PaseError if the plan is not equivalent to tensor
    parallelism.
    """
    target = "a tp_plan"
    axis = tensor_axis(plan, target)
    limited = limited_to(plan, "tp-plan")
    data = data_style(plan, target, other_axes=(axis,), limited=limited)
    if data.shard:
        raise NotExpressed(
            f"a tp_plan cannot express it: parameters or their state are also split over {', '.join(data.shard)}",
            where=f"the plan for '{plan.model}'",
            fix="run it with plan.torch, or try emit --to torchtitan",
        )
    out: dict[str, TensorStyle] = {}
    for path, style in tensor_style(plan, target, axis, sequence=False).items():
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
        if out.setdefault(pattern, style) != style:
            raise NotExpressed(
                f"this plan is not a tp_plan: '{path}' is {style}, but others of '{pattern}' are {out[pattern]}",
                where=f"the plan for '{plan.model}'",
                fix="run it with plan.torch",
            )
    if not out:
        raise NotExpressed(
            f"this plan is not a tp_plan: it splits no layer over {axis}",
            where=f"the plan for '{plan.model}'",
            fix="run it with plan.torch",
        )
    return out


def emit(plan: PlanData, path: Path, *, model: object) -> str:
    """Write the tp_plan as JSON. An interrupted write leaves no partial file."""
    from pase.files.atomic import write_atomically

    data = to_json(plan)
    write_atomically(path, json.dumps(data, indent=1) + "\n")
    ways = plan.mesh.by_name[tensor_axis(plan, "a tp_plan")]
    copies = "" if ways == plan.devices else f" for each of {plan.devices // ways} parts of the batch"
    return f"{path}: tp_plan of {len(data)} kinds of layers over {ways} devices{copies}, for from_pretrained(tp_plan=…)"


TARGETS.add(
    "tp-plan",
    PlanTarget(
        program="a tp_plan",
        says="tensor parallelism in each part of the batch, with whole parameters beyond that",
        forms=(
            TargetForm(
                name="tensor",
                axes=(
                    TargetAxis(name="data", use="replicate"),
                    TargetAxis(name="model", use="tensor", at_least=2, whole_logits=True),
                ),
            ),
        ),
    ),
)
BACKENDS.add("tp-plan", Backend(writes="a tp_plan of transformers, if it can express the plan", emit=emit))
