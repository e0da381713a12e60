"""Makes reports of a replay, a diagnosis and an optimization as plain values, for the commands and for programs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pase.errors import Infeasible, PaseError
from pase.files.json_values import JsonObject
from pase.files.quantities import cost_text
from pase.replay.changes.rewrite import Rewrite, Rewritten
from pase.replay.changes.whatif import by_knob
from pase.replay.graph import DataflowGraph
from pase.replay.measurement.breakdown import CAUSES, Breakdown, breakdowns
from pase.replay.measurement.clocks import align as align_clocks
from pase.replay.measurement.model import measure
from pase.replay.measurement.origins import origins
from pase.replay.measurement.spending import spendings
from pase.replay.reports.sent import transfers_report
from pase.replay.reports.spent import placed, spending_report
from pase.replay.reports.trust import Run, unexplained_ns
from pase.replay.simulation.analyse import to_timeline
from pase.replay.simulation.chance import mean_iteration_ns, spreads
from pase.replay.simulation.simulate import replay_graph
from pase.replay.simulation.steady import evaluate, stretched
from pase.replay.traces.ingest import load
from pase.replay.traces.reader import read_small_json
from pase.replay.traces.timeline_io import from_json, save_timeline
from pase.replay.types import KINDS, OPERATIONS, Timeline, on_stream

if TYPE_CHECKING:
    from pase.replay.changes.optimize import OptimizeResult
    from pase.replay.reports.diagnose import Diagnosis

__all__ = [
    "compare_timelines",
    "diagnosis_report",
    "is_layout",
    "layout_timeline",
    "load_any",
    "optimize_report",
    "replay_report",
    "summary",
    "use",
]


def is_layout(path: Path) -> bool:
    """Whether the file is a layout of pase, by its first bytes."""
    if not path.is_file() or path.suffix != ".json":
        return False
    with path.open("rb") as f:
        return b"pase.layout/" in f.read(4096)


def layout_timeline(path: Path) -> Timeline | None:
    """Returns the predicted timeline in a layout file; None if the file is not a layout.

    Raises PaseError if the layout has no timeline.
    """
    if not is_layout(path):
        return None
    d = read_small_json(path)
    t = d.get("timeline") if isinstance(d, dict) else None
    if not t:
        raise PaseError(
            "it is a layout, and no traces of a run",
            where=str(path),
            fix=f"pase explain {path} says where its predicted time goes; pase profile traces a run",
        )
    return from_json(t, f"{path}: timeline")


def load_any(source: Path, progress: Callable[[str], None] | None = None) -> Timeline:
    """Loads traces, a timeline, or the timeline of a layout. progress: called with a line of text before each file."""
    t = layout_timeline(source) if source.is_file() else None
    return load(source, progress=progress) if t is None else t


@dataclass(frozen=True, kw_only=True)
class TimelineFiles:
    """Files for the aligned and the predicted timeline; None: it is not written."""

    aligned: Path | None = None
    predicted: Path | None = None


NO_FILES = TimelineFiles()


def replay_report(
    source: Path,
    *,
    align: str = "ends",
    what_if: Sequence[str] = (),
    files: TimelineFiles = NO_FILES,
    timeline: Timeline | None = None,
    rewrites: Mapping[str, Rewrite] | None = None,
    wire_bytes_per_s: float | None = None,
    force: bool = False,
) -> JsonObject:
    """Returns everything that ``pase replay`` prints. Times are in seconds; errors are relative to the measured time.

    source: traces, a timeline or a layout.
    align: the method that aligns clocks (see ``pase.replay.measurement.clocks.align``).
    what_if: changes to predict, such as "bandwidth=2".
    files: to which timelines are written.
    timeline: replaces the timeline of ``source``. It is that of a plan, of which nothing is measured.
    rewrites: the functions of those ``what_if`` that are not built-in knobs, by their text.
    wire_bytes_per_s: the bandwidth of a rank's link in each direction, if known.
    force: predict even if the replay cannot be trusted.

    Raises Infeasible, unless forced, if the replay contradicts the run's own iterations, or if a what-if is given and
    the replay cannot be trusted.
    """
    rewrites = rewrites or {}
    # Apply rewrites first, because they need the graph as measured, while knobs work on any graph. Split into stages
    # last, because all other changes depend on the ranks as they were measured.
    texts = sorted(dict.fromkeys(what_if), key=lambda k: (k not in rewrites, k.startswith("stages=")))
    asked = {k: rewrites.get(k) or by_knob(k, wire_bytes_per_s) for k in texts}
    t = align_clocks(load_any(source) if timeline is None else timeline, align)
    run = Run(measured=measure(t))
    if timeline is None:
        run.must_be_possible(f"{source}", force)
    heads = [k.partition("=")[0] for k in texts if k in rewrites]
    changes = _what_ifs(run, asked, len(set(heads)) == len(heads))
    if timeline is not None:
        # A plan has no measured iterations that could contradict its replay.
        changes = [row | {"doubt": None} for row in changes]
    elif not force:
        _must_be_believed(source, changes)
    if files.aligned is not None:
        tasks = [s.task % len(run.graph) for s in run.replay.path()]
        save_timeline(t, files.aligned, critical=[int(e) for e in run.graph.event[tasks] if e >= 0])
    if files.predicted is not None:
        save_timeline(to_timeline(run.graph, replay_graph(run.graph)), files.predicted)
    return {
        "source": str(source),
        **summary(run, is_planned=timeline is not None),
        "events": len(t),
        "tasks": len(run.graph),
        "held_out": bool(run.held_out),
        "iterations": _iterations(run),
        "ranks": _ranks(run),
        "spent": spending_report(spendings(run.measured)) if timeline is None else [],
        "critical_path": _by_kind(run),
        "what_if": changes,
        "problems": [str(p) for p in t.problems],
    }


def summary(run: Run, is_planned: bool = False) -> JsonObject:
    """Returns the values that every report has: how long an iteration takes, and how far its replay can be trusted."""
    return {
        "headline": "This is a plan: nothing of it is measured." if is_planned else run.headline,
        "believable": not run.doubts,
        "tested": run.is_tested,
        "measured_s": run.measured_ns / 1e9,
        "replayed_s": run.replayed_ns / 1e9,
        "spread": run.spread,
        "held_out_error": {"median": run.error(), "worst": run.error(worst=True)},
        "naive_error": {"median": run.error(naive=True), "worst": run.error(naive=True, worst=True)},
        "unexplained": run.unexplained,
        "left_out": {str(i): why for i, why in run.measured.left_out.items()},
    }


def _iterations(run: Run) -> list[JsonObject]:
    """Returns the iterations, steady ones first.

    ``replayed_s`` and ``error`` are of a prediction from the other iterations; None if there is none.
    """
    out = []
    for i in sorted(run.measured.iterations(), key=lambda i: (i in run.measured.left_out, i)):
        longest = run.length_ns(i)
        mine = [p for p in run.held_out if p.iteration == i] if len(run.iterations) > 1 else []
        replayed = max((p.replayed_ns for p in mine), default=None)
        out.append(
            {
                "iteration": i,
                "measured_s": longest / 1e9,
                "replayed_s": None if replayed is None else replayed / 1e9,
                "error": None if replayed is None else replayed / longest - 1,
                "steady": i not in run.measured.left_out,
                "why_not": run.measured.left_out.get(i),
            }
        )
    return out


def _ranks(run: Run) -> list[JsonObject]:
    """Returns for each rank the mean measured iteration and its parts, the replay, and the median held-out error."""
    parts = {b.rank: b for b in breakdowns(run.measured)}
    out = []
    for rank, replayed in sorted(run.replay.length_ns.items()):
        mine = [p.error for p in run.held_out if p.rank == rank]
        clock = run.measured.timeline.clock(rank)
        b = parts[rank]
        out.append(
            {
                "rank": rank,
                "measured_s": b.iteration_ns / 1e9,
                "replayed_s": replayed / 1e9,
                "error": float(np.median(mine)) if mine else None,
                "clock_offset_s": clock.offset_ns / 1e9,
                "clock_drift": clock.drift,
                "clock_uncertainty_s": clock.uncertainty_ns / 1e9
                if math.isfinite(clock.uncertainty_ns)
                else None,
                **use(b),
            }
        )
    return out


def use(b: Breakdown) -> JsonObject:
    """Returns how a rank's mean iteration is spent, in seconds. ``parts`` sum to its length."""
    n = len(b.iterations)
    return {
        "compute_s": b.mean_ns("compute") / 1e9,
        "communication_s": b.communication_ns / n / 1e9,
        "exposed_communication_s": b.exposed_ns / 1e9,
        "waiting_s": b.mean_ns("rank") / 1e9,
        "idle_s": b.idle_ns / 1e9,
        "parts": [
            {"cause": cause, "what": what, "seconds": ns / n / 1e9}
            for (cause, what), ns in sorted(b.parts.items(), key=lambda x: -x[1])
            if ns
        ],
    }


