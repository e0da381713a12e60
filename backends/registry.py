"""The backends that write a plan to a file in another program's terms. A new one is one line of ``MODULES``.

Such a backend is a module ``backends/to_<name>.py`` with one function, and imports its framework inside of it:

``emit(plan, path, *, model) -> str``: write ``path``, whole or not at all, and return one line that says what was
written. ``model`` is what the plan was compiled from (a file's path, say), for backends that need it: what the user
gave, else the plan's own name of it. What the target cannot express is a PaseError, never left out in silence.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pase.errors import PaseError

if TYPE_CHECKING:
    from pase.plan.types import PlanData

__all__ = ["MODULES", "emit", "names", "needs_model"]

MODULES: dict[str, tuple[str, str]] = {
    "onnx": ("pase.backends.to_onnx", "the ONNX model itself, with ONNX's own sharding annotations"),
    "names": ("pase.backends.to_names", "JSON: every parameter's and input's sharding, by name"),
    "mesh-tf": ("pase.backends.to_mesh_tf", "a Mesh-TensorFlow program with its mesh_shape and layout_rules"),
    "dtensor": ("pase.backends.to_dtensor", "TensorFlow DTensor layouts, by variable name"),
}
"""name -> (module, what it writes). One whose file is not there is left out."""


def names() -> dict[str, str]:
    """name -> what it writes, of the backends that are there."""
    return {n: what for n, (module, what) in MODULES.items() if importlib.util.find_spec(module) is not None}


def needs_model(to: str) -> bool:
    """Is what the backend writes made of the model's own ops? Then the plan must have its model (``NEEDS_MODEL``)."""
    return to in names() and bool(getattr(importlib.import_module(MODULES[to][0]), "NEEDS_MODEL", False))


def emit(plan: PlanData, to: str, path: str | Path, model: Any = None) -> str:
    """Write the plan for another program; see the module's docstring."""
    if to not in names():
        raise PaseError(f"no backend '{to}' writes files; there are: {', '.join(names()) or 'none'}")
    written: str = importlib.import_module(MODULES[to][0]).emit(
        plan, Path(path), model=plan.model if model is None else model
    )
    return written
