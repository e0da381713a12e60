"""``pase profile``: runs a program and collects the traces that ``pase replay`` needs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["profile"]

PURPOSE = "Traces"
USES_DEVICES = True


def profile(
    command: Annotated[
        list[str],
        typer.Argument(help="The program, after --: pase profile -- python train.py", metavar="COMMAND"),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder for the traces.")] = Path(
        "traces"
    ),
    seconds: Annotated[
        float, typer.Option(help="Stop tracing after this many seconds; 0 traces to the end.")
    ] = 0.0,
    skip: Annotated[
        int, typer.Option(min=1, help="For PyTorch: number of optimizer steps to skip first.")
    ] = 2,
    steps: Annotated[
        int, typer.Option(min=1, help="For PyTorch: number of optimizer steps to trace after that.")
    ] = 10,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")
    ] = False,
) -> None:
    """Run a program and collect traces for pase replay.

    The program uses JAX or PyTorch and does not need to be changed. All processes that it starts are profiled. Writes
    one trace for each process to the folder, and prints how many.

    \b
    Examples:
      pase profile -o traces -- python train.py
      pase profile --skip 5 --steps 20 -- torchrun --nproc-per-node 8 train.py
    """
    from pase.errors import PaseError
    from pase.replay.collect.autostart import environment

    if seconds < 0:
        raise PaseError(f"{seconds} is negative", where="--seconds", fix="give 0 or a positive number")
    before = {p: p.stat().st_mtime_ns for p in _traces(output)}
    try:
        # With --json, the program's own output must not be mixed with the JSON object.
        done = subprocess.run(
            command, env=environment(output, seconds, skip, steps), stdout=2 if as_json else None, check=False
        )
    except OSError as e:
        raise PaseError(
            f"it cannot be run: {e.strerror or e}",
            where=f"'{command[0]}'",
            fix="give a program that exists, after --",
        ) from e
    files = sorted(p for p in _traces(output) if before.get(p) != p.stat().st_mtime_ns)
    if as_json:
        report = {"output": str(output), "status": done.returncode, "traces": [str(f) for f in files]}
        typer.echo(json.dumps(report))
    if done.returncode:
        raise PaseError(
            f"the program ended with status {done.returncode}, and {len(files)} traces were written",
            where=f"'{' '.join(command)}'",
            fix="see its own output, and correct the program",
        )
    if not files:
        raise PaseError(
            f"no trace was written: the program ran no compiled JAX computation, and no PyTorch optimizer took more "
            f"than {skip} steps",
            where=f"'{' '.join(command)}'",
            fix="run more steps, or lower --skip",
        )
    if not as_json:
        written = "1 trace" if len(files) == 1 else f"{len(files)} traces"
        typer.echo(f"{written} in {output}. Next: pase replay {output}; pase diagnose {output}", err=True)


def _traces(folder: Path) -> list[Path]:
    """The traces in the folder that the profilers of JAX and PyTorch have written."""
    return [*folder.rglob("*.xplane.pb"), *folder.rglob("rank*/trace.json.gz")] if folder.exists() else []
