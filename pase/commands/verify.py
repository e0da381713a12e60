"""``pase verify``: compiles a layout's step with the target's own compiler and compares it with the prediction."""

from __future__ import annotations

from typing import Annotated, cast, get_args

import typer

from pase.commands.options import JsonOption, LayoutFile, print_json, progress
from pase.files.terminal import console

__all__ = ["verify"]

PURPOSE = "Run and hand over"


def verify(
    layout: LayoutFile,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="The machine to compile for: a name, a machine file, or cpu. Default: the layout's machine.",
            show_default=False,
        ),
    ] = None,
    lowering: Annotated[
        str,
        typer.Option(
            "--lowering", help="What partitions the program: auto, manual (pase) or annotated (XLA)."
        ),
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Where the model is now. Default: where it was when the layout was compiled."
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            "--text", help="Also write the program to this file.", metavar="FILE", show_default=False
        ),
    ] = None,
    rank: Annotated[
        int, typer.Option("--rank", help="PyTorch models: the rank whose step is followed.", min=0)
    ] = 0,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds that the compiler may take.", min=1.0)
    ] = 3600.0,
    json: JsonOption = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Exit with status 1 if the compiled step does not fit or sends other bytes than the plan lists.",
        ),
    ] = False,
) -> None:
    """Compile a layout's step with the target's own compiler.

    XLA compiles for NVIDIA GPUs, TPUs or host devices, which need not be here. Nothing is run. The command shows beside
    each other what the plan predicts and what the compiler made: the peak memory of a device, the bytes that each kind
    of collective sends, and the time of a step. It also shows how many bytes are sent while kernels run, and how many
    kernels a step has. The time is priced from the compiled program, its kernels by a roofline in the compiler's order.

    For GPUs it needs JAX's CUDA plugin, for TPUs libtpu; an error says how to install them. Compiling takes seconds to
    minutes.

    The step of a PyTorch model runs op by op on fake tensors, with the update. The command shows the peak memory of the
    rank by kind, and its collectives: listed by the plan, joined in messages, and sent.

    \b
    Examples:
      pase verify layout.json
      pase verify layout.json --target b200x8 --json
      pase verify layout.json --target cpu
    """
    import pase
    from pase.backends.jax.spmd.lower import Lowering
    from pase.compiler.resolve import attached, resolve
    from pase.errors import PaseError
    from pase.files.atomic import write_atomically

    if lowering not in get_args(Lowering):
        raise PaseError(
            f"'{lowering}' is no lowering", where="--lowering", fix="give auto, manual or annotated"
        )
    plan = pase.load(layout)
    with progress() as say:
        say("tracing the model")
        bound = pase.Plan.of(attached(plan, resolve(model or plan.model)))
        found = bound.verify(
            target, lowering=cast(Lowering, lowering), rank=rank, timeout_s=timeout, progress=say
        )
    if text is not None:
        write_atomically(text, found.text)
    if json:
        print_json(found.to_json())
    else:
        out = console()
        for part in found.report():
            out.print(part, highlight=False)
    if strict and not (found.fits and found.bytes_equal):
        raise typer.Exit(1)
