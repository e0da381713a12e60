"""Draws a steady iteration with compute and links as rows of bars, as HTML or as PNG. PNG needs matplotlib."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.files.atomic import write_atomically
from pase.files.json_values import JsonObject
from pase.files.quantities import cost_text
from pase.schedule.simulate import Evaluation, Interval
from pase.schedule.types import ScheduleProblem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["as_html", "drawn_iteration", "write_gantt"]

FORWARD, BACKWARD = "#4e79a7", "#a0bbd8"
MESSAGES = ("#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1")
"""Colours of messages, used cyclically so that neighbours differ."""
MOST_DRAWN = 60
"""Largest number of policies on one picture. Ordinary viewers cannot open a picture that is taller."""


def _rows(
    problem: ScheduleProblem, e: Evaluation
) -> list[tuple[str, list[tuple[Interval, float, float, str]]]]:
    """Rows (name, [(interval, start, end, colour)]), compute first. Times are in ms from the iteration's start."""
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
    """Ends in ms of the iterations that are drawn: one, or all iterations of a period with delayed updates."""
    last = max((i.end_s for i in e.timeline if i.message is None), default=e.iteration_s)
    return [e.iteration_s * 1e3 * (k + 1) for k in range(max(1, round(last / e.iteration_s)))]


def _title(e: Evaluation) -> str:
    late = f", updates up to {e.staleness} late" if e.staleness else ""
    return (
        f"{e.policy}: {cost_text(e.iteration_s, 's')} an iteration, exposed {cost_text(e.exposed_s, 's')}, "
        f"{e.messages} message{'s' if e.messages != 1 else ''}{late}"
    )


def as_html(problem: ScheduleProblem, evaluations: Sequence[Evaluation], date: str = "") -> str:
    """A self-contained page that compares the policies and has a searchable timeline with zoom for each.

    date: the day on which the page is made, for its title.
    """
    from pase.pages.parts import bar, table
    from pase.pages.shell import Section, page
    from pase.pages.streams import timeline_mount

    best = sorted(evaluations, key=lambda e: e.iteration_s)
    most = best[-1].iteration_s
    compared = table(
        "Policies compared",
        ["policy", "iteration>", "to the first>", "exposed>", "messages>", "updates late>", "|"],
        (
            (
                html.escape(e.policy),
                cost_text(e.iteration_s, "s"),
                "" if e is best[0] else f"{e.iteration_s / best[0].iteration_s - 1:+.2%}",
                cost_text(e.exposed_s, "s"),
                str(e.messages),
                str(e.staleness or ""),
                bar([("compute", e.compute_s), ("communication", e.iteration_s - e.compute_s)], most),
            )
            for e in best
        ),
    )
    span = max(map(_span_ms, best))  # one axis, so that lengths can be compared
    timelines = {str(k): drawn_iteration(problem, e, span) for k, e in enumerate(best)}
    drawn = (f"<h3>{html.escape(_title(e))}</h3>{timeline_mount(str(k))}" for k, e in enumerate(best))
    return page(
        title=f"When gradients are sent: {problem.name}" + (f", {date}" if date else ""),
        lead=f"<p class='verdict'>{html.escape(_verdict(best))}</p><p>One steady iteration under each policy: the "
        "blocks of compute, and the messages on each link.</p>",
        sections=[
            Section(anchor="policies", title="Policies compared", body=compared),
            Section(anchor="timelines", title="The iteration under each policy", body="".join(drawn)),
        ],
        foot="<p>All figures are simulated, not measured.</p>",
        widgets=("timeline",),
        data={"unit": "s", "timelines": timelines},
    )


def _verdict(best: Sequence[Evaluation]) -> str:
    """Which policy is the fastest, and how much it saves against the others. best: fastest first."""
    first, *others = best
    text = f"{first.policy}: {cost_text(first.iteration_s, 's')} an iteration"
    if not others:
        return text
    second, last = (others[k].iteration_s / first.iteration_s - 1 for k in (0, -1))
    return f"{text}; {others[0].policy} takes {second:.1%} more" + (
        f", and {others[-1].policy}, the slowest, {last:.1%} more" if len(others) > 1 else ""
    )


def drawn_iteration(problem: ScheduleProblem, e: Evaluation, span_ms: float = 0.0) -> JsonObject:
    """A steady iteration as data for the timeline widget: one stream for compute and one for each link.

    span_ms: the least length of the time axis.
    """
    from pase.pages.streams import StreamBox, drawn_streams

    phase = {b.name: b.phase for b in problem.blocks}
    compute = "compute" if all(link.name != "compute" for link in problem.links) else "compute stream"
    streams: dict[str, list[StreamBox]] = {compute: [], **{link.name: [] for link in problem.links}}
    for i in e.timeline:
        kind = 2 if i.message is not None else int(phase[i.name] == "backward")
        start, end = max(round(i.start_s * 1e9), 0), round(i.end_s * 1e9)
        row = compute if i.message is None else i.resource
        streams[row].append(StreamBox(label=i.name, kind=kind, start_ns=start, length_ns=end - start))
    return drawn_streams(
        f"Timeline of {e.policy}",
        streams,
        [("forward", "compute"), ("backward", "backward"), ("communication", "communication")],
        end_ns=round(max(_span_ms(e), span_ms) * 1e6),
        hint=f"An iteration takes {cost_text(e.iteration_s, 's')}. Click a box, or use the arrow keys, to read it; "
        "drag to move; Ctrl and the wheel, or two fingers, zoom.",
    )


def write_gantt(
    path: Path, problem: ScheduleProblem, evaluations: Sequence[Evaluation], date: str = ""
) -> None:
    """Write an .html or .png file, depending on the suffix of the path. date: as in ``as_html``."""
    if not evaluations:
        raise PaseError(
            "there is nothing to draw, because no policy applies",
            where="--gantt",
            fix="choose other policies",
        )
    if path.suffix == ".html":
        write_atomically(path, as_html(problem, evaluations, date))
        return
    if path.suffix != ".png":
        raise PaseError(
            f"'{path}' is not a file name for a drawing",
            where="--gantt",
            fix="give a name that ends in .html or .png",
        )
    _figure(problem, evaluations[:MOST_DRAWN]).savefig(path, dpi=120)


def _figure(problem: ScheduleProblem, evaluations: Sequence[Evaluation]) -> Figure:
    """A matplotlib Figure with one panel per policy and a common time axis."""
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise PaseError(
            "matplotlib is not installed, which .png needs",
            where="--gantt",
            fix="run pip install matplotlib, or write .html",
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
