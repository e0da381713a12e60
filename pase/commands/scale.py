"""``pase scale``: compares numbers of devices for one model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pase.commands.options import FailuresOption, JsonOption, ModelName, compile_options, print_json, progress
from pase.compiler.problem.options import CompileOptions
from pase.files.formats import written_as
from pase.files.json_values import JsonObject
from pase.files.terminal import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pase.questions.scale import ScalePoint
    from pase.questions.training_run import RunTerms, TrainingRun

__all__ = ["scale"]

PURPOSE = "Plan"

_WIDTH = 20


@compile_options(
    "machine",
    "cost_model",
    "optimizer",
    "unknown",
    "dims",
    "memory_limit",
    "accumulate",
    "remat",
    "precision",
    "overlap",
    "decompose",
)
def scale(
    model: ModelName,
    options: CompileOptions,
    devices: Annotated[
        str,
        typer.Option(
            "--devices", "-n", help="8..4096 doubles from 8 to 4096. 8,24,96 is a list.", metavar="RANGE"
        ),
    ],
    tokens: Annotated[
        str | None,
        typer.Option(
            help="What a run over this many tokens takes: days, failures, energy. For example 15T or 15e12.",
            metavar="N",
        ),
    ] = None,
    failures: FailuresOption = None,
    checkpoint: Annotated[
        float, typer.Option(help="With --tokens: seconds for which training waits for a checkpoint.")
    ] = 60.0,
    restart: Annotated[
        float, typer.Option(help="With --tokens: seconds from a failure to the next step.")
    ] = 600.0,
    price: Annotated[
        str | None,
        typer.Option(
            help="The price of a device-hour, in any currency: 2.5, or one for each machine, h100x8=2.5,b200x8=4.",
            metavar="PRICE",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Also write a page with a chart to this file.",
            metavar="FILE",
            callback=written_as("an HTML page"),
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare numbers of devices: step, MFU, memory and cost.

    Finds the best plan for each number of devices, for the same model and the same global batch. --machine may name
    several machines, with commas between them.

    Prints a table with the step time, MFU, memory and cost of each, and a chart of the speed-up. The cost is that of
    all devices together: device-seconds per step, and device-hours per billion tokens; with --price also money per
    billion tokens.

    With --tokens, a third table has the whole run: expected days with failures and with checkpoints as often as is
    best for that rate of failures, device-hours, energy at the cards' power limit, and the cost at --price. A figure
    that depends on an unknown one is left empty.

    \b
    Examples:
      pase scale zoo:gpt2 --devices 8..64
      pase scale 'zoo:llama3_8b?batch=512&attention=fused' --devices 32..512
      pase scale 'zoo:llama3_8b?batch=512&attention=fused' --devices 64..512 \\
                 --tokens 15e12 --price 2.5
      pase scale 'zoo:llama3_8b?batch=512' --devices 64..512 --machine h100x8,b200x8 \\
                 --price h100x8=2.5,b200x8=4 -o page.html
    """
    from datetime import date

    from pase.errors import PaseError
    from pase.files.atomic import write_atomically
    from pase.files.quantities import parse_count
    from pase.machine import DEFAULT
    from pase.machine import load as load_machine
    from pase.questions.scale import parse_devices, parse_prices
    from pase.questions.scale import scale as scaled
    from pase.questions.scale_page import scale_page
    from pase.questions.training_run import RunTerms, training_run

    numbers = parse_devices(devices)
    if tokens is None and failures is not None:
        raise PaseError(
            "it is about a whole run, whose length is not given",
            where="--failures",
            fix="add --tokens 15e12",
        )
    length = None if tokens is None else parse_count(tokens, "--tokens")
    machines = list(dict.fromkeys(str(options.machine or DEFAULT).split(",")))
    prices = parse_prices(price, machines)
    points: list[ScalePoint] = []
    runs: dict[tuple[str, int], TrainingRun] = {}
    for m in machines:
        load_machine(m)  # a wrong name is an error before the first search
    with progress() as say:
        for m in machines:
            one = replace(options, machine=m, baselines=False)
            points += scaled(model, numbers, one, say, prices.get(m))
    if length is not None:
        known = failures is not None or all(
            load_machine(m).failures_per_device_hour is not None for m in machines
        )
        for p in points:
            if p.plan is not None:
                terms = RunTerms(
                    tokens=length,
                    checkpoint_s=checkpoint,
                    restart_s=restart,
                    failures_per_device_hour=failures,
                    price=p.price,
                )
                there = load_machine(p.machine)
                runs[p.at] = training_run(p.plan, there, p.devices, terms, count_failures=known)
    if output is not None:
        write_atomically(output, scale_page(model, points, runs, date.today().isoformat()))
    if json:
        rows = [_row(p) | ({"run": runs[p.at].to_json()} if p.at in runs else {}) for p in points]
        print_json({"model": model, "points": rows})
        return
    _print(model, points, machines)
    if runs:
        _print_runs(runs, machines, terms)
    if output is not None:
        console(err=True).print(f"wrote {output}")


