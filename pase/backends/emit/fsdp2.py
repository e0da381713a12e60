"""Writes a plan that is equivalent to FSDP2 as a Python file that applies ``fully_shard``."""

from __future__ import annotations

import pprint
from pathlib import Path
from typing import TYPE_CHECKING

from pase.backends.emit.torch_styles import (
    DataStyle,
    data_style,
    gathers_per_run,
    is_small,
    recomputed_units,
    runs_of_units,
    units_of,
)
from pase.backends.registry import BACKENDS, Backend, NotExpressed
from pase.plan.targets import TARGETS, PlanTarget, TargetAxis, TargetForm, limited_to

if TYPE_CHECKING:
    from pase.plan.types import PlanData

__all__ = ["emit", "source"]

_FILE = '''"""{model} on {devices} devices by FSDP2, as pase planned it."""

from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.ops import aten
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import create_selective_checkpoint_contexts

MESH = {mesh}
UNITS = {units}
SHARD_DIMS = {dims}
# Whether a unit ("": all that is in no other) is gathered again for backward, or kept whole from forward to backward.
RESHARD_AFTER_FORWARD = {reshard}
# Units that stay whole until the last micro-batch.
WHOLE_BETWEEN_MICRO_BATCHES = {between}
# What backward runs again: "all" of a unit, or its "light" work: not products with weights, nor fused attention.
RECOMPUTE = {recompute}
MICRO_BATCHES = {micro}


def parallelize(module, device_type="cuda"):
    """Split the module's parameters, in place. Each rank then runs the module on its part of the batch; gradients are
    the means over the ranks."""
    mesh = init_device_mesh(device_type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    dims = {{id(module.get_parameter(path)): dim for path, dim in SHARD_DIMS.items()}}
    again = {{id(module.get_submodule(path)): what for path, what in RECOMPUTE.items()}}
    apply_activation_checkpointing(
        module,
        checkpoint_wrapper_fn=lambda unit: checkpoint_wrapper(
            unit, **({{"context_fn": keep_products}} if again[id(unit)] == "light" else {{}})
        ),
        check_fn=lambda part: id(part) in again,
    )
    for path in [*UNITS, ""]:
        fully_shard(
            module.get_submodule(path),
            mesh=mesh,
            reshard_after_forward=RESHARD_AFTER_FORWARD[path],
            shard_placement_fn=lambda parameter: Shard(dims.get(id(parameter), 0)),
        )
    return module


def keep_products():
    """What a unit keeps if only its light work runs again: results of products with weights and of fused attention."""
    kernels = ["flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"]
    names = ["mm", "addmm", "convolution", "_grouped_mm", *(f"_scaled_dot_product_{{k}}" for k in kernels)]
    return create_selective_checkpoint_contexts([getattr(aten, n).default for n in names if hasattr(aten, n)])


def backward(loss, module, *batch):
    """Run the step's forward and backward passes on this rank's part of the batch (tensors, or containers of them).
    loss(module, *batch): a mean over its examples. Returns the mean loss; gradients are added to those that are
    there."""
    leaves, tree = tree_flatten(batch)
    total = 0.0
    for i, part in enumerate(zip(*map(micro_batches, leaves), strict=True)):
        for path in WHOLE_BETWEEN_MICRO_BATCHES:
            module.get_submodule(path).set_reshard_after_backward(i == MICRO_BATCHES - 1, recurse=False)
        value = loss(module, *tree_unflatten(part, tree)) / MICRO_BATCHES
        value.backward()
        total += value.detach()
    return total


def micro_batches(x):
    """Equal parts of a tensor's examples; anything else whole, for each micro-batch."""
    if not isinstance(x, Tensor) or not x.ndim:
        return [x] * MICRO_BATCHES
    if len(x) % MICRO_BATCHES:
        raise ValueError(f"this rank's {{len(x)}} examples do not divide into {{MICRO_BATCHES}} micro-batches")
    return x.chunk(MICRO_BATCHES)
'''