def _by_chance(run: Run, made: DataflowGraph, ranks: int) -> tuple[JsonObject, str]:
    """Returns the mean step time with another number of ranks, by sampling: a step waits for the slowest rank. Also
    returns what a reader must know of it."""
    unknown: tuple[JsonObject, str] = (
        {},
        "this does not include how much later the slowest of so many ranks is: that needs traces of at least "
        "two ranks that share all collectives, at least two iterations, no other change of the tasks, and few enough "
        "tasks to replay many samples",
    )
    g = run.medians
    if len(made) != len(g):
        return unknown
    # The samples include waiting for late ranks, so the times must not include its average.
    made = stretched(made, 1 / run.stretch)
    spread = spreads(run.measured, g, run.measured.whole())
    now, then = mean_iteration_ns(g, spread, len(g.ranks)), mean_iteration_ns(made, spread, ranks)
    if now is None or then is None:
        return unknown
    note = (
        f"the mean of steps that wait for the slowest of {ranks} ranks, each with the times of a randomly drawn "
        f"iteration; the speedup is relative to the unchanged run, sampled in the same way: {now / 1e6:.2f} ms"
    )
    return {"mean_s": then / 1e9, "control_mean_s": now / 1e9}, note


def _must_be_believed(source: Path, changes: list[JsonObject]) -> None:
    """Raises Infeasible with the reasons of the first what-if that cannot be trusted, if there is one."""
    for row in changes:
        if row["doubt"]:
            raise Infeasible(
                f"what-if {row['knob']} is not predicted, because {row['doubt']}",
                where=str(source),
                fix="give --force to predict it anyway",
            )


