"""``pase emit``: a layout, written for another program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pase.commands.options import JsonOption, Layout, console, print_json

__all__ = ["emit"]


def emit(
    layout: Layout,
    to: Annotated[str, typer.Option("--to", help="For what: see the list above.", show_default=False)],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write.", metavar="FILE", show_default=False)
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", help="Where the model is now. Default: where it was when it was compiled."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a layout in another program's terms.

    \b
    --to onnx     the ONNX model itself, with ONNX's own sharding annotations
    --to names    JSON: every parameter's and input's sharding, by name
    --to mesh-tf  a Mesh-TensorFlow program with its mesh_shape and layout_rules
    --to dtensor  TensorFlow DTensor layouts, by variable name

    \b
    Example:
      pase compile model.onnx --devices 32 -o layout.json
      pase emit layout.json --to onnx -o annotated.onnx
    """
    import pase
    from pase.backends import registry
    from pase.compiler.resolve import resolve

    plan = pase.load(layout)
    if registry.needs_model(to):
        plan = plan.with_model(resolve(model or plan.model))
    written = registry.emit(plan, to, output, model)
    if json:
        print_json({"layout": str(layout), "to": to, "file": str(output), "written": written})
    else:
        console().print(written, highlight=False)
