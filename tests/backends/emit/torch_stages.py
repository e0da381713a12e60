"""Stages of a small model, which ``torch.distributed.pipelining`` runs on each rank by the file of a pipelined plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.backends.torch.models import tower_of

LAYERS, MICRO_BATCHES = 8, 4


def model() -> tuple[Any, Any, Any]:
    """(module, input, target) in float64, the same in every process."""
    import torch

    torch.manual_seed(0)
    module, (x, y) = tower_of(LAYERS, marked=False)
    return module.double(), x.double(), y.double()


@dataclass(frozen=True)
class Staged:
    """A schedule's file, and the plan's cuts. rank_of: the rank of each stage."""

    name: str
    file: Path
    cuts: tuple[int, ...]
    rank_of: tuple[int, ...]


def run(plans: Sequence[Staged], rank: int) -> list[dict[str, list[float]]]:
    """For each plan, one step on this rank: gradients, and losses of micro-batches if it has the last stage."""
    import torch
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    out = []
    for plan in plans:
        module, x, y = model()
        ends = [sum(plan.cuts[:k]) for k in range(len(plan.cuts) + 1)]
        mine = [k for k, r in enumerate(plan.rank_of) if r == rank]
        parts = {k: torch.nn.Sequential(*module.layers[ends[k] : ends[k + 1]]) for k in mine}
        stages = [PipelineStage(parts[k], k, len(plan.cuts), torch.device("cpu")) for k in mine]
        runtime = _PipelineScheduleRuntime(stages, MICRO_BATCHES, loss_fn=torch.nn.functional.mse_loss)
        runtime._load_csv(str(plan.file), format="compute_only")
        losses: list[Any] = []
        given = {"target": y, "losses": losses} if len(plan.cuts) - 1 in mine else {}
        runtime.step(*([x] if 0 in mine else []), **given)
        made = {
            f"layers.{ends[k] + int(p.partition('.')[0])}.{p.partition('.')[2]}": w.grad.flatten().tolist()
            for k in mine
            for p, w in parts[k].named_parameters()
        }
        out.append(made | {"losses": [float(v) for v in losses]})
    return out
