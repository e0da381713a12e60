"""Shows a plan's prediction beside what a trace measured, from the JSON of ``pase.bridges.plan_trace``."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator, Sequence

from pase.files.json_values import JsonObject
from pase.pages.parts import bar, table

__all__ = ["against_lines", "against_section"]

_COLUMNS = 80
_MOST = 12
_WORTH = 0.001
"""Assumptions below this part of the step are summed in the text; --json and the page have all."""

_WHOLE = {"light": "light ops of other lines", "update": "the update"}


def against_lines(report: JsonObject, most: int = _MOST) -> Iterator[str]:
    """Yields the lines of the comparison, in 80 columns. most: the number of rows."""
    before, after = report["predicted_s"], report["measured_s"]
    yield (
        f"plan against trace: {before * 1e3:.2f} ms predicted, {after * 1e3:.2f} ms measured "
        f"({(after / before - 1) if before else 0:+.1%})"
    )
    for note in report["notes"]:
        yield from textwrap.wrap(f"note: {note}", _COLUMNS)
    if report["stages"]:
        yield ""
        yield from _stage_lines(report["stages"])
    yield ""
    yield f"{'ms':>9}  what the prediction assumed otherwise"
    small = 0.0
    for a in report["assumptions"]:
        if abs(a["difference_s"]) < _WORTH * after:
            small += a["difference_s"]
            continue
        first, *more = textwrap.wrap(f"{a['name']}: {a['what']}", _COLUMNS - 11)
        yield f"{a['difference_s'] * 1e3:+9.3f}  {first}"
        for line in more:
            yield f"{'':11}{line}"
    if small:
        yield f"{small * 1e3:+9.3f}  other assumptions, below 0.1% each (--json has them)"
    yield ""
    yield f"{'predicted':>10}{'measured':>10}{'ms':>9}{'calls':>12}  by {report['matched_by']}"
    for r in report["rows"][:most]:
        calls = f"{r['predicted_calls']:.0f}/{r['measured_calls']:.0f}"
        yield (
            f"{r['predicted_s'] * 1e3:10.3f}{r['measured_s'] * 1e3:10.3f}"
            f"{(r['measured_s'] - r['predicted_s']) * 1e3:+9.3f}{calls:>12}  {_label(r)}"
        )[:_COLUMNS]
    if len(report["rows"]) > most:
        yield f"... and {len(report['rows']) - most} more (--json has them)"


def _stage_lines(stages: Sequence[JsonObject]) -> Iterator[str]:
    yield f"{'':16}{'works':>16}{'idle or waits':>20}"
    yield f"{'rank':>6}  {'stages':8}{'predicted':>10}{'measured':>10}{'predicted':>10}{'measured':>10}  ms"
    for r in stages:
        yield f"{r['rank']:>6}  {_numbers(r['stages'])[:8]:8}" + "".join(f"{cell:>10}" for cell in _times(r))


def _numbers(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


def _times(r: JsonObject) -> list[str]:
    seconds = (r[k] for k in ("predicted_s", "measured_s", "predicted_idle_s", "measured_idle_s"))
    return ["" if s is None else f"{s * 1e3:.3f}" for s in seconds]


def _label(r: JsonObject) -> str:
    names = r["predicted"] or r["measured"]
    if not r["where"] and r["group"] in _WHOLE and len(names) > 1:
        return _WHOLE[r["group"]]
    shown = names[0] + (f" +{len(names) - 1}" if len(names) > 1 else "")
    if not r["predicted"]:
        shown += " (trace only)"
    if not r["measured"]:
        shown += " (plan only)"
    return f"{r['where']} {r['group'] if r['where'] and r['group'] != 'collectives' else shown}".strip()


def against_section(report: JsonObject) -> str:
    """Returns the comparison as HTML: the assumptions, then all rows."""
    most = max((abs(a["difference_s"]) for a in report["assumptions"]), default=0.0)
    assumptions = (
        (
            html.escape(a["name"]),
            f"{a['difference_s'] * 1e3:+.3f}",
            bar([("ours" if a["difference_s"] < 0 else "compute", abs(a["difference_s"]))], most),
            html.escape(a["what"]),
        )
        for a in report["assumptions"]
    )
    rows = (
        (
            html.escape(_label(r)),
            f"{r['predicted_s'] * 1e3:.3f}",
            f"{r['measured_s'] * 1e3:.3f}",
            f"{(r['measured_s'] - r['predicted_s']) * 1e3:+.3f}",
            html.escape(", ".join(r["measured"][:4])),
        )
        for r in report["rows"]
    )
    notes = "".join(f"<p>{html.escape(n)}</p>" for n in report["notes"])
    ranks = report["ranks"]
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"the mean over {len(ranks)} ranks"
    stages = table(
        "The pipeline's ranks",
        [
            "rank",
            "stages",
            "works, predicted ms>",
            "measured ms>",
            "idle or waits, predicted ms>",
            "measured ms>",
        ],
        ((str(r["rank"]), _numbers(r["stages"]), *_times(r)) for r in report["stages"]),
    )
    return (
        f"<p>The plan predicts {report['predicted_s'] * 1e3:.3f} ms a step; {who} measured "
        f"{report['measured_s'] * 1e3:.3f} ms. The differences add up to that of the step.</p>{notes}"
        + (stages if report["stages"] else "")
        + table("Assumptions that were off", ["assumption", "ms>", "|", "what"], assumptions)
        + table(
            f"Matched by {report['matched_by']}",
            ["work", "predicted ms>", "measured ms>", "difference ms>", "in the trace"],
            rows,
        )
    )
