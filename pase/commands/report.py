"""``pase report``: writes a layout as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pase.commands.options import (
    ChoicesTimeLimit,
    FailuresOption,
    JsonOption,
    LayoutFile,
    LayoutMachine,
    LayoutModel,
    StrictOption,
    print_json,
    progress,
    strictly,
    warn_misfit,
)
from pase.files.formats import written_as
from pase.files.terminal import console

if TYPE_CHECKING:
    from pase.api import Plan
    from pase.questions.training_run import TrainingRun

__all__ = ["report"]

PURPOSE = "Plan"


def report(
    layout: LayoutFile,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="Write the page to this file.",
            metavar="FILE",
            callback=written_as("an HTML page"),
        ),
    ] = Path("report.html"),
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline",
            help="Also write the predicted step as a timeline (.json or .json.gz), for Perfetto (ui.perfetto.dev) and "
            "pase replay.",
            metavar="FILE",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Also what a training run over this many tokens takes: days, failures, energy, cost. For example 15T.",
            metavar="N",
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="With --tokens: the price of a device-hour, in any currency.")
    ] = None,
    failures: FailuresOption = None,
    model: LayoutModel = None,
    machine: LayoutMachine = None,
    time_limit: ChoicesTimeLimit = 20.0,
    json: JsonOption = False,
    strict: StrictOption = False,
) -> None:
    """Write a layout as an HTML page.

    The page is one file that needs no network. It shows the model as a graph that unfolds, what each device holds, the
    step as a timeline, the roofline, memory, costs by cause and by layer, a comparison of strategies, and how certain
    the choice is. Prints the name of the file.

    \b
    Example:
      pase report layout.json -o report.html --timeline step.json.gz
      pase report layout.json -o report.html --tokens 15T --price 2.5
    """
    from datetime import date

    from pase.api import load
    from pase.files.atomic import write_atomically
    from pase.questions.explain import explain
    from pase.questions.report import report_page
    from pase.questions.sensitivity import swings

    plan = load(layout)
    run = _whole_run(plan, machine, tokens, price, failures)
    warn_misfit(plan)
    with progress() as say:
        if timeline is not None:
            _write_timeline(plan, timeline)
        e = explain(plan, model=model, machine=machine, time_limit=time_limit, progress=say)
        say("other machines")
        others = None if e.problem is None else swings(e.plan, e.problem, seconds=time_limit)
        say("drawing")
        write_atomically(output, report_page(e, others, date.today().isoformat(), run))
    if json:
        written = {"report": str(output), "timeline": None if timeline is None else str(timeline)}
        about = {
            "model": e.plan.model,
            "layers": len(e.plan.nodes),
            "run": None if run is None else run.to_json(),
            "remarks": [r.to_json() for r in plan.noted],
        }
        print_json(written | about)
    else:
        console(err=True).print(f"wrote {output}" + (f" and {timeline}" if timeline is not None else ""))
    strictly(plan.sound, strict)


def _whole_run(
    plan: Plan, machine: str | None, tokens: str | None, price: float | None, failures: float | None
) -> TrainingRun | None:
    """What the run of so many tokens takes; None if no number is given."""
    from pase.errors import PaseError
    from pase.files.quantities import parse_count
    from pase.machine import load as load_machine
    from pase.questions.training_run import RunTerms, training_run

    if tokens is None:
        for name, value in (("--price", price), ("--failures", failures)):
            if value is not None:
                what = "it is about a whole run, whose length is not given"
                raise PaseError(what, where=name, fix="add --tokens 15e12")
        return None
    terms = RunTerms(tokens=parse_count(tokens, "--tokens"), failures_per_device_hour=failures, price=price)
    return training_run(plan, load_machine(machine or plan.machine), plan.devices + plan.idle, terms)


def _write_timeline(plan: Plan, path: Path) -> None:
    """Write the predicted step of a plan. Raises PaseError if the plan has no timeline."""
    from pase.errors import PaseError
    from pase.replay.traces.timeline_io import save_timeline

    made = plan.timeline
    if made is None:
        raise PaseError(
            f"the plan for '{plan.model}' has no timeline, because it sends nothing or is from an older version",
            where=f"--timeline {path}",
            fix="leave out --timeline, or compile the plan again",
        )
    save_timeline(made, path)
