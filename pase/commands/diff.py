"""``pase diff``: lists the differences between two layouts of one model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pase.commands.options import JsonOption, print_json
from pase.files.terminal import console

__all__ = ["diff"]


def diff(
    old: Annotated[Path, typer.Argument(help="A layout.json.", metavar="OLD.json")],
    new: Annotated[Path, typer.Argument(help="The layout.json to compare it with.", metavar="NEW.json")],
    json: JsonOption = False,
) -> None:
    """List the differences between two layouts of a model.

    Prints one line for each difference (mesh, layers, parameters, ...), then the change in step time and memory.

    \b
    Example:
      pase diff layout.json layout-with-more-memory.json
    """
    from pase.plan.layout import diff as differences
    from pase.plan.layout import load
    from pase.plan.table import bytes_text, cost_text

    a, b = load(old), load(new)
    lines = differences(a, b)
    if json:
        print_json(
            {
                "differences": lines,
                "cost": [a.cost, b.cost],
                "memory": [a.memory.total, b.memory.total],
                "unit": b.unit,
            }
        )
        return
    say = console().print
    for line in lines or ["the layouts are the same"]:
        say(line)
    say(
        f"step {cost_text(a.cost, a.unit)} -> {cost_text(b.cost, b.unit)}, memory {bytes_text(a.memory.total)} -> "
        f"{bytes_text(b.memory.total)} a device",
    )
