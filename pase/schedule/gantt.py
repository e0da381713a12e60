"""Draw a steady iteration: compute and links as rows of bars. HTML needs nothing, PNG needs matplotlib."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pase.errors import PaseError
from pase.schedule.simulate import Evaluation, Interval
from pase.schedule.types import ScheduleProblem

__all__ = ["as_html", "write_gantt"]

FORWARD, BACKWARD = "#4e79a7", "#a0bbd8"
MESSAGES = ("#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1")
"""In turn, so that neighbours differ."""
MOST_DRAWN = 60
"""Policies on one picture; more would be too high for a file that anybody can open."""


def _rows(
    problem: ScheduleProblem, e: Evaluation
) -> list[tuple[str, list[tuple[Interval, float, float, str]]]]:
    """(row, [(interval, start, end, colour)]) with times in ms within the iteration, compute first."""
    phase = {b.name: b.phase for b in problem.blocks}
    out = []
    for name in ("compute", *(link.name for link in problem.links)):
        bars = []
        for i in e.timeline:
            if i.resource != name or (i.message is None) != (name == "compute"):
                continue
            if i.message is None:
                colour = FORWARD if phase[i.name] == "forward" else BACKWARD
            else:
                colour = MESSAGES[i.message % len(MESSAGES)]
            bars.append((i, max(i.start_s, 0.0) * 1e3, i.end_s * 1e3, colour))
        out.append((name, bars))
    return out


def _span_ms(e: Evaluation) -> float:
    return max([e.iteration_s, *(i.end_s for i in e.timeline)]) * 1e3


def _ends_ms(e: Evaluation) -> list[float]:
    """Ends of the iterations that are drawn: one, or those of a period of delayed updates."""
    last = max((i.end_s for i in e.timeline if i.message is None), default=e.iteration_s)
    return [e.iteration_s * 1e3 * (k + 1) for k in range(max(1, round(last / e.iteration_s)))]


def _title(e: Evaluation) -> str:
    late = f", updates up to {e.staleness} late" if e.staleness else ""
    return (
        f"{e.policy}: {e.iteration_s * 1e3:.3f} ms an iteration, exposed {e.exposed_s * 1e3:.3f} ms, "
        f"{e.messages} message{'s' if e.messages != 1 else ''}{late}"
    )


def as_html(problem: ScheduleProblem, evaluations: Sequence[Evaluation]) -> str:
    """One self-contained page, one drawing per policy on a common time axis; bars name themselves on hover."""
    width, left = 1100.0, 130.0
    span = max(_span_ms(e) for e in evaluations)
    scale = width / span if span > 0 else 1.0
    out = [
        "<!doctype html><meta charset='utf-8'><title>",
        html.escape(problem.name),
        "</title><style>body{font:13px sans-serif;margin:24px}h2{font-size:14px;margin:18px 0 4px}"
        "text{font:11px sans-serif}i{display:inline-block;width:10px;height:10px;margin:0 4px 0 12px}</style><h1>",
        html.escape(problem.name),
        f"</h1><p><i style='background:{FORWARD}'></i>forward<i style='background:{BACKWARD}'></i>backward"
        f"<i style='background:{MESSAGES[0]}'></i>messages, in several colours · a line where an iteration ends</p>",
    ]
    for e in evaluations:
        rows = _rows(problem, e)
        height = 26 * len(rows) + 18
        out.append(
            f"<h2>{html.escape(_title(e))}</h2><svg width='{width + left + 20:.0f}' height='{height}' role='img'>"
        )
        for r, (name, bars) in enumerate(rows):
            y = 26 * r
            out.append(f"<text x='0' y='{y + 15}'>{html.escape(name)}</text>")
            for i, a, b, colour in bars:
                label = f"{i.name}: {i.start_s * 1e3:.3f} to {i.end_s * 1e3:.3f} ms"
                wide = max(0.4, (b - a) * scale)
                edge = " stroke='white' stroke-width='0.4'" if wide > 3 else ""
                out.append(
                    f"<rect x='{left + a * scale:.2f}' y='{y}' width='{wide:.2f}' height='20' fill='{colour}'{edge}>"
                    f"<title>{html.escape(label)}</title></rect>"
                )
        foot = height - 4
        out.append(f"<text x='{left:.0f}' y='{foot}'>0</text>")
        for ms in _ends_ms(e):
            end = left + ms * scale
            out.append(
                f"<line x1='{end:.1f}' x2='{end:.1f}' y1='0' y2='{height - 16}' stroke='black'/>"
                f"<text x='{end:.1f}' y='{foot}' text-anchor='middle'>{ms:.4g} ms</text>"
            )
        out.append("</svg>")
    return "".join(out)


def write_gantt(path: Path, problem: ScheduleProblem, evaluations: Sequence[Evaluation]) -> None:
    """Write .html or .png, by the name's ending."""
    if not evaluations:
        raise PaseError("nothing to draw: no policy applied")
    if path.suffix == ".html":
        path.write_text(as_html(problem, evaluations), encoding="utf-8")
        return
    if path.suffix != ".png":
        raise PaseError(f"--gantt {path}: write to .html or .png")
    _figure(problem, evaluations[:MOST_DRAWN]).savefig(path, dpi=120)


def _figure(problem: ScheduleProblem, evaluations: Sequence[Evaluation]) -> Any:
    """A matplotlib Figure, one panel per policy on a common time axis."""
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise PaseError(
            "--gantt to .png needs matplotlib: pip install matplotlib; or write .html"
        ) from missing
    from matplotlib.patches import Patch

    panels = [_rows(problem, e) for e in evaluations]
    heights = [len(rows) for rows in panels]
    total = sum(0.26 * n + 0.55 for n in heights) + 0.9
    figure = Figure(figsize=(12, total), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=[n + 1 for n in heights])
    span = max(_span_ms(e) for e in evaluations)
    for ax, e, rows in zip(axes[:, 0], evaluations, panels, strict=True):
        for r, (_, bars) in enumerate(rows):
            if bars:
                ax.broken_barh(
                    [(a, b - a) for _, a, b, _ in bars],
                    (r - 0.38, 0.76),
                    facecolors=[c for *_, c in bars],
                    edgecolor="white",
                    linewidth=0.3,
                )
        for ms in _ends_ms(e):
            ax.axvline(ms, color="black", linewidth=1)
        ax.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
        ax.set_ylim(len(rows) - 0.45, -0.55)
        ax.set_xlim(0, span * 1.01)
        ax.set_title(_title(e), fontsize=9, loc="left")
        ax.tick_params(axis="x", labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("ms", fontsize=8)
    figure.suptitle(problem.name, fontsize=11)
    figure.legend(
        handles=[
            Patch(color=FORWARD, label="forward"),
            Patch(color=BACKWARD, label="backward"),
            Patch(color=MESSAGES[0], label="messages, in several colours"),
        ],
        loc="outside lower right",
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    return figure