def _what_ifs(run: Run, asked: Mapping[str, Rewrite], joint: bool) -> list[JsonObject]:
    """Returns a row for each change alone and, if ``joint``, one for all changes, applied one after another."""
    t, unchanged = run.measured.timeline, Rewritten(graph=run.graph)
    out, together = [], unchanged
    for text, change in asked.items():
        out.append(_row(run, text, unchanged.under(change, t)))
        if joint and len(asked) > 1:
            together = together.under(change, t)
    if joint and len(asked) > 1:
        out.append(_row(run, " and ".join(asked), together))
    return out


def _row(run: Run, text: str, c: Rewritten) -> JsonObject:
    """Returns one row of the what-ifs.

    If the number of ranks changes and the random variation of steps is known, it has the mean of sampled steps.
    """
    base = run.replayed_ns
    before = base if c.control is None else max(evaluate(c.control).values())
    ns, doubt = run.judged(c.graph)
    ns += c.added_s * 1e9
    more = dict(c.detail) if c.control is None else c.detail | {"control_s": before / 1e9}
    if c.of_ranks:
        means, note = _by_chance(run, c.graph, c.of_ranks)
        more, c = more | means, c.noted(note)
    if _unchanged(run.graph, c.graph) and not c.added_s:
        c = c.noted("this changes no op of the trace")
    if "mean_s" in more:
        before, ns = more["control_mean_s"] * 1e9, more["mean_s"] * 1e9 + c.added_s * 1e9
    row = {"knob": text, "base_s": base / 1e9, "iteration_s": ns / 1e9, "speedup": before / ns}
    row |= {"within_spread": run.within_spread(before / ns), "doubt": doubt or None} | more
    return row | ({"note": c.note} if c.note else {})


def _unchanged(g: DataflowGraph, made: DataflowGraph) -> bool:
    """Whether every op and every delay takes what it took."""
    return (
        len(made) == len(g)
        and np.array_equal(made.duration_ns, g.duration_ns)
        and np.array_equal(made.lag_ns, g.lag_ns)
        and np.array_equal(made.carried.lag_ns, g.carried.lag_ns)
    )


def _by_kind(run: Run) -> dict[str, float]:
    """Returns the seconds of the critical path by kind of task. "gaps" are delays of launches, streams and events."""
    total: defaultdict[str, float] = defaultdict(float)
    lost = unexplained_ns(run.graph)
    n = len(run.graph)
    for s in run.replay.path():
        unknown = min(s.lag_ns, float(lost[s.task % n]))
        total[KINDS[int(run.graph.kind[s.task % n])]] += (s.added_ns - s.lag_ns) / 1e9
        total["gaps"] += (s.lag_ns - unknown) / 1e9
        total["unexplained"] += unknown / 1e9
    return dict(total)


