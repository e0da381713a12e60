"""``pase reshard``: shows which parameters must be sent to change from one layout of a model to another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pase.commands.options import JsonOption, print_json
from pase.files.terminal import console

if TYPE_CHECKING:
    from pase.machine import Mesh

__all__ = ["reshard"]

PURPOSE = "Run and hand over"


def reshard(
    old: Annotated[
        Path,
        typer.Argument(
            help="The layout.json that describes where the parameters are now.", metavar="OLD.json"
        ),
    ],
    new: Annotated[
        Path, typer.Argument(help="The layout.json to which they are resharded.", metavar="NEW.json")
    ],
    machine: Annotated[
        str | None,
        typer.Option(
            "--machine",
            help="A machine's name or a .toml file. Default: the machine of NEW.",
            metavar="MACHINE",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show which parameters must be sent between two layouts.

    Prints one line for each parameter that is resharded: its old and new layout, the bytes over each level of links,
    and the time.

    Only parameters are counted; optimizer state of the same shapes is resharded in the same way. A device has the same
    number in both layouts. A device receives only what it does not have, from the nearest device that has it. The
    figures are predictions, not measurements.

    \b
    Example:
      pase reshard layout-32.json layout-64.json
    """
    from pase.machine import load as load_machine
    from pase.plan.answer import mesh_text
    from pase.plan.layout import load
    from pase.plan.parameter_reshard import parameter_reshards
    from pase.plan.table import bytes_text, cost_text

    before, after = load(old), load(new)
    on = load_machine(machine or after.machine)
    found = parameter_reshards(before, after, on)
    seconds = sum(m.seconds(on) for m in found)
    levels = [level.name for level in on.levels]
    changes = [
        f"{what}: {x} -> {y}"
        for what, x, y in (
            ("machine", before.machine, after.machine),
            ("devices", before.devices, after.devices),
            ("mesh", mesh_text(before.mesh), mesh_text(after.mesh)),
        )
        if x != y
    ]
    if json:
        print_json(
            {
                "changes": changes,
                "moved": len(found),
                "parameters": len(after.parameters),
                "seconds": seconds,
                "bytes": {name: sum(m.received[k] for m in found) for k, name in enumerate(levels)},
                "moves": [
                    {
                        "parameter": m.parameter,
                        "old": m.old,
                        "new": m.new,
                        "bytes": dict(zip(levels, m.received, strict=True)),
                        "seconds": m.seconds(on),
                    }
                    for m in found
                ],
            }
        )
        return
    say = console().print
    for line in changes:
        say(line)
    say(
        f"{len(found)} of {len(after.parameters)} parameters are resharded; a device receives at most "
        f"{bytes_text(sum(m.nbytes for m in found))}, about {cost_text(seconds, 's')} on {on.name}",
    )
    if found:
        from pase.plan.columns import columns

        names = ("parameter", "stored", "then", *(f"over {name}" for name in levels), "takes")
        table = columns(*names, left=names, overflow="fold")
        for m in found:
            by_level = [bytes_text(n) if n else "" for n in m.received]
            stored = _text(m.old, before.mesh), _text(m.new, after.mesh)
            table.add_row(m.parameter, *stored, *by_level, cost_text(m.seconds(on), "s"))
        say(table)


def _text(placed: tuple[tuple[str, ...], ...], mesh: Mesh) -> str:
    """
    >>> from pase.machine import Mesh
    >>> _text((("data",), ()), Mesh(names=("data", "data2"), sizes=(2, 4)))
    'dim 0 over data (2 of 8)'
    """
    from pase.plan.answer import axes_text

    split = (f"dim {k} over {axes_text(axes, mesh)}" for k, axes in enumerate(placed) if axes)
    return ", ".join(split) or "whole"
