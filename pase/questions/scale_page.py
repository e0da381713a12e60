"""The page of ``pase scale``: one chart of speed against devices, the figures behind it, and the whole runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from pase.pages.charts import ChartLine, lines
from pase.pages.parts import key, table
from pase.pages.shell import Section, page
from pase.plan.table import bytes_text
from pase.questions.scale import ScalePoint, number_text
from pase.questions.training_run import UNCOUNTED

if TYPE_CHECKING:
    from pase.questions.training_run import TrainingRun

__all__ = ["scale_page", "whole_runs"]

_COLOURS = ("compute", "communication", "update", "ours", "backward", "other")


def scale_page(
    model: str,
    points: Sequence[ScalePoint],
    runs: Mapping[tuple[str, int], TrainingRun],
    date: str = "",
) -> str:
    """The page as text. Everything that comes from the user is escaped.

    runs: machine and number of devices -> what the whole run takes on them. date: the day on which the page is made,
    for its title.
    """
    machines = list(dict.fromkeys(p.machine for p in points))
    sections = [
        Section(anchor="speed", title="Speed", body=_chart(machines, points)),
        Section(anchor="figures", title="Figures", body=_figures(points)),
    ]
    if runs:
        sections.append(Section(anchor="runs", title="The whole run", body=whole_runs(runs)))
    return page(
        title=f"{model} on {', '.join(machines)}" + (f", {date}" if date else ""),
        lead=_lead(points),
        sections=sections,
        foot="<p>All figures are predictions of a cost model, not measurements. Each point is the best plan that fits, "
        "with the same global batch.</p>",
    )


def _named(p: ScalePoint) -> str:
    return f"{p.devices:,} devices of {p.machine}"


def _lead(points: Sequence[ScalePoint]) -> str:
    """The fastest point, and the cheapest one."""
    fitting = [p for p in points if p.plan is not None and p.plan.fits]
    if not fitting:
        return "<p class='verdict'>Nothing fits.</p>"
    said = []
    fastest = min(fitting, key=lambda p: p.plan.cost if p.plan is not None else 0.0)
    assert fastest.plan is not None
    said.append(f"Fastest: {_named(fastest)}, {fastest.step} a step")
    priced = [(p.cost_per_1e9_tokens, p) for p in fitting if p.cost_per_1e9_tokens is not None]
    hours = [(p.hours_per_1e9_tokens, p) for p in fitting if p.hours_per_1e9_tokens is not None]
    if priced:
        cost, cheapest = min(priced, key=lambda pair: pair[0])
        said.append(f"cheapest: {_named(cheapest)}, {cost:.3g} a billion tokens")
    elif hours:
        most, cheapest = min(hours, key=lambda pair: pair[0])
        said.append(f"fewest device-hours: {_named(cheapest)}, {most:.3g} a billion tokens")
    return f"<p class='verdict'>{escape('; '.join(said))}</p>"


def _chart(machines: Sequence[str], points: Sequence[ScalePoint]) -> str:
    """Speed against devices: tokens a second, or steps a second if the batch has no tokens. Dashed: ideal scaling."""
    known = [p for p in points if p.plan is not None and p.plan.cost]
    if not known:
        return "<p>There is no plan to draw.</p>"
    tokens = all(p.tokens_per_s is not None for p in known)

    def speed(p: ScalePoint) -> float:
        assert p.plan is not None
        return p.tokens_per_s if tokens and p.tokens_per_s is not None else 1 / p.plan.cost

    drawn: list[ChartLine] = []
    for k, m in enumerate(machines):
        mine = [p for p in known if p.machine == m]
        if not mine:
            continue
        first, colour = mine[0], _COLOURS[k % len(_COLOURS)]
        ideal = tuple((float(p.devices), speed(first) * p.devices / first.devices) for p in mine)
        drawn += [
            ChartLine(name=f"{m}, ideal", colour=colour, points=ideal, dashed=True),
            ChartLine(name=m, colour=colour, points=tuple((float(p.devices), speed(p)) for p in mine)),
        ]
    what = "tokens a second" if tokens else "steps a second"
    names = [(line.colour, line.name) for line in drawn if not line.dashed]
    return (
        lines(drawn, label=f"{what} against devices", across="devices", up=what)
        + key(names)
        + f"<p class='soft'>Up: {what}, all devices together. Dashed: as many times the first point's speed as it has "
        "more devices.</p>"
    )


def _figures(points: Sequence[ScalePoint]) -> str:
    priced = any(p.price is not None for p in points)
    head = ["machine", "devices>", "step>", "MFU>", "memory>", "tokens/s>", "device-hours/1e9 tokens>"]
    head += ["cost/1e9 tokens>"] if priced else []
    rows = []
    for p in points:
        if p.plan is None:
            rows.append(
                [escape(p.machine), f"{p.devices:,}", escape(p.why_not or ""), *[""] * (len(head) - 3)]
            )
            continue
        misfit = "" if p.plan.fits else " <span class='warn'>too much</span>"
        rows.append(
            [
                escape(p.machine),
                f"{p.devices:,}" + (f" ({p.plan.idle} idle)" if p.plan.idle else ""),
                p.step,
                "" if p.plan.throughput is None else f"{p.plan.throughput.mfu:.1%}",
                bytes_text(p.plan.memory.total) + misfit,
                number_text(p.tokens_per_s),
                number_text(p.hours_per_1e9_tokens),
                *([number_text(p.cost_per_1e9_tokens)] if priced else []),
            ]
        )
    return table("Figures", head, rows)


def whole_runs(runs: Mapping[tuple[str, int], TrainingRun]) -> str:
    """A table of what whole runs take. runs: machine and number of devices -> the run."""
    head = ["machine", "devices>", "days>", "days, none fail>", "failures>", "device-hours>", "MWh>", "cost>"]
    rows = (
        (
            escape(machine),
            f"{devices:,}",
            number_text(None if r.wall_s is None else r.wall_s / 86400),
            number_text(r.compute_s / 86400),
            number_text(r.failures),
            number_text(r.device_hours),
            number_text(None if r.energy_kwh is None else r.energy_kwh / 1e3),
            number_text(r.cost),
        )
        for (machine, devices), r in runs.items()
    )
    unknown = sorted({machine for (machine, _), r in runs.items() if r.wall_s is None})
    steps = next(iter(runs.values())).steps
    why = (
        f"The machine file of {escape(', '.join(unknown))} has no rate of failures, so days with failures are not "
        f"known; --failures states one. Without it, {UNCOUNTED}. "
        if unknown
        else ""
    )
    return (
        f"<p>{steps:,} steps.</p>{table('The whole run', head, rows)}"
        f"<p class='soft'>{why}Energy: of the devices alone, at their power limit.</p>"
    )