def compare_timelines(
    predicted: Path, traces: Path, align: str = "ends", timeline: Timeline | None = None
) -> JsonObject:
    """Compares a predicted timeline with measured traces op by op, by name. Times are means per iteration and rank."""
    want = load_any(predicted) if timeline is None else timeline
    run = Run(measured=measure(align_clocks(load(traces), align)))
    ours, theirs = _op_seconds(want, None), _op_seconds(run.measured.timeline, run.iterations)
    both = sorted(set(ours) & set(theirs), key=lambda n: -abs(ours[n] - theirs[n]))
    marks = [mark.end_ns - mark.start_ns for mark in want.marks]
    whole = max(marks) if marks else int(want.end_ns.max() - want["start_ns"].min())
    return {
        "predicted_s": whole / 1e9,
        "measured_s": run.measured_ns / 1e9,
        "matched": len(both),
        "only_predicted": len(set(ours) - set(theirs)),
        "only_measured": len(set(theirs) - set(ours)),
        "ops": [{"name": n, "predicted_s": ours[n], "measured_s": theirs[n]} for n in both],
    }


def _op_seconds(t: Timeline, iterations: list[int] | None) -> dict[str, float]:
    keep = on_stream(t["kind"])
    runs = 1
    if iterations is not None:
        keep &= np.isin(t["iteration"], iterations)
        runs = len(iterations)
    total = np.bincount(t["name"][keep], weights=t["duration_ns"][keep], minlength=len(t.names))
    ranks = max(1, len(t.ranks))
    return {t.names[i]: float(total[i]) / 1e9 / runs / ranks for i in np.flatnonzero(total).tolist()}


def _verdict(ranks: Sequence[JsonObject], d: Diagnosis) -> str:
    """What takes most of an iteration on some rank, and what would save most, if that is known."""
    parts = [(p["seconds"], r, p) for r in ranks for p in r["parts"] if r["measured_s"]]
    if not parts:
        return ""
    seconds, r, p = max(parts, key=lambda x: x[0])
    who = f"Rank {r['rank']}" if len(ranks) > 1 else "The device"
    said = f"{who} spends {seconds / r['measured_s']:.0%} of its iteration {p['in_words']}"
    best = max(d.findings, key=lambda f: f.cost_ns, default=None)
    if best is None or best.cost_ns <= 0:
        return f"{said}."
    saved = f"{cost_text(best.cost_ns / 1e9, 's')}, {best.cost_ns / d.iteration_ns:.0%}"
    return f"{said}. Most would be saved here ({saved}): {best.title}"


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
        "verdict": _verdict(ranks, d),
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
        "spent": spending_report(d.spent),
        "collectives": transfers_report(d.transfers, len(d.run.iterations)),
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


def _ops_by_name(run: Run, o: OptimizeResult) -> dict[int, str]:
    """Returns device task → the user's name of its op and its place, of the tasks that an optimized run mentions."""
    g, t = run.graph, run.measured.timeline
    tasks = {i for x in o.coarse.tensors for i in x.producers[:1] if i >= 0} | {
        i for r in o.plan.runs for i in r
    }
    of = {rank: origins(t, rank).of for rank in {int(g.rank[i]) for i in tasks}}
    out = {}
    for i in tasks:
        found = of[int(g.rank[i])].get(int(g.event[i]))
        out[i] = g.task_name(i)[:60] if found is None else placed(found.name, found.where, 60)
    return out


def optimize_report(source: str, run: Run, o: OptimizeResult) -> JsonObject:
    """Returns everything that ``pase optimize`` prints: the run, the optimized run, and the steps of the search."""
    parts = dict(o.plan.parts)
    buckets = []
    named = _ops_by_name(run, o)
    for last, members in sorted(o.plan.buckets(len(o.coarse.tensors)).items()):
        if len(members) > 1 or last in parts:
            sizes = [o.coarse.tensors[k].nbytes for k in members]
            total = sum(sizes) if min(sizes) >= 0 else None
            first, final = (o.coarse.tensors[k] for k in (members[0], members[-1]))
            buckets.append(
                {
                    "tensors": members,
                    "operation": OPERATIONS[first.family[0]],
                    "after": [named.get(t.producers[0], "") for t in (first, final)],
                    "bytes": total,
                    "parts": parts.get(last, 1),
                }
            )
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
        "fused": [[named.get(i, "") for i in r] for r in sorted(o.plan.runs, key=lambda r: (-len(r), r))],
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
