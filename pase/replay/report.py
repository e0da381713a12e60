"""Reports of a replay as plain values, for the commands and for programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pase.errors import PaseError
from pase.replay.analyse import path_steps, rank_uses, to_timeline
from pase.replay.clocks import align as align_clocks
from pase.replay.graph import DataflowGraph
from pase.replay.ingest import load
from pase.replay.model import estimate, measure
from pase.replay.optimize import Outcome
from pase.replay.predict import held_out, rank_lengths_ns
from pase.replay.reader import read_small_json
from pase.replay.simulate import replay_graph
from pase.replay.timeline_io import from_json, save_timeline
from pase.replay.types import GPU_KINDS, KINDS, Timeline
from pase.replay.whatif import apply, evaluate, parse_knob

__all__ = [
    "Rewrite",
    "compare_timelines",
    "is_layout",
    "layout_timeline",
    "load_any",
    "optimize_report",
    "replay_report",
]

Rewrite = Callable[[Timeline, DataflowGraph], tuple[DataflowGraph, dict[str, Any]]]
"""A change to a run's graph: the changed graph, and what to report of it. "control" in that is a graph too: the run
as it is, made in the same way, with which the changed one is then compared."""


def is_layout(path: Path) -> bool:
    """Whether the file is a layout of ours, by its first bytes."""
    if not path.is_file() or path.suffix != ".json":
        return False
    with path.open("rb") as f:
        return b"pase.layout/" in f.read(4096)


def layout_timeline(path: Path) -> Timeline | None:
    """The predicted timeline inside a layout file; None where the file is no layout."""
    if not is_layout(path):
        return None
    d = read_small_json(path)
    t = d.get("timeline") if isinstance(d, dict) else None
    if not t:
        raise PaseError(f"{path}: this layout holds no predicted timeline; compile it again with a schedule")
    return from_json(t, f"{path}: timeline")


def load_any(source: Path) -> Timeline:
    """Traces, a timeline, or the timeline of a layout."""
    t = layout_timeline(source) if source.is_file() else None
    return load(source) if t is None else t


def replay_report(
    source: Path,
    *,
    align: str = "ends",
    what_if: Sequence[str] = (),
    output: Path | None = None,
    predicted: Path | None = None,
    timeline: Timeline | None = None,
    rewrites: Mapping[str, Rewrite] | None = None,
    wire_bytes_per_s: float | None = None,
) -> dict[str, Any]:
    """Everything that ``pase replay`` prints. Times in seconds, errors relative to the measured time.

    timeline: what to replay in place of what ``source`` holds. rewrites: what some of the ``what_if`` do, by their
    text, where that is not a knob of ours. wire_bytes_per_s: what a rank's link carries each way, where known.
    """
    rewrites = rewrites or {}
    # Rewrites first: they read the graph as measured, and what knobs do holds for any.
    texts = sorted(dict.fromkeys(what_if), key=lambda k: k not in rewrites)
    asked = [(k, rewrites.get(k) or _knob(k, wire_bytes_per_s)) for k in texts]
    t = align_clocks(load_any(source) if timeline is None else timeline, align)
    m = measure(t)
    steady = m.steady()
    predictions = held_out(m, steady)
    g = estimate(m, steady)
    r = replay_graph(g)
    own = rank_lengths_ns(g, r)
    uses = {u.rank: u for u in rank_uses(g, r)}
    ranks = []
    for rank in sorted(own):
        mine = [p for p in predictions if p.rank == rank]
        measured = float(np.median([m.measured_ns[(rank, i)] for i in steady]))
        replayed = float(np.median([p.replayed_ns for p in mine])) if mine else own[rank]
        clock = t.clock(rank)
        use = uses.get(rank)
        ranks.append(
            {
                "rank": rank,
                "measured_s": measured / 1e9,
                "replayed_s": replayed / 1e9,
                "error": replayed / measured - 1,
                "clock_offset_s": clock.offset_ns / 1e9,
                "clock_drift": clock.drift,
                "clock_uncertainty_s": clock.uncertainty_ns / 1e9
                if math.isfinite(clock.uncertainty_ns)
                else None,
                "compute_s": use.compute_ns / 1e9 if use else 0.0,
                "communication_s": use.communication_ns / 1e9 if use else 0.0,
                "exposed_communication_s": use.exposed_ns / 1e9 if use else 0.0,
                "waiting_s": use.waiting_ns / 1e9 if use else 0.0,
                "idle_s": use.idle_ns / 1e9 if use else 0.0,
            }
        )
    iterations = []
    for i in m.iterations():
        longest = max(v for (_, k), v in m.measured_ns.items() if k == i)
        mine = [p for p in predictions if p.iteration == i]
        replayed_i = max((p.replayed_ns for p in mine), default=None)
        if replayed_i is None and steady == [i]:
            replayed_i = max(own.values())
        iterations.append(
            {
                "iteration": i,
                "measured_s": longest / 1e9,
                "replayed_s": replayed_i / 1e9 if replayed_i is not None else None,
                "error": replayed_i / longest - 1 if replayed_i is not None else None,
                "steady": i in steady,
            }
        )
    slowest = max(own, key=lambda k: own[k])
    path = path_steps(g, r, g.tail.get(slowest))
    heads = [k.partition("=")[0] for k in texts if k in rewrites]
    changes = _what_ifs(t, g, asked, joint=len(set(heads)) == len(heads))
    if output is not None:
        marked = [int(g.event[s.task]) for s in path if g.event[s.task] >= 0]
        save_timeline(t, output, critical=marked)
    if predicted is not None:
        save_timeline(to_timeline(g, r), predicted)
    return {
        "source": str(source),
        "events": len(t),
        "tasks": len(g),
        "held_out": bool(predictions),
        "iterations": [x for x in iterations if x["steady"]] + [x for x in iterations if not x["steady"]],
        "ranks": ranks,
        "critical_path": _by_kind(g, path),
        "what_if": changes,
        "problems": [str(p) for p in t.problems],
    }


def _knob(text: str, wire_bytes_per_s: float | None) -> Rewrite:
    knob = parse_knob(text)
    return lambda _, g: (apply(g, [knob], wire_bytes_per_s), {})


def _what_ifs(
    t: Timeline, g: DataflowGraph, asked: list[tuple[str, Rewrite]], joint: bool
) -> list[dict[str, Any]]:
    """Each change alone, then (joint) all together, one after the other.

    A change that says what the run as it is comes to by its own reckoning (control) is compared with that; added_s is
    time that has no place in the graph.
    """
    if not asked:
        return []
    base = max(evaluate(g).values())
    out = []
    changed, added = g, 0.0
    for text, change in asked:
        made, more = change(t, g)
        control = more.pop("control", None)
        before = base if control is None else max(evaluate(control).values())
        ns = max(evaluate(made).values()) + more.get("added_s", 0.0) * 1e9
        row = {"knob": text, "base_s": base / 1e9, "iteration_s": ns / 1e9, "speedup": before / ns}
        out.append(row | more | ({} if control is None else {"control_s": before / 1e9}))
    if joint and len(asked) > 1:
        before = base
        for _, change in asked:
            changed, more = change(t, changed)
            if "control" in more:
                before = max(evaluate(more["control"]).values())
            added += more.get("added_s", 0.0) * 1e9
        ns = max(evaluate(changed).values()) + added
        both = " and ".join(text for text, _ in asked)
        out.append({"knob": both, "base_s": base / 1e9, "iteration_s": ns / 1e9, "speedup": before / ns})
    return out


def _by_kind(g: Any, path: list[Any]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for s in path:
        total[KINDS[int(g.kind[s.task])]] += (s.added_ns - s.lag_ns) / 1e9
        total["gaps"] += s.lag_ns / 1e9
    return dict(total)


def compare_timelines(
    predicted: Path, traces: Path, align: str = "ends", timeline: Timeline | None = None
) -> dict[str, Any]:
    """A predicted timeline and measured traces op by op, by name; mean seconds an iteration on a rank."""
    want = load_any(predicted) if timeline is None else timeline
    m = measure(align_clocks(load(traces), align))
    steady = m.steady()
    got = m.timeline
    ours, theirs = _op_seconds(want, None), _op_seconds(got, steady)
    both = sorted(set(ours) & set(theirs), key=lambda n: -abs(ours[n] - theirs[n]))
    lengths = [v for (_, i), v in m.measured_ns.items() if i in steady]
    marks = [mark.end_ns - mark.start_ns for mark in want.marks]
    whole = max(marks) if marks else int(want.end_ns.max() - want["start_ns"].min())
    return {
        "predicted_s": whole / 1e9,
        "measured_s": float(np.median(lengths)) / 1e9,
        "matched": len(both),
        "only_predicted": len(set(ours) - set(theirs)),
        "only_measured": len(set(theirs) - set(ours)),
        "ops": [{"name": n, "predicted_s": ours[n], "measured_s": theirs[n]} for n in both],
    }


def _op_seconds(t: Timeline, iterations: list[int] | None) -> dict[str, float]:
    keep = np.isin(t["kind"], GPU_KINDS)
    runs = 1
    if iterations is not None:
        keep &= np.isin(t["iteration"], iterations)
        runs = len(iterations)
    total = np.bincount(t["name"][keep], weights=t["duration_ns"][keep], minlength=len(t.names))
    ranks = max(1, len(t.ranks))
    return {t.names[i]: float(total[i]) / 1e9 / runs / ranks for i in np.flatnonzero(total).tolist()}


def optimize_report(source: str, o: Outcome, problems: list[str]) -> dict[str, Any]:
    """Everything that ``pase optimize`` prints."""
    parts = dict(o.plan.parts)
    buckets = []
    for last, members in sorted(o.plan.buckets(len(o.coarse.tensors)).items()):
        if len(members) > 1 or last in parts:
            sizes = [o.coarse.tensors[k].nbytes for k in members]
            total = sum(sizes) if min(sizes) >= 0 else None
            buckets.append({"tensors": members, "bytes": total, "parts": parts.get(last, 1)})
    return {
        "source": source,
        "before_s": o.before_ns / 1e9,
        "after_s": o.after_ns / 1e9,
        "speedup": o.before_ns / o.after_ns,
        "seconds": o.seconds,
        "evaluations": o.evaluations,
        "ended": o.ended,
        "tensors": len(o.coarse.tensors),
        "buckets": buckets,
        "fused_runs": len(o.plan.runs),
        "fused_ops": sum(len(r) for r in o.plan.runs),
        "rolled_back": sum(not s.kept for s in o.steps),
        "steps": [
            {
                "pass": s.name,
                "what": s.what,
                "before_s": s.before_ns / 1e9,
                "after_s": s.after_ns / 1e9 if math.isfinite(s.after_ns) else None,
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
        "problems": problems,
    }
