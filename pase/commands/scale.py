"""``pase scale``: compares numbers of devices for one model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from pase.commands.options import JsonOption, ModelName, compile_options, print_json, progress
from pase.compiler.problem.options import CompileOptions
from pase.files.json_values import JsonObject
from pase.files.terminal import console

if TYPE_CHECKING:
    from pase.questions.scale import ScalePoint
    from pase.questions.training_run import RunTerms, TrainingRun

__all__ = ["scale"]

PURPOSE = "Plan"

_WIDTH = 36


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
        float | None,
        typer.Option(
            help="What a run over this many tokens takes: days, failures, energy. 15e12", metavar="N"
        ),
    ] = None,
    failures: Annotated[
        float | None,
        typer.Option(
            help="With --tokens: failures per device-hour that stop the run. Default: the machine file's.",
            metavar="RATE",
        ),
    ] = None,
    checkpoint: Annotated[
        float, typer.Option(help="With --tokens: seconds for which training waits for a checkpoint.")
    ] = 60.0,
    restart: Annotated[
        float, typer.Option(help="With --tokens: seconds from a failure to the next step.")
    ] = 600.0,
    price: Annotated[
        float | None, typer.Option(help="With --tokens: the price of a device-hour, in any currency.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare numbers of devices: step, MFU, memory and cost.

    Finds the best plan for each number of devices, for the same model and the same global batch.

    Prints a table with the step time, MFU, memory and cost of each, and a chart of the speed-up. The cost is that of
    all devices together: device-seconds per step, and device-hours per billion tokens.

    With --tokens, a third table has the whole run: expected days with failures and with checkpoints as often as is
    best for that rate of failures, device-hours, energy at the cards' power limit, and the cost at --price. A figure
    that depends on an unknown one is left empty.

    \b
    Examples:
      pase scale zoo:gpt2 --devices 8..64
      pase scale 'zoo:llama3_8b?batch=512&attention=fused' --devices 32..512
      pase scale 'zoo:llama3_8b?batch=512&attention=fused' --devices 64..512 \\
                 --tokens 15e12 --price 2.5
    """
    from pase.errors import PaseError
    from pase.questions.scale import parse_devices
    from pase.questions.scale import scale as scaled
    from pase.questions.training_run import RunTerms

    numbers = parse_devices(devices)
    if tokens is None and (failures is not None or price is not None):
        raise PaseError(
            "it is about a whole run, whose length is not given",
            where="--failures" if failures is not None else "--price",
            fix="add --tokens 15e12",
        )
    terms = None
    if tokens is not None:
        terms = RunTerms(
            tokens=tokens,
            checkpoint_s=checkpoint,
            restart_s=restart,
            failures_per_device_hour=failures,
            price=price,
        )
    with progress() as say:
        points = scaled(model, numbers, replace(options, baselines=False), say)
    runs = {} if terms is None else _runs(points, options, terms)
    if json:
        rows = [_row(p) | ({"run": runs[p.devices].to_json()} if p.devices in runs else {}) for p in points]
        print_json({"model": model, "points": rows})
        return
    _print(model, points)
    if terms is not None:
        _print_runs(runs, terms)


def _runs(points: list[ScalePoint], options: CompileOptions, terms: RunTerms) -> dict[int, TrainingRun]:
    """Number of devices -> the whole run on them."""
    from pase.machine import DEFAULT, Machine, load
    from pase.questions.training_run import training_run

    m = options.machine
    machine = m if isinstance(m, Machine) else load(m if m is not None else DEFAULT)
    return {p.devices: training_run(p.plan, machine, p.devices, terms) for p in points if p.plan is not None}


def _print_runs(runs: dict[int, TrainingRun], terms: RunTerms) -> None:
    from pase.plan.columns import columns

    def text(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"

    names = "devices", "days", "days, none fail", "failures", "save every", "device- hours", "MWh", "cost"
    table = columns(*names, overflow="fold")
    for devices, r in runs.items():
        every = r.checkpoint_every_s
        table.add_row(
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
    if any(r.wall_s is None for r in runs.values()):
        out.print("The machine file has no rate of failures: state one with --failures, such as 2e-5.")


def _row(p: ScalePoint) -> JsonObject:
    from pase.commands.compile import rates

    if p.plan is None:
        return {"devices": p.devices, "why_not": p.why_not}
    tokens = None if p.plan.work is None else p.plan.work.tokens
    return {
        "devices": p.devices,
        "idle": p.plan.idle,
        "mesh": p.plan.mesh.by_name,
        "cost": p.plan.cost,
        "unit": p.plan.unit,
        **rates(p.plan),
        "memory_bytes": p.plan.memory.total,
        "fits": p.plan.fits,
        "device_s": p.device_s,
        "device_hours_per_1e9_tokens": p.device_s / tokens * 1e9 / 3600 if p.device_s and tokens else None,
        "why_not": None,
    }


def _print(model: str, points: list[ScalePoint]) -> None:
    from pase.plan.columns import columns
    from pase.plan.table import bytes_text, cost_text

    bar = "▒ ideal, █ reached"
    names = ("devices", "step", "MFU", "memory", "fits", "device-seconds", "hours/1e9 tokens")
    out = columns(*names, left=("fits",), overflow="fold")
    chart = columns("devices", "speed-up", bar, "mesh", left=(bar, "mesh"), overflow="fold")
    chart.columns[2].no_wrap = True
    known = [p for p in points if p.plan is not None]
    first = known[0] if known else None
    most = known[-1].devices / first.devices if first is not None else 1.0
    for p in points:
        if p.plan is None or first is None or first.plan is None:
            chart.add_row(str(p.devices), "", "", p.why_not or "")
            continue
        row, gain, ideal = _row(p), first.plan.cost / p.plan.cost, p.devices / first.devices
        hours = row["device_hours_per_1e9_tokens"]
        reached = min(round(_WIDTH * gain / most), _WIDTH)
        out.add_row(
            str(p.devices),
            cost_text(p.plan.cost, p.plan.unit),
            "" if row["mfu"] is None else f"{row['mfu']:.1%}",
            bytes_text(row["memory_bytes"]),
            "yes" if row["fits"] else "NO",
            f"{p.device_s:.3g}",
            "" if hours is None else f"{hours:.3g}",
        )
        chart.add_row(
            str(p.devices),
            f"×{gain:.2f}",
            "█" * reached + "▒" * max(round(_WIDTH * ideal / most) - reached, 0),
            " ".join(f"{k}={v}" for k, v in row["mesh"].items())
            + (f", {p.plan.idle} idle" if p.plan.idle else ""),
        )
    plan = first.plan if first is not None else None
    name, measured = ("", "") if plan is None else (plan.machine, f", {plan.objective}")
    console().print(
        f"{model} on {name}: the same global batch for each number of devices; predictions{measured}"
    )
    console().print(out)
    console().print()
    console().print(chart)
