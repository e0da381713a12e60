"""Writes a pipelined plan's schedule for PyTorch: a file of actions for ``torch.distributed.pipelining``.

Each rank has one line with its actions in order: stage, kind (F, B, or I and W), micro-batch.
``_PipelineScheduleRuntime`` loads the file with ``_load_csv(path, format="compute_only")`` and adds sends and receives
itself. The user's program provides the modules of the stages, cut like ``cuts`` in layout.json.
"""

from __future__ import annotations

from pathlib import Path

from pase.backends.registry import BACKENDS, Backend
from pase.errors import PaseError
from pase.files.atomic import write_atomically
from pase.plan.types import PlanData

__all__ = ["emit"]


def emit(plan: PlanData, path: Path, *, model: object) -> str:
    """Write the list of actions. Raises PaseError if the plan has no stages, or one replica per group of devices."""
    p = plan.pipeline
    if p is None:
        raise PaseError(
            "it has no stages",
            where=f"the plan for '{plan.model}'",
            fix="compile it with pipeline=N or pipeline='auto'",
        )
    if p.replicas:
        raise PaseError(
            f"it has a replica on each of {len(p.replicas)} groups, each with its own schedule and share of the "
            f"micro-batches, but PyTorch reads only one schedule",
            where=f"the plan for '{plan.model}'",
            fix="compile it with pipeline=N for stages on the groups, or run it in JAX",
        )
    made = p.actions()
    write_atomically(path, f"{made}\n")
    ranks = ", ".join(map(str, made.rank_of))
    return (
        f"{path}: {p}; ranks of stages 0 … {made.stages - 1}: {ranks}; blocks: {', '.join(map(str, p.cuts))}"
    )


BACKENDS.add(
    "torch-schedule",
    Backend(writes="CSV of a pipeline's actions, torch.distributed.pipelining", emit=emit, stages=True),
)
