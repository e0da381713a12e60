"""``pase diff``: lists the differences between two layouts of one model, or between two traced runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pase.commands.options import JsonOption, print_json, progress
from pase.files.json_values import JsonObject
from pase.files.terminal import console

if TYPE_CHECKING:
    from pase.plan.types import PlanData

__all__ = ["diff"]

PURPOSE = "Plan"


def diff(
    old: Annotated[
        Path, typer.Argument(help="A layout.json, or a folder of traces or one trace.", metavar="OLD")
    ],
    new: Annotated[
        Path, typer.Argument(help="What to compare it with: the same kind of file.", metavar="NEW")
    ],
    json: JsonOption = False,
) -> None:
    """List the differences between two layouts or two traced runs.

    For layouts, prints one line for each difference (mesh, layers, parameters, ...), then the change in step time and
    memory. If the machines differ, the old split is also priced on the new machine: what the machine changes, and what
    the split does.

    For traces (another card, a changed program, another rank), prints what each kind of work and each cause of idle
    time takes in both, and the ops that differ most, matched by name, module and shape, with what differs. All
    differences add up to that of the step.

    \b
    Examples:
      pase diff layout.json layout-with-more-memory.json
      pase diff traces-h100/ traces-mi300/
      pase diff before/ after/ --json
    """
    from pase.replay.reports.report import is_layout

    layouts = [is_layout(x) for x in (old, new)]
    if not any(layouts) and all(x.exists() for x in (old, new)):
        _traces(old, new, json)
        return
    from pase.plan.layout import diff as differences
    from pase.plan.layout import load
    from pase.plan.table import bytes_text, cost_text

    a, b = load(old), load(new)
    lines = differences(a, b)
    between, why_not = _on_machine_of(a, b)
    if json:
        print_json(
            {
                "differences": lines,
                "cost": [a.cost, b.cost],
                "cost_of_old_on_new_machine": between,
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
    if between is not None:
        before, then = "", "the split"
        if a.devices != b.devices:
            before, then = f" with its {a.devices:,} devices", f"the split for {b.devices:,} devices"
        say(
            f"the old split takes {cost_text(between, b.unit)} on {b.machine}{before}: the machine changes the step by "
            f"{_percent(between, a.cost)}, and then {then} by {_percent(b.cost, between)}"
        )
    elif why_not:
        say(f"what the machine changes and what the split does is not known: {why_not}")


def _percent(new: float, old: float) -> str:
    if not old:
        return "an unknown part"
    change = new / old - 1
    return f"{change:+.1%}" if abs(change) >= 0.0005 else "less than 0.1%"


def _on_machine_of(a: PlanData, b: PlanData) -> tuple[float | None, str]:
    """(The cost of plan a's split on the machine of plan b, why it is not known); (None, "") on one machine."""
    from pase.compiler.meshes.retarget import priced_on
    from pase.compiler.resolve import attached, resolve
    from pase.errors import PaseError
    from pase.machine import load as load_machine

    if a.machine_digest == b.machine_digest:
        return None, ""
    if a.model != b.model:
        return None, "the layouts are of different models"
    try:
        if load_machine(b.machine).digest != b.machine_digest:
            return None, f"the figures of {b.machine} have changed since the layout was made"
        with progress() as say:
            say("pricing the old split on the new machine")
            return priced_on(attached(a, resolve(a.model)), b.machine)[0].cost, ""
    except PaseError as e:
        return None, e.what


def _traces(old: Path, new: Path, json: bool) -> None:
    """Compares the slowest ranks of two traced runs."""
    from pase.replay.measurement.clocks import align
    from pase.replay.measurement.model import measure
    from pase.replay.measurement.spending import spendings
    from pase.replay.reports.compare import compare_spendings, compared_lines
    from pase.replay.reports.report import load_any

    both = []
    problems: list[str] = []
    with progress() as say:
        for path in (old, new):
            t = align(load_any(path, say))
            problems += [f"{path}: {p}" for p in t.problems]
            say(f"attributing the time of {path}")
            spent = spendings(measure(t))
            both.append(max(spent, key=lambda s: s.total_ns / len(s.iterations)))
    report: JsonObject = {"old": str(old), "new": str(new), **compare_spendings(*both), "problems": problems}
    if json:
        print_json(report)
        return
    out = console()
    for line in compared_lines(report):
        out.print(line, markup=False, highlight=False)
    for p in problems:
        out.print(f"note: {p}")
