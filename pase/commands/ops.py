"""``pase ops``: lists the framework ops that pase can read, from the rules of its frontends."""

from __future__ import annotations

from pase.commands.options import JsonOption, print_json
from pase.files.terminal import console

__all__ = ["ops"]

PURPOSE = "This installation"


def ops(json: JsonOption = False) -> None:
    """List the framework ops that pase can read.

    Prints a table with a row for each kind of loop nest and a column for each framework. A cell has the ops that become
    this kind of loop nest.

    For an op that is not listed, pase compile raises an error that names the op and its line in your model. With
    --unknown replicate, such an op is accepted but not split.

    \b
    Example:
      pase ops
    """
    from pase.frontends.registry import coverage

    table = coverage()
    if json:
        print_json(table)
        return
    from rich.table import Table

    out = Table(box=None, header_style="bold", pad_edge=False)
    out.add_column("loop nest", no_wrap=True)
    for frontend, nests in table.items():
        out.add_column(
            f"{frontend} ({len({op for names in nests.values() for op in names})})", overflow="fold"
        )
    for nest in sorted({n for nests in table.values() for n in nests}):
        out.add_row(nest, *(" ".join(nests.get(nest, ())) for nests in table.values()))
        out.add_section()
    console().print(out)