def source(plan: PlanData) -> tuple[str, DataStyle]:
    """The contents of the file, and the plan's style. Raises PaseError if the plan is not equivalent to FSDP2."""
    style = data_style(plan, "FSDP2", limited=limited_to(plan, "fsdp2"), mixed=True)
    if not style.shard:
        raise NotExpressed(
            "this plan is not FSDP2: it shards neither parameters nor their state",
            where=f"the plan for '{plan.model}'",
            fix="use DistributedDataParallel",
        )
    order = [a for a in plan.mesh.names if a in (*style.replicate, *style.shard)]
    if order != [*style.replicate, *style.shard]:
        raise NotExpressed(
            "this plan is not FSDP2: it replicates parameters within the groups over which it shards them, but FSDP2 "
            "shards them within replicas",
            where=f"the plan for '{plan.model}'",
            fix="run it with plan.torch",
        )
    units, again, gathers = units_of(plan), recomputed_units(plan, "FSDP2"), _gathers_of_units(plan)
    mesh = {} if not style.replicate else {"replicate": style.ways(plan, style.replicate)}
    mesh["shard"] = style.ways(plan, style.shard)
    text = _FILE.format(
        model=plan.model,
        devices=plan.devices,
        mesh=mesh,
        units=pprint.pformat(list(units), width=100),
        dims=pprint.pformat({path: dim for path, dim in style.dims.items() if dim}, width=100),
        reshard=pprint.pformat({u: n > 1 for u, n in gathers.items()}, width=100),
        between=pprint.pformat([u for u, n in gathers.items() if n < 1], width=100),
        recompute=pprint.pformat(again, width=100),
        micro=plan.accumulate,
    )
    return text, style


def _owners(plan: PlanData) -> dict[str, str]:
    """Path of a parameter -> its unit; "" if it is in none."""
    units = units_of(plan)
    return {path: next((u for u in units if path.startswith(f"{u}.")), "") for path in plan.parameters}


def _gathers_of_units(plan: PlanData) -> dict[str, float]:
    """Unit -> how often it is gathered while it runs once: as often as any of its parameters. A unit of which the plan
    gathers nothing is as the others."""
    owner, out = _owners(plan), dict[str, float]()
    for path, n in gathers_per_run(plan).items():
        out[owner[path]] = max(out.get(owner[path], 0.0), n)
    return {u: out.get(u, max(out.values(), default=1.0)) for u in (*units_of(plan), "")}


def emit(plan: PlanData, path: Path, *, model: object) -> str:
    """Write the file. An interrupted write leaves no partial file."""
    from pase.files.atomic import write_atomically

    text, style = source(plan)
    write_atomically(path, text)
    listed, units, owner = gathers_per_run(plan), _gathers_of_units(plan), _owners(plan)
    more = [p for p in style.dims if listed.get(p, 0.0) < units[owner[p]] and not is_small(plan, [p])]
    shared = {u: n for u, n in runs_of_units(plan).items() if n > 1 and units[u] > 1}
    notes = [
        *(
            f"{u} runs {n} times in forward: FSDP2 gathers it for each, and again in backward, the plan once in either"
            for u, n in shared.items()
        ),
        f"{len(style.whole)} small parameters that the plan keeps whole are sharded, too"
        if style.whole
        else "",
        f"gathered more often than in the plan: {', '.join(more[:3])}"
        + (f" and {len(more) - 3} more" if len(more) > 3 else "")
        if more
        else "",
    ]
    return "; ".join(
        [f"{path}: parallelize(module) by fully_shard, for a PyTorch program", *filter(None, notes)]
    )


_REPLICATE = TargetAxis(name="replicate", use="replicate")
TARGETS.add(
    "fsdp2",
    PlanTarget(
        program="FSDP2",
        says="the batch over all devices, and parameters or their state over all of them or within groups",
        micro_batches=True,
        recomputes=True,
        recomputes_some=True,
        regathers=True,
        forms=(
            TargetForm(
                name="parameters", axes=(_REPLICATE, TargetAxis(name="shard", use="shard", at_least=2))
            ),
            TargetForm(
                name="state", axes=(_REPLICATE, TargetAxis(name="shard", use="shard_state", at_least=2))
            ),
        ),
    ),
)
BACKENDS.add("fsdp2", Backend(writes="FSDP2 (fully_shard) in Python, if it can express the plan", emit=emit))