def _print_runs(runs: dict[tuple[str, int], TrainingRun], machines: Sequence[str], terms: RunTerms) -> None:
    from pase.plan.columns import columns
    from pase.questions.scale import number_text as text
    from pase.questions.training_run import UNCOUNTED

    names = "devices", "days", "days, none fail", "failures", "save every", "device hours", "MWh", "cost"
    of_machine = ["machine"] if len(machines) > 1 else []
    table = columns(*of_machine, *names, left=("machine",), overflow="fold")
    for (machine, devices), r in runs.items():
        every = r.checkpoint_every_s
        table.add_row(
            *([machine] if of_machine else []),
            str(devices),
            text(None if r.wall_s is None else r.wall_s / 86400),
            text(r.compute_s / 86400),
            text(r.failures),
            "" if every is None else f"{every / 60:.0f} min",
            text(r.device_hours),
            text(None if r.energy_kwh is None else r.energy_kwh / 1e3),
            text(r.cost),
        )
    out = console()
    out.print()
    steps = next((r.steps for r in runs.values()), 0)
    out.print(
        f"{terms.tokens:,.0f} tokens in {steps:,} steps; {terms.checkpoint_s:g} s a checkpoint and "
        f"{terms.restart_s:g} s a restart are assumed unless given; energy of the devices alone, at their power limit"
    )
    out.print(table)
    if unknown := sorted({m for (m, _), r in runs.items() if r.wall_s is None}):
        of = ", ".join(unknown)
        out.print(
            f"The machine file of {of} has no rate of failures: state one with --failures, such as 2e-5."
            + (f" Without it, {UNCOUNTED}." if len(machines) > 1 else "")
        )


def _row(p: ScalePoint) -> JsonObject:
    from pase.commands.compile import rates
    from pase.plan.answer import strategy_in_words

    if p.plan is None:
        return {"machine": p.machine, "devices": p.devices, "why_not": p.why_not}
    return {
        "machine": p.machine,
        "devices": p.devices,
        "idle": p.plan.idle,
        "split": strategy_in_words(p.plan),
        "mesh": p.plan.mesh.by_name,
        "cost": p.plan.cost,
        "unit": p.plan.unit,
        **rates(p.plan),
        "memory_bytes": p.plan.memory.total,
        "fits": p.plan.fits,
        "device_s": p.device_s,
        "tokens_per_s": p.tokens_per_s,
        "device_hours_per_1e9_tokens": p.hours_per_1e9_tokens,
        "cost_per_1e9_tokens": p.cost_per_1e9_tokens,
        "why_not": None,
    }


def _print(model: str, points: list[ScalePoint], machines: Sequence[str]) -> None:
    """Print one table and one chart of all machines. Speed-ups are against the first point that has a plan."""
    from pase.plan.answer import strategy_in_words
    from pase.plan.columns import columns
    from pase.plan.table import bytes_text
    from pase.questions.scale import number_text

    bar = "▒ ideal, █ reached"
    priced = any(p.cost_per_1e9_tokens is not None for p in points)
    tokens = any(p.tokens_per_s is not None for p in points)
    last = ("tokens/s", f"{'cost' if priced else 'hours'}/1e9 tokens") if tokens else ("device-seconds",)
    of_machine = ["machine"] if len(machines) > 1 else []
    names = (*of_machine, "devices", "step", "MFU", "memory", "fits", *last)
    out = columns(*names, left=("machine", "fits"), overflow="fold")
    chart = columns(
        *of_machine, "devices", "speed-up", bar, "split", left=("machine", bar, "split"), overflow="fold"
    )
    chart.columns[len(of_machine) + 2].no_wrap = True
    known = [(p, p.plan) for p in points if p.plan is not None]
    firsts = {p.machine: (p, plan) for p, plan in reversed(known)}
    gains = {p.at: known[0][1].cost / plan.cost for p, plan in known}
    ideals = {
        p.at: gains[firsts[p.machine][0].at] * p.devices / firsts[p.machine][0].devices for p, _ in known
    }
    most = max((*gains.values(), *ideals.values()), default=1.0)
    for p in points:
        named = [p.machine] if of_machine else []
        if p.plan is None:
            chart.add_row(*named, str(p.devices), "", "", p.why_not or "")
            continue
        row, gain, ideal = _row(p), gains[p.at], ideals[p.at]
        per_token = p.cost_per_1e9_tokens if priced else p.hours_per_1e9_tokens
        reached = min(round(_WIDTH * gain / most), _WIDTH)
        out.add_row(
            *named,
            str(p.devices),
            p.step,
            "" if row["mfu"] is None else f"{row['mfu']:.1%}",
            bytes_text(row["memory_bytes"]),
            "yes" if row["fits"] else "NO",
            *(
                (number_text(p.tokens_per_s), number_text(per_token))
                if tokens
                else (number_text(p.device_s),)
            ),
        )
        chart.add_row(
            *named,
            str(p.devices),
            f"×{gain:.2f}",
            "█" * reached + "▒" * max(round(_WIDTH * ideal / most) - reached, 0),
            strategy_in_words(p.plan) + (f", {p.plan.idle} idle" if p.plan.idle else ""),
        )
    measured = dict.fromkeys(plan.objective for _, plan in known)
    console().print(
        f"{model} on {', '.join(machines)}: the same global batch for each number of devices; "
        + ", ".join(["predictions", *measured])
    )
    console().print(out)
    console().print()
    console().print(chart)
