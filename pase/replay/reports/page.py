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


def diagnosis_page(d: Diagnosis, report: JsonObject, date: str = "") -> str:
    """Returns the page as text. report: the values of ``diagnosis_report``. date: when it is made, for its title."""
    drawn, left_out = _drawn(d)
    sections = [
        Section(
            anchor="time",
            title="Where the time goes",
            body=_where_time_goes(report["ranks"]),
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
        f"<p class='verdict'>{html.escape(report['verdict'])}</p>"
        f"<p>{html.escape(report['headline'])} The replay takes {cost_text(report['replayed_s'], 's')}. Each saving is "
        "this time minus that of a replay without the cause; savings overlap. Times of evidence count from the "
        "beginning of the trace.</p>"
    )
    return page(
        title=_title(report) + (f", {date}" if date else ""),
        lead=lead,
        sections=sections,
        foot="<p>Times are measured, from the traces. Savings are predicted, by replays of an iteration.</p>",
        widgets=("timeline", "tables"),
        data={"unit": "s", "timelines": {"iteration": drawn}},
    )


def _title(report: JsonObject) -> str:
    """How long an iteration takes, on which devices and of which run."""
    ranks = len(report["ranks"])
    devices = sorted({s["device"] for s in report["spent"] if s["device"]})
    on = f"{ranks} rank{'s' * (ranks > 1)}" + (f" of {', '.join(devices)}" if devices else "")
    return f"{Path(report['source']).name}: {cost_text(report['measured_s'], 's')} an iteration on {on}"


def _finding(f: JsonObject, tested: bool) -> str:
    seen = f"{cost_text(f['measured_s'], 's')} measured" if f["measured_s"] else "remark"
    cost = (
        f"saves {cost_text(f['cost_s'], 's')} ({f['share']:.1%}{'' if tested else ', error unknown'})"
        if f["cost_s"]
        else seen
    )
    where = "; ".join(
        f"rank {e['rank']}: {html.escape(e['name'][:90])} at {e['start_s'] * 1e3:.3f} ms for "
        f"{cost_text(e['seconds'], 's')}"
        for e in f["evidence"]
    )
    return (
        f"<div class='finding{'' if f['cost_s'] else ' remark'}'><div>"
        f"<h3>{html.escape(f['title'])}</h3><span class='cost'>{cost}</span></div>"
        f"<p>{html.escape(f['detail'])}</p>"
        + (f"<p class='soft'>Evidence: {where}</p>" if where else "")
        + "</div>"
    )


def _where_time_goes(ranks: list[JsonObject]) -> str:
    """A table with a row for each part and a column for each rank; with one rank, its bars."""
    shown = ranks[:_MOST_RANKS]
    of: dict[str, dict[int, float]] = {}
    for k, r in enumerate(shown):
        for p in r["parts"]:
            words = p["in_words"] + (f" ({p['what']})" if p["what"] else "")
            of.setdefault(words, {})[k] = p["seconds"]
    most = max((s for by_rank in of.values() for s in by_rank.values()), default=0.0)

    def cell(k: int, seconds: float | None) -> str:
        if seconds is None:
            return ""
        whole = shown[k]["measured_s"]
        return cost_text(seconds, "s") + (f" <small>{seconds / whole:.1%}</small>" if whole else "")

    longest = sorted(of.items(), key=lambda kv: -max(kv[1].values()))
    one = len(shown) == 1
    rows = [
        (
            html.escape(words),
            *(cell(k, by_rank.get(k)) for k in range(len(shown))),
            *([bar([("compute", by_rank[0])], most)] if one else []),
        )
        for words, by_rank in longest
    ]
    rows.append(
        ("<b>an iteration</b>", *(f"<b>{cost_text(r['measured_s'], 's')}</b>" for r in shown), *[""] * one)
    )
    head = ["part", *(f"rank {r['rank']}>" for r in shown), *["|"] * one]
    left = (
        f"<p class='soft'>The first {len(shown)} of {len(ranks)} ranks.</p>"
        if len(ranks) > len(shown)
        else ""
    )
    return table("Where the time goes", head, rows) + left


def _stream(name: str) -> str:
    """
    >>> _stream("7"), _stream("thread 1")
    ('stream 7', 'thread 1')
    """
    return f"stream {name}" if name.isdigit() else name


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
        {f"rank {g.devices[i].rank} {_stream(g.devices[i].name)}": boxes for i, boxes in streams.items()},
        _DRAWN,
        end_ns=round(r.makespan_ns),
        hint="Click a box, or use the arrow keys, to read it; drag to move; Ctrl and the wheel, or two fingers, zoom.",
    )
    said = f"The {_MOST} longest of {len(there)} tasks are drawn." if len(there) > len(shown) else ""
    more = f" Ranks {min(ranks)} to {max(ranks)} of {len(g.ranks)}." if len(g.ranks) > len(ranks) else ""
    return drawn, said + more
