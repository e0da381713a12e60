"""``pase passes``: lists the steps of a compilation."""

from __future__ import annotations

from pase.commands.options import JsonOption, print_json
from pase.files.terminal import console

__all__ = ["passes"]

PURPOSE = "This installation"


def passes(json: JsonOption = False) -> None:
    """List the steps of a compilation, in order.

    Each takes the answer so far and returns it with more: variants, a strategy, a plan. "pase compile --print-after
    PASS" prints what is known after one of them.

    \b
    Examples:
      pase passes
      pase compile zoo:mlp --devices 4 --print-after search
    """
    from pase.compiler.passes import PASSES

    if json:
        print_json([{"name": p.name, "says": p.says, "staged": p.staged} for p in PASSES.values()])
        return
    wide = max(map(len, PASSES))
    for p in PASSES.values():
        console().print(f"{p.name:<{wide}}  {p.says}", highlight=False)
