"""compile, compare, load: what people call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pase.compiler.options import CompileOptions, takes_options
from pase.compiler.resolve import resolve

if TYPE_CHECKING:
    from pase.compiler.problem import Progress
    from pase.plan.types import Plan

__all__ = ["compare", "compile", "load", "resolve"]


@takes_options
def compile(
    model: Any, params: Any = None, *batch: Any, options: CompileOptions, progress: Progress | None = None
) -> Plan:
    """Find the best split of every layer over ``devices``, over all meshes, and say what follows from it.

    model: "zoo:NAME?batch=…", "package.module:function" (which returns loss_fn, params, *batch), a JAX
        callable ``loss_fn(params, *batch) -> scalar`` followed by its example arguments (shapes suffice), or what
        another frontend reads: "model.onnx", an onnx.ModelProto, …
    {options}
    progress: called with a line of text at each step of the way.

    Raises PaseError for bad input; Infeasible where no strategy exists.
    """
    from pase.compiler.compilation import compile_model

    return compile_model(model, params, batch, options, progress).plan


@takes_options
def compare(
    model: Any, params: Any = None, *batch: Any, options: CompileOptions, progress: Progress | None = None
) -> list[tuple[str, Plan]]:
    """Every method that applies and ours ("pase"), as plans priced alike, cheapest first.

    model, params, batch: as for ``compile``.
    {options}
    progress: called with a line of text at each step of the way.
    """
    from pase.compiler.compilation import compare_model

    return compare_model(model, params, batch, options, progress)


def load(path: str | Path) -> Plan:
    """Read a layout.json. PaseError where it is corrupt, cut off, or of another version."""
    from pase.plan.layout import load as load_layout

    return load_layout(path)
