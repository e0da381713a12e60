"""``pase report``: a layout as one page of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pase.commands.options import (
    ChoicesTimeLimit,
    JsonOption,
    LayoutFile,
    LayoutMachine,
    LayoutModel,
    print_json,
    progress,
)
from pase.files.terminal import console

__all__ = ["report"]


def report(
    layout: LayoutFile,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Write the page to this file.", metavar="FILE")
    ] = Path("report.html"),
    model: LayoutModel = None,
    machine: LayoutMachine = None,
    time_limit: ChoicesTimeLimit = 20.0,
    json: JsonOption = False,
) -> None:
    """A layout as one page of HTML.

    The page is one file that needs no network. It shows the model as a graph that unfolds, which device holds what, the
    step as a timeline, the roofline, memory, costs by cause and by layer, a comparison of strategies, and how certain
    the choice is.

    \b
    Example:
      pase report layout.json -o report.html
    """
    from pase.api import load
    from pase.files.atomic import write_atomically
    from pase.questions.explain import explain
    from pase.questions.report import report_page
    from pase.questions.sensitivity import swings

    with progress() as say:
        e = explain(load(layout), model=model, machine=machine, time_limit=time_limit, progress=say)
        say("other machines")
        others = None if e.problem is None else swings(e.plan, e.problem, seconds=time_limit)
        say("drawing")
        write_atomically(output, report_page(e, others))
    if json:
        print_json({"report": str(output), "model": e.plan.model, "layers": len(e.plan.nodes)})
    else:
        console(err=True).print(f"wrote {output}")
