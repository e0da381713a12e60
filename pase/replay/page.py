"""A diagnosis as one HTML page without scripts: findings, where the time goes, and the iteration drawn."""

from __future__ import annotations

import html
from typing import Any

import numpy as np

from pase.replay.diagnose import Diagnosis
from pase.replay.simulate import replay_graph
from pase.replay.types import COLLECTIVE, GPU_KINDS, KINDS

__all__ = ["diagnosis_page"]

_STYLE = """body{font:15px/1.45 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#1b1f24}
table{border-collapse:collapse}td,th{padding:.25em .8em;text-align:right;border-bottom:1px solid #ddd}
h2{margin-top:2em}.f{border-left:5px solid #c33;padding:.1em 1em;margin:1em 0;background:#faf7f5}
.f.r{border-color:#88a}.c{float:right;font-weight:600}.e{color:#57606a;font-size:13px}
svg{width:100%;background:#fff;border:1px solid #ddd}text{font:11px system-ui,sans-serif}"""
_COLOURS = {"compute": "#4c78a8", "communication": "#f58518", "host": "#b5b5b5", "critical": "#d62728"}
_MOST = 6000


def diagnosis_page(d: Diagnosis, report: dict[str, Any]) -> str:
    """The page as text. report: what ``report_diagnose`` says of the diagnosis."""
    source = html.escape(report["source"])
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>Diagnosis of {source}</title><style>{_STYLE}</style>",
        f"<h1>Why {source} takes {report['measured_s'] * 1e3:.2f} ms an iteration</h1>",
        f"<p>{html.escape(report['headline'])}</p>",
        f"<p>Replayed it takes {report['replayed_s'] * 1e3:.2f} ms. Each cost is that minus the replay without the "
        "cause; costs overlap. Times of evidence count from the beginning of the trace.</p>",
    ]
    for f in report["findings"]:
        seen = f"{f['measured_s'] * 1e3:.2f} ms measured" if f["measured_s"] else "remark"
        cost = f"−{f['cost_s'] * 1e3:.2f} ms ({f['share']:.1%})" if f["cost_s"] else seen
        where = "; ".join(
            f"rank {e['rank']}: {html.escape(e['name'][:90])} at {e['start_s'] * 1e3:.3f} ms for "
            f"{e['seconds'] * 1e6:.1f} µs"
            for e in f["evidence"]
        )
        parts.append(
            f"<div class='f{'' if f['cost_s'] else ' r'}'><span class=c>{cost}</span><h3>{html.escape(f['title'])}</h3>"
            f"<p>{html.escape(f['detail'])}</p>"
            + (f"<p class=e>Evidence: {where}</p>" if where else "")
            + "</div>"
        )
    parts.append("<h2>Where the time goes</h2>")
    for r in report["ranks"]:
        parts.append(f"<h3>Rank {r['rank']}: {r['measured_s'] * 1e3:.3f} ms</h3><table>")
        for p in r["parts"]:
            words = p["in_words"] + (f" ({p['what']})" if p["what"] else "")
            parts.append(
                f"<tr><td>{p['seconds'] * 1e3:.3f} ms<td style='text-align:left'>{html.escape(words)}</tr>"
            )
        parts.append("</table>")
    parts.append("<h2>The replayed iteration</h2>")
    parts.append(_drawing(d))
    if report["problems"]:
        parts.append("<h2>Notes on the traces</h2><ul>")
        parts.extend(f"<li>{html.escape(p)}" for p in report["problems"])
        parts.append("</ul>")
    return "\n".join(parts) + "</html>\n"


def _drawing(d: Diagnosis) -> str:
    """Devices as rows, tasks as boxes, the critical path in red; the shortest tasks are left out."""
    g = d.run.graph
    r = replay_graph(g)
    critical = {s.task % len(g) for s in d.run.replay.path()}
    kept = {rank: 0 for rank in g.ranks[:8]}
    devices = sorted(
        (i for i, x in enumerate(g.devices) if x.rank in kept), key=lambda i: (g.devices[i].rank, i)
    )
    row = {x: k for k, x in enumerate(devices)}
    width, high = 1060.0, 22
    end = max(r.makespan_ns, 1.0)
    shown = np.flatnonzero(np.isin(g.device, devices) & (r.finish_ns - r.start_ns > 0))
    length = (r.finish_ns - r.start_ns)[shown]
    if len(shown) > _MOST:
        shown = shown[np.argsort(-length)[:_MOST]]
    out = [f"<svg viewBox='0 0 {width + 130:.0f} {high * len(devices) + 26}' role=img>"]
    for x in devices:
        label = html.escape(f"rank {g.devices[x].rank} {g.devices[x].name}"[:22])
        out.append(f"<text x=0 y={row[x] * high + 15}>{label}</text>")
    for i in shown.tolist():
        kind = "host"
        if int(g.kind[i]) in GPU_KINDS:
            kind = "communication" if g.kind[i] == COLLECTIVE else "compute"
        x0 = 130 + width * float(r.start_ns[i]) / end
        w = max(0.3, width * float(r.finish_ns[i] - r.start_ns[i]) / end)
        y = row[int(g.device[i])] * high
        tip = (
            f"{g.task_name(i)[:90]}, {KINDS[int(g.kind[i])]}, {(r.finish_ns[i] - r.start_ns[i]) / 1e3:.1f} µs"
        )
        colour = _COLOURS["critical"] if i in critical else _COLOURS[kind]
        out.append(
            f"<rect x={x0:.2f} y={y + 3} width={w:.2f} height={high - 6} fill='{colour}'>"
            f"<title>{html.escape(tip)}</title></rect>"
        )
    bottom = high * len(devices) + 16
    for k in range(6):
        at = 130 + width * k / 5 - (30 if k == 5 else 0)
        out.append(f"<text x={at:.0f} y={bottom}>{end * k / 5e6:.1f} ms</text>")
    legend = " · ".join(f"<span style='color:{c}'>■ {n}</span>" for n, c in _COLOURS.items())
    more = f" The {_MOST} longest tasks are drawn." if len(shown) == _MOST else ""
    more += f" Ranks {min(g.ranks)} to {max(kept)}." if len(g.ranks) > len(kept) else ""
    return "".join(out) + f"</svg><p class=e>{legend}.{more}</p>"
