"""``pase profile``: run a program and collect the traces that replay needs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["profile"]


def profile(
    command: Annotated[
        list[str], typer.Argument(help="The program, after --: pase profile -- python train.py")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the traces.")] = Path("traces"),
    seconds: Annotated[
        float, typer.Option(help="Stop tracing after this many seconds; 0 traces to the end.")
    ] = 0.0,
    skip: Annotated[int, typer.Option(min=1, help="PyTorch: optimizer steps to skip first.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="PyTorch: optimizer steps to trace after those.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a program and collect what replay needs.

    PROGRAM uses JAX or PyTorch. All processes that it starts are profiled.
    """
    from pase.errors import PaseError
    from pase.replay.collect.autostart import environment

    if seconds < 0:
        raise PaseError(f"--seconds {seconds}: give 0 or a positive number")
    before = {p: p.stat().st_mtime_ns for p in _traces(output)}
    try:
        # With --json the program's own output must not stand beside the one object.
        done = subprocess.run(
            command, env=environment(output, seconds, skip, steps), stdout=2 if as_json else None, check=False
        )
    except OSError as e:
        raise PaseError(f"cannot run '{command[0]}': {e.strerror or e}") from e
    files = sorted(p for p in _traces(output) if before.get(p) != p.stat().st_mtime_ns)
    if as_json:
        report = {"output": str(output), "status": done.returncode, "traces": [str(f) for f in files]}
        typer.echo(json.dumps(report))
    if done.returncode:
        raise PaseError(
            f"'{' '.join(command)}' ended with status {done.returncode}; {len(files)} traces were written"
        )
    if not files:
        raise PaseError(
            f"'{' '.join(command)}' wrote no trace: it ran no JAX computation that was compiled, and no PyTorch "
            f"optimizer took more than {skip} steps"
        )
    if not as_json:
        written = "1 trace" if len(files) == 1 else f"{len(files)} traces"
        typer.echo(f"{written} in {output}. Next: pase replay {output}; pase diagnose {output}", err=True)


def _traces(folder: Path) -> list[Path]:
    """The traces that JAX's and PyTorch's profilers have written there."""
    return [*folder.rglob("*.xplane.pb"), *folder.rglob("rank*/trace.json.gz")] if folder.exists() else []
