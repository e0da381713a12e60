"""The backends that write a plan to a file in another program's terms.

A backend is a module ``backends/to_<name>.py``, found by itself, that registers one ``Backend`` in ``BACKENDS`` and
imports its framework inside of functions only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pase.registry import Registry

if TYPE_CHECKING:
    from pase.plan.types import PlanData

__all__ = ["BACKENDS", "Backend", "Emit", "emit"]


class Emit(Protocol):
    def __call__(self, plan: PlanData, path: Path, *, model: object) -> str:
        """Write ``path``, whole or not at all, and return one line that says what was written.

        model: what the plan was compiled from (a file's path, say): what the user gave, else the plan's own name of
        it. What the target cannot express is a PaseError, never left out in silence.
        """


@dataclass(frozen=True, kw_only=True)
class Backend:
    writes: str
    """What it writes, in a few words."""
    emit: Emit
    needs_model: bool = False
    """Is what it writes made of the model's own ops? Then the plan must have its model."""
    stages: bool = False
    """Does it write what is a pipelined plan's alone?"""


BACKENDS: Registry[Backend] = Registry("backend", package="pase.backends", prefix="to_")


def emit(plan: PlanData, to: str, path: str | Path, model: object = None) -> str:
    """Write the plan for another program. PaseError where no backend has that name, or what it cannot express."""
    backend = BACKENDS[to]
    if not backend.stages:
        plan.check_emitted()
    return backend.emit(plan, Path(path), model=plan.model if model is None else model)
