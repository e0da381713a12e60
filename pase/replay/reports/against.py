"""Shows a plan's prediction beside what a trace measured, from the JSON of ``pase.bridges.plan_trace``."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator

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
    return (
        f"<p>The plan predicts {report['predicted_s'] * 1e3:.3f} ms a step; rank {report['rank']} measured "
        f"{report['measured_s'] * 1e3:.3f} ms. The differences add up to that of the step.</p>{notes}"
        + table("Assumptions that were off", ["assumption", "ms>", "|", "what"], assumptions)
        + table(
            f"Matched by {report['matched_by']}",
            ["work", "predicted ms>", "measured ms>", "difference ms>", "in the trace"],
            rows,
        )
    )
