"""Makes the report of an optimization as plain values."""

from __future__ import annotations

from pase.files.json_values import JsonObject
from pase.replay.changes.optimize import OptimizeResult
from pase.replay.reports.report import summary
from pase.replay.reports.trust import Run

__all__ = ["optimize_report"]


def optimize_report(source: str, run: Run, o: OptimizeResult) -> JsonObject:
    """Returns everything that ``pase optimize`` prints: the run, the optimized run, and the steps of the search."""
    parts = dict(o.plan.parts)
    buckets = []
    for last, members in sorted(o.plan.buckets(len(o.coarse.tensors)).items()):
        if len(members) > 1 or last in parts:
            sizes = [o.coarse.tensors[k].nbytes for k in members]
            total = sum(sizes) if min(sizes) >= 0 else None
            buckets.append({"tensors": members, "bytes": total, "parts": parts.get(last, 1)})
    return {
        "source": source,
        **summary(run),
        "before_s": o.before_ns / 1e9,
        "after_s": o.after_ns / 1e9,
        "speedup": o.before_ns / o.after_ns,
        "within_spread": run.within_spread(o.before_ns / o.after_ns),
        "seconds": o.seconds,
        "evaluations": o.evaluations,
        "ended": o.ended,
        "tensors": len(o.coarse.tensors),
        "buckets": buckets,
        "fused_runs": len(o.plan.runs),
        "fused_ops": sum(len(r) for r in o.plan.runs),
        "rolled_back": o.undone,
        "steps": [
            {
                "pass": s.name,
                "what": s.what,
                "before_s": s.before_ns / 1e9,
                "after_s": s.after_ns / 1e9,
                "kept": s.kept,
            }
            for s in o.steps
        ],
        "memory": [
            {
                "name": x.name,
                "iteration_s": x.iteration_ns / 1e9,
                "peak_bytes": x.peak_bytes,
                "chosen": x is o.memory,
            }
            for x in o.memory_options
        ],
        "problems": [str(p) for p in run.measured.timeline.problems],
    }
