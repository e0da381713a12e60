"""Writes a plan that is plain data parallelism as a Python file that applies ``DistributedDataParallel``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pase.backends.emit.torch_styles import data_style
from pase.backends.registry import BACKENDS, Backend, NotExpressed
from pase.plan.targets import TARGETS, PlanTarget, TargetAxis, TargetForm, limited_to

if TYPE_CHECKING:
    from pase.plan.types import PlanData

__all__ = ["emit", "source"]

_FILE = '''"""{model} on {devices} devices by DistributedDataParallel, as pase planned it."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANKS = {devices}


def parallelize(module):
    """Replicate the module. Each rank then runs it on its part of the batch; gradients are the means over the ranks.
    Call torch.distributed.init_process_group first."""
    if dist.get_world_size() != RANKS:
        raise ValueError(f"the plan is for {{RANKS}} ranks, but there are {{dist.get_world_size()}}")
    return DistributedDataParallel(module)
'''


def source(plan: PlanData) -> str:
    """The contents of the file. Raises NotExpressed if the plan is not plain data parallelism."""
    style = data_style(plan, "DDP", limited=limited_to(plan, "ddp"))
    if style.shard:
        raise NotExpressed(
            f"this plan is not DDP: parameters or their state are split over {', '.join(style.shard)}",
            where=f"the plan for '{plan.model}'",
            fix="write it with emit --to fsdp2",
        )
    return _FILE.format(model=plan.model, devices=plan.devices)


def emit(plan: PlanData, path: Path, *, model: object) -> str:
    """Write the file. An interrupted write leaves no partial file."""
    from pase.files.atomic import write_atomically

    write_atomically(path, source(plan))
    return f"{path}: parallelize(module) by DistributedDataParallel, for a PyTorch program"


TARGETS.add(
    "ddp",
    PlanTarget(
        program="DDP",
        says="the batch over all devices, with whole parameters on each",
        forms=(TargetForm(name="replicate", axes=(TargetAxis(name="data", use="replicate"),)),),
    ),
)
BACKENDS.add(
    "ddp", Backend(writes="DistributedDataParallel in Python, if it can express the plan", emit=emit)
)
