"""Renders a diagnosis as an HTML page: findings, where the time goes, and the iteration as an interactive timeline."""

from __future__ import annotations

import html
from pathlib import Path

import numpy as np

from pase.files.json_values import JsonObject
from pase.files.quantities import cost_text
from pase.pages.parts import bar, table
from pase.pages.shell import Section, page
from pase.pages.streams import StreamBox, drawn_streams, timeline_mount
from pase.replay.reports.against import against_section
from pase.replay.reports.diagnose import Diagnosis
from pase.replay.reports.sent import sent_section
from pase.replay.reports.spent import spent_section
from pase.replay.simulation.simulate import replay_graph
from pase.replay.types import COLLECTIVE, GPU_KINDS, KINDS

__all__ = ["diagnosis_page"]

_MOST = 60_000
"""The page has at most this many boxes (the longest ones), so that it renders fast and the file stays small."""
_MOST_RANKS = 8
_DRAWN = [
    ("compute", "compute"),
    ("communication", "communication"),
    ("host", "other"),
    ("critical path", "ours"),
]
_COMPUTE, _COMMUNICATION, _HOST, _CRITICAL = range(4)


def diagnosis_page(d: Diagnosis, report: JsonObject) -> str:
    """Returns the page as text. report: the values of ``diagnosis_report``."""
    drawn, left_out = _drawn(d)
    sections = [
        Section(
            anchor="time",
            title="Where the time goes",
            body="".join(_where_time_goes(r) for r in report["ranks"]),
        )
    ]
    if "plan" in report:
        plan = against_section(report["plan"])
        sections.append(Section(anchor="plan", title="Plan against trace", body=plan))
    found = "".join(_finding(f, report["tested"]) for f in report["findings"])
    sections.append(Section(anchor="findings", title="What would save time", body=found))
    if report["collectives"]:
        sent = sent_section(report["collectives"])
        sections.append(Section(anchor="sent", title="What collectives send", body=sent))
    drawing = f"{timeline_mount('iteration')}<p class='soft'>{left_out}</p>"
    sections.append(Section(anchor="timeline", title="The replayed iteration", body=drawing))
    if report["spent"]:
        slowest = max(report["spent"], key=lambda x: x["step_s"])
        title = f"Kinds of work and ops of rank {slowest['rank']}"
        sections.append(Section(anchor="ops", title=title, body=spent_section(slowest)))
    if report["problems"]:
        notes = "".join(f"<li>{html.escape(p)}" for p in report["problems"])
        sections.append(Section(anchor="notes", title="Notes on the traces", body=f"<ul>{notes}</ul>"))
    lead = (
        f"<p><strong>{html.escape(report['headline'])}</strong></p>"
        f"<p>The replay takes {cost_text(report['replayed_s'], 's')}. Each saving is this time minus that of a replay "
        "without the cause; savings overlap. Times of evidence count from the beginning of the trace.</p>"
    )
    return page(
        title=f"Why {Path(report['source']).name} takes {cost_text(report['measured_s'], 's')} an iteration",
        lead=lead,
        sections=sections,
        widgets=("timeline", "tables"),
        data={"unit": "s", "timelines": {"iteration": drawn}},
    )


def _finding(f: JsonObject, tested: bool) -> str:
    seen = f"{cost_text(f['measured_s'], 's')} measured" if f["measured_s"] else "remark"
    cost = (
        f"saves {cost_text(f['cost_s'], 's')} ({f['share']:.1%}{'' if tested else ', error unknown'})"
        if f["cost_s"]
        else seen
    )
    where = "; ".join(
        f"rank {e['rank']}: {html.escape(e['name'][:90])} at {e['start_s'] * 1e3:.3f} ms for "
        f"{e['seconds'] * 1e6:.1f} µs"
        for e in f["evidence"]
    )
    return (
        f"<div class='finding{'' if f['cost_s'] else ' remark'}'><span class='cost'>{cost}</span>"
        f"<h3>{html.escape(f['title'])}</h3><p>{html.escape(f['detail'])}</p>"
        + (f"<p class='soft'>Evidence: {where}</p>" if where else "")
        + "</div>"
    )


def _where_time_goes(r: JsonObject) -> str:
    most = max((p["seconds"] for p in r["parts"]), default=0.0)
    rows = (
        (
            html.escape(p["in_words"] + (f" ({p['what']})" if p["what"] else "")),
            cost_text(p["seconds"], "s"),
            f"{p['seconds'] / r['measured_s']:.1%}" if r["measured_s"] else "",
            bar([("compute", p["seconds"])], most),
        )
        for p in sorted(r["parts"], key=lambda p: -p["seconds"])
    )
    title = f"Rank {r['rank']}: {cost_text(r['measured_s'], 's')}"
    return f"<h3>{title}</h3>" + table(title, ["part", "time>", "share>", "|"], rows)


def _named(d: Diagnosis) -> dict[int, str]:
    """Returns device task → the user's name of its op, with its module or line."""
    g = d.run.graph
    of = {e: o for s in d.spent for o, events in s.events.items() for e in events}
    tasks = np.flatnonzero(g.event >= 0).tolist()
    found = ((i, of.get(int(g.event[i]))) for i in tasks)
    return {i: o.name + (f", {o.where}" if o.where else "") for i, o in found if o is not None}


def _drawn(d: Diagnosis) -> tuple[JsonObject, str]:
    """Returns the replayed iteration with its critical path for the timeline widget, and a note on what is left out."""
    g = d.run.graph
    r = replay_graph(g)
    critical = {s.task % len(g) for s in d.run.replay.path()}
    ranks = list(g.ranks[:_MOST_RANKS])
    devices = sorted(
        (i for i, x in enumerate(g.devices) if x.rank in ranks), key=lambda i: (g.devices[i].rank, i)
    )
    streams: dict[int, list[StreamBox]] = {i: [] for i in devices}
    named = _named(d)
    there = np.flatnonzero(np.isin(g.device, devices) & (r.finish_ns - r.start_ns > 0))
    shown = there[np.argsort(-(r.finish_ns - r.start_ns)[there], kind="stable")[:_MOST]]
    for i in shown.tolist():
        kind = _HOST
        if int(g.kind[i]) in GPU_KINDS:
            kind = _COMMUNICATION if g.kind[i] == COLLECTIVE else _COMPUTE
        streams[int(g.device[i])].append(
            StreamBox(
                label=named[i][:200] if i in named else g.task_name(i)[:200],
                kind=_CRITICAL if i in critical else kind,
                start_ns=round(float(r.start_ns[i])),
                length_ns=round(float(r.finish_ns[i] - r.start_ns[i])),
                more=g.task_name(i)[:200] if i in named else KINDS[int(g.kind[i])],
            )
        )
    drawn = drawn_streams(
        "Timeline of the replayed iteration",
        {f"rank {g.devices[i].rank} {g.devices[i].name}": boxes for i, boxes in streams.items()},
        _DRAWN,
        end_ns=round(r.makespan_ns),
        hint="Click a box, or use the arrow keys, to read it; drag to move; Ctrl and the wheel, or two fingers, zoom.",
    )
    said = f"The {_MOST} longest of {len(there)} tasks are drawn." if len(there) > len(shown) else ""
    more = f" Ranks {min(ranks)} to {max(ranks)} of {len(g.ranks)}." if len(g.ranks) > len(ranks) else ""
    return drawn, said + more
