"""Draw a steady iteration: compute and links as rows of bars. HTML needs nothing; PNG needs plotly and kaleido."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pase.errors import PaseError
from pase.schedule.simulate import Evaluation, Interval
from pase.schedule.types import Problem

__all__ = ["as_html", "write_gantt"]

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")


def _rows(problem: Problem, e: Evaluation) -> list[tuple[str, list[Interval]]]:
    names = ["compute", *(link.name for link in problem.links)]
    return [(n, [i for i in e.timeline if i.resource == n]) for n in names]


def _span(e: Evaluation) -> float:
    return max([e.iteration_s, *(i.end_s for i in e.timeline)])


def as_html(problem: Problem, evaluations: Sequence[Evaluation]) -> str:
    """One self-contained page, one drawing per policy on a common time axis; bars name themselves on hover."""
    width = 1100.0
    span = max(_span(e) for e in evaluations)
    scale = width / span if span > 0 else 1.0
    out = [
        "<!doctype html><meta charset='utf-8'><title>",
        html.escape(problem.name),
        "</title><style>body{font:13px sans-serif;margin:24px}h2{font-size:14px;margin:18px 0 4px}"
        "text{font:11px sans-serif}</style><h1>",
        html.escape(problem.name),
        "</h1>",
    ]
    for e in evaluations:
        rows = _rows(problem, e)
        height = 26 * len(rows) + 18
        out.append(
            f"<h2>{html.escape(e.policy)}: {e.iteration_s * 1e3:.3f} ms an iteration, exposed "
            f"{e.exposed_s * 1e3:.3f} ms, {e.messages} messages</h2><svg width='{width + 130:.0f}' height='{height}'>"
        )
        for r, (name, intervals) in enumerate(rows):
            y = 26 * r
            out.append(f"<text x='0' y='{y + 15}'>{html.escape(name)}</text>")
            for n, i in enumerate(intervals):
                x, w = 120 + max(0.0, i.start_s) * scale, max(0.4, (i.end_s - max(0.0, i.start_s)) * scale)
                colour = COLOURS[i.iteration % 2] if r == 0 else COLOURS[2 + n % (len(COLOURS) - 2)]
                label = f"{i.name}: {i.start_s * 1e3:.3f} to {i.end_s * 1e3:.3f} ms"
                out.append(
                    f"<rect x='{x:.2f}' y='{y}' width='{w:.2f}' height='20' fill='{colour}' stroke='white' "
                    f"stroke-width='0.4'><title>{html.escape(label)}</title></rect>"
                )
        end = 120 + e.iteration_s * scale
        out.append(f"<line x1='{end:.1f}' x2='{end:.1f}' y1='0' y2='{height - 16}' stroke='black'/></svg>")
    return "".join(out)


def write_gantt(path: Path, problem: Problem, evaluations: Sequence[Evaluation]) -> None:
    """Write .html or .png, by the name's ending."""
    if not evaluations:
        raise PaseError("nothing to draw: no policy applied")
    if path.suffix == ".html":
        path.write_text(as_html(problem, evaluations), encoding="utf-8")
        return
    if path.suffix != ".png":
        raise PaseError(f"--gantt {path}: write to .html or .png")
    figure = _figure(problem, evaluations)
    try:
        figure.write_image(str(path))
    except (ValueError, RuntimeError, ImportError) as e:
        raise PaseError(
            f"--gantt {path}: PNG needs kaleido and a browser for plotly ({e}); write .html"
        ) from e


def _figure(problem: Problem, evaluations: Sequence[Evaluation]) -> Any:
    try:
        import plotly.graph_objects as go
    except ImportError as e:
        raise PaseError(
            "--gantt to .png needs plotly and kaleido: pip install plotly kaleido; or write .html"
        ) from e
    figure = go.Figure()
    for shown in evaluations:
        for r, (name, intervals) in enumerate(_rows(problem, shown)):
            figure.add_bar(
                y=[f"{shown.policy}: {name}"] * len(intervals),
                x=[(i.end_s - i.start_s) * 1e3 for i in intervals],
                base=[i.start_s * 1e3 for i in intervals],
                orientation="h",
                marker_color=[
                    COLOURS[i.iteration % 2 if r == 0 else 2 + n % 6] for n, i in enumerate(intervals)
                ],
                hovertext=[i.name for i in intervals],
                showlegend=False,
            )
    figure.update_layout(
        title=problem.name, barmode="overlay", xaxis_title="ms", height=120 + 60 * len(evaluations)
    )
    return figure
