"""Writes a plan that is equivalent to FSDP2 as a Python file that applies ``fully_shard``."""

from __future__ import annotations

import pprint
from pathlib import Path
from typing import TYPE_CHECKING

from pase.backends.emit.torch_styles import DataStyle, data_style, units_of
from pase.backends.registry import BACKENDS, Backend
from pase.errors import PaseError

if TYPE_CHECKING:
    from pase.plan.types import PlanData

__all__ = ["emit", "source"]

_FILE = '''"""{model} on {devices} devices by FSDP2, as pase planned it."""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

MESH = {mesh}
UNITS = {units}
SHARD_DIMS = {dims}
RESHARD_AFTER_FORWARD = {reshard}


def parallelize(module, device_type="cuda"):
    """Split the module's parameters, in place. Each rank then runs the module on its part of the batch; gradients are
    the means over the ranks."""
    mesh = init_device_mesh(device_type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    dims = {{id(module.get_parameter(path)): dim for path, dim in SHARD_DIMS.items()}}
    for unit in [*map(module.get_submodule, UNITS), module]:
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=RESHARD_AFTER_FORWARD,
            shard_placement_fn=lambda parameter: Shard(dims.get(id(parameter), 0)),
        )
    return module
'''


def source(plan: PlanData) -> tuple[str, DataStyle]:
    """The contents of the file, and the plan's style. Raises PaseError if the plan is not equivalent to FSDP2."""
    style = data_style(plan, "FSDP2")
    if not style.shard:
        raise PaseError(
            "this plan is not FSDP2: it shards neither parameters nor their state",
            where=f"the plan for '{plan.model}'",
            fix="use DistributedDataParallel",
        )
    if plan.accumulate > 1 or plan.remat:
        raise PaseError(
            "FSDP2 cannot express its micro-batches or recomputed blocks",
            where=f"the plan for '{plan.model}'",
            fix="run it with plan.torch",
        )
    order = [a for a in plan.mesh.names if a in (*style.replicate, *style.shard)]
    if order != [*style.replicate, *style.shard]:
        raise PaseError(
            "this plan is not FSDP2: it replicates parameters within the groups over which it shards them, but FSDP2 "
            "shards them within replicas",
            where=f"the plan for '{plan.model}'",
            fix="run it with plan.torch",
        )
    mesh = {} if not style.replicate else {"replicate": style.ways(plan, style.replicate)}
    mesh["shard"] = style.ways(plan, style.shard)
    text = _FILE.format(
        model=plan.model,
        devices=plan.devices,
        mesh=mesh,
        units=pprint.pformat(list(units_of(plan)), width=100),
        dims=pprint.pformat({path: dim for path, dim in style.dims.items() if dim}, width=100),
        reshard=style.gathered,
    )
    return text, style


def emit(plan: PlanData, path: Path, *, model: object) -> str:
    """Write the file. An interrupted write leaves no partial file."""
    from pase.files.atomic import write_atomically

    text, style = source(plan)
    write_atomically(path, text)
    rest = (
        f"; {len(style.whole)} small parameters that the plan keeps whole are sharded, too"
        if style.whole
        else ""
    )
    return f"{path}: parallelize(module) by fully_shard, for a PyTorch program{rest}"


BACKENDS.add("fsdp2", Backend(writes="FSDP2 (fully_shard) in Python, if it can express the plan", emit=emit))
