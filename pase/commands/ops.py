"""``pase ops``: the framework ops that can be read, generated from the frontends' own rules."""

from __future__ import annotations

from pase.commands.options import JsonOption, console, print_json

__all__ = ["ops"]


def ops(json: JsonOption = False) -> None:
    """Which ops of which framework pase can read, and the loop nest that each becomes.

    An op that is not listed is an error that names it and your source line, or with --unknown replicate an op
    that is not split.
    """
    table = coverage()
    if json:
        print_json(table)
        return
    from rich.table import Table

    out = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("frontend", "loop nest", "ops"):
        out.add_column(column, overflow="fold", no_wrap=column != "ops")
    for frontend, nests in table.items():
        for nest, names in nests.items():
            out.add_row(frontend, nest, " ".join(names))
    console().print(out)


def coverage() -> dict[str, dict[str, list[str]]]:
    """frontend -> loop nest -> the framework's ops."""
    from pase.frontends.from_jax import INLINED
    from pase.frontends.jax_rules import ELEMENTWISE, RULES

    nests: dict[str, list[str]] = {"elementwise": sorted(ELEMENTWISE)}
    for name, rule in RULES.items():
        nests.setdefault(rule.__name__.strip("_").replace("_", " "), []).append(name)
    nests["call, inlined"] = sorted(INLINED)
    nests["loop"] = ["scan"]
    nests["whole, not split"] = ["cond", "while"]
    return {"jax": {k: sorted(v) for k, v in nests.items()}}
