"""``pase ops``: the framework ops that pase can read, listed from the frontends' own rules."""

from __future__ import annotations

from pase.commands.options import JsonOption, print_json
from pase.files.terminal import console

__all__ = ["ops"]


def ops(json: JsonOption = False) -> None:
    """The framework ops that pase can read.

    Also says which loop nest each op becomes.

    An op that is not listed raises an error that names it and its place in your model. With --unknown replicate it is
    accepted, but it is not split.
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
