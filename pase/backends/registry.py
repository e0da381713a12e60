"""The registry of backends that write a plan to a file for another program.

A backend is a module ``backends/emit/<name>.py``, which is found automatically. It registers one ``Backend`` in
``BACKENDS`` and imports its framework only inside functions.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pase.errors import PaseError
from pase.machine.load import DEFAULT
from pase.plan.targets import TARGETS, limited_to
from pase.registry import Registry

if TYPE_CHECKING:
    from pase.plan.targets import PlanTarget
    from pase.plan.types import PlanData

__all__ = ["BACKENDS", "Backend", "Emit", "NotExpressed", "emit"]


class Emit(Protocol):
    def __call__(self, plan: PlanData, path: Path, *, model: object) -> str:
        """Write ``path`` completely or not at all, and return one line that says what was written.

        model: what the plan was compiled from, for example a file's path: the user's argument, or by default the name
        in the plan. Raises PaseError if the target cannot express some part of the plan. Nothing is left out silently.
        """


@dataclass(frozen=True, kw_only=True)
class Backend:
    writes: str
    """What it writes, in a few words."""
    emit: Emit
    needs_model: bool = False
    """Whether the file is made from the ops of the model, so that the plan must have its model."""
    stages: bool = False
    """Whether it writes the stages of a pipelined plan. All other backends refuse such plans."""


class NotExpressed(PaseError):
    """A plan that a backend cannot express. ``emit`` adds how to compile one that it can."""


BACKENDS: Registry[Backend] = Registry("backend", package="pase.backends.emit")


def emit(plan: PlanData, to: str, path: str | Path, model: object = None) -> str:
    """Write the plan for another program. Raises PaseError if the backend is unknown or cannot express the plan."""
    backend = BACKENDS[to]
    if not backend.stages:
        plan.check_emitted()
    try:
        if to in TARGETS:
            _check_step(plan, to, TARGETS[to])
        return backend.emit(plan, Path(path), model=plan.model if model is None else model)
    except NotExpressed as e:
        if to not in TARGETS or limited_to(plan, to):
            raise
        fix = f"compile for it{_command(plan, to, path)} (in Python target='{to}')" + (
            f", or {e.fix}" if e.fix else ""
        )
        raise NotExpressed(e.what, where=e.where, fix=fix) from None


def _command(plan: PlanData, to: str, path: str | Path) -> str:
    """How to compile the plan's model again for a target and write its file; the option alone if the plan does not
    name its model as the command line does."""
    if ":" not in plan.model and not Path(plan.model).exists():
        return f" with --for {to}"
    machine = [] if plan.machine == DEFAULT else ["--machine", plan.machine]
    words = ["pase", "compile", plan.model, "--devices", str(plan.devices), *machine]
    return f": {shlex.join([*words, '--for', to, '--emit', str(path)])}"


def _check_step(plan: PlanData, to: str, target: PlanTarget) -> None:
    """Raise NotExpressed if the plan's step has micro-batches or recomputation that the target does not run."""
    unknown = [f"{plan.accumulate} micro-batches"] if plan.accumulate > 1 and not target.micro_batches else []
    # Most targets recompute every layer or none, as the search for them does.
    known = target.recomputes_some or (target.recomputes and limited_to(plan, to))
    unknown += ["recomputed blocks"] if plan.remat and not known else []
    if unknown:
        raise NotExpressed(
            f"{target.program} cannot express its {' and '.join(unknown)}",
            where=f"the plan for '{plan.model}'",
        )
