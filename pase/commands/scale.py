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
    json: JsonOption = False,
) -> None:
    """Compare numbers of devices: step, MFU, memory and cost.

    Finds the best plan for each number of devices, for the same model and the same global batch.

    Prints a table with the step time, MFU, memory and cost of each, and a chart of the speed-up. The cost is that of
    all devices together: device-seconds per step, and device-hours per billion tokens.

    \b
    Examples:
      pase scale zoo:gpt2 --devices 8..64
      pase scale 'zoo:llama3_8b?batch=512&attention=fused' --devices 32..512
    """
    from pase.questions.scale import parse_devices
    from pase.questions.scale import scale as scaled

    numbers = parse_devices(devices)
    with progress() as say:
        points = scaled(model, numbers, replace(options, baselines=False), say)
    if json:
        print_json({"model": model, "points": [_row(p) for p in points]})
        return
    _print(model, points)


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
