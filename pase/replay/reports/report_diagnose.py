"""Makes the report of a diagnosis as plain values."""

from __future__ import annotations

from pase.files.json_values import JsonObject
from pase.replay.measurement.breakdown import CAUSES
from pase.replay.reports.diagnose import Diagnosis
from pase.replay.reports.report import summary, use

__all__ = ["diagnosis_report"]


def diagnosis_report(source: str, d: Diagnosis) -> JsonObject:
    """Returns everything that ``pase diagnose`` prints. Times are in seconds; events count from the trace's begin."""
    t = d.run.measured.timeline
    zero = float(t.global_start_ns().min())
    ranks = []
    for b in d.breakdowns:
        row = use(b)
        parts = [{**p, "in_words": CAUSES[p["cause"]]} for p in row.pop("parts")]
        length = b.iteration_ns / 1e9
        ranks.append({"rank": b.rank, "measured_s": length, "iteration_s": length, **row, "parts": parts})
    return {
        "source": source,
        **summary(d.run),
        "iteration_s": d.iteration_ns / 1e9,
        "findings": [
            {
                "kind": f.kind,
                "title": f.title,
                "detail": f.detail,
                "cost_s": f.cost_ns / 1e9,
                "share": f.cost_ns / d.iteration_ns if d.iteration_ns else 0.0,
                "measured_s": f.measured_ns / 1e9,
                "evidence": [
                    {
                        "rank": e.rank,
                        "name": e.name,
                        "start_s": (e.start_ns - zero) / 1e9,
                        "seconds": e.duration_ns / 1e9,
                    }
                    for e in f.evidence
                ],
            }
            for f in d.findings
        ],
        "ranks": ranks,
        "stragglers": [
            {
                "rank": x.rank,
                "iteration": x.iteration,
                "caused_s": x.caused_ns / 1e9,
                "last": x.last,
                "of": x.of,
                "device_s": x.device_ns / 1e9,
                "host_s": x.host_ns / 1e9,
                "where": x.where,
            }
            for x in d.stragglers
        ],
        "problems": [str(p) for p in t.problems],
    }
