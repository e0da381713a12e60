"""``pase emit``: writes a layout in the format of another program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pase.backends.registry import BACKENDS
from pase.backends.registry import emit as write
from pase.commands.options import JsonOption, LayoutFile, StrictOption, print_json, strictly, warn_misfit
from pase.files.terminal import console
from pase.plan.targets import TARGETS

__all__ = ["emit"]

PURPOSE = "Run and hand over"


def emit(
    layout: LayoutFile,
    to: Annotated[
        str, typer.Option("--to", help="The target format, from the list above.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write.", metavar="FILE", show_default=False)
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Where the model is now. Default: where it was when the layout was compiled."
        ),
    ] = None,
    json: JsonOption = False,
    strict: StrictOption = False,
) -> None:
    """Write a layout in the format of ONNX or another program.

    Writes FILE and prints what is in it. The formats:

    BACKENDS

    To search only what one of these can express: pase compile --for TARGETS.

    \b
    Example:
      pase compile 'hf:LlamaForCausalLM?batch=32' --devices 32 --for fsdp2 -o layout.json
      pase emit layout.json --to fsdp2 -o parallelize.py
      pase compile 'hf:LlamaForCausalLM?batch=32' --devices 32 --for fsdp2 --emit parallelize.py    # both at once
    """
    import pase
    from pase.compiler.resolve import attached, resolve

    plan = pase.load(layout)
    warn_misfit(plan)
    if BACKENDS[to].needs_model:
        plan = attached(plan, resolve(model or plan.model))
    written = write(plan, to, output, model)
    if json:
        about = {"layout": str(layout), "to": to, "file": str(output), "written": written}
        print_json(about | {"remarks": [r.to_json() for r in plan.noted]})
    else:
        console().print(written)
    strictly(plan.sound, strict)


_WIDE = max(map(len, BACKENDS))
_LISTED = "\n    ".join(["\b", *(f"--to {name:<{_WIDE}} {b.writes}" for name, b in BACKENDS.items())])
emit.__doc__ = (emit.__doc__ or "").replace("BACKENDS", _LISTED).replace("TARGETS", ", ".join(TARGETS))
