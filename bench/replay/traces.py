"""Replay on real traces: predictions of held-out iterations and ranks.

    python -m bench replay.traces [--traces ../shared/data/traces] [--also TRACE ...]

held_out: each steady iteration predicted from the others. "naive" is their mean, the guess without any replay;
iterations of host-bound runs differ from each other by as much. A replay, however, still predicts when something is
changed (``bench/replay/whatif.py``). other_ranks: each rank predicted with the compute times of the other ranks only.
first_and_other: of the replays from the first iteration and one other, the one farthest outside of what these two took.
few_iterations: the report on the first one, two and three iterations alone. own_ops_and_gaps_of_others: each iteration
from its own ops and the gaps of the others, compared with the others' mean. distance_from_mean: the median distance of
an iteration from the mean of all. Any prediction of one length for all iterations has this error, so a run is called
steady if it is below 1%. halves: the mean of every second iteration predicted from the others; published errors of
replays are of this kind, a run's mean step. gaps: the share of delays between tasks in the replayed iteration, the
longest one, and the number above 20 ms. findings: the first findings of pase diagnose. optimize: its first and last
iteration time, with the replayed one. device_only: the error of a replay that leaves out the CPU. Writes
bench/results/replay_traces.json.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.cases import SHARED
from bench.runner import Benchmark, option
from pase.replay import align, estimate, load, measure, optimize_graph
from pase.replay.measurement.model import own_times
from pase.replay.reports.diagnose import diagnose_run
from pase.replay.reports.trust import Run
from pase.replay.simulation.predict import held_out_ranks, mean_lengths
from pase.replay.simulation.simulate import subgraph
from pase.replay.simulation.steady import evaluate
from pase.replay.types import Timeline, on_stream

RUNS = {
    "pax FSDP on 4 A100 (device-bound)": "jaxtoolbox_pax_fsdp4",
    "DDP ResNet on 2 A100, rank 0 (launch-bound)": "hta/nccl_parser_config_nccl_data.json.gz",
    "DDP on 2 V100, rank 1, 404 unfused all-reduces (launch-bound)": "hta/df_index_resolver_df_index_resolver.json.gz",
    "DLRM-like on 8 A100, rank 3": "hta/trace_diff_control_control.json.gz",
}


def one_run(path: Path) -> dict[str, Any]:
    """Returns the row of a recorded run: its size, the seconds to read and replay it, and the held-out errors."""
    begun = time.perf_counter()
    t = align(load(path))
    loaded = time.perf_counter()
    run = Run(measured=measure(t))
    predictions = run.held_out
    done = time.perf_counter()
    by_rank = {}
    for rank in run.graph.ranks:
        mine = [p for p in predictions if p.rank == rank]
        by_rank[rank] = {
            "measured_ms": statistics.fmean(p.measured_ns for p in mine) / 1e6,
            "replayed_ms": run.replay.length_ns[rank] / 1e6,
            "median_error": statistics.median(p.error for p in mine),
            "worst_error": max((p.error for p in mine), key=abs),
            "median_naive_error": statistics.median(p.naive_error for p in mine),
            "worst_naive_error": max((p.naive_error for p in mine), key=abs),
        }
    plan = optimize_graph(run.graph)
    others = held_out_ranks(run.measured, run.graph, run.iterations)
    return {
        "events": len(t),
        "load_and_align_s": loaded - begun,
        "measure_and_predict_s": done - loaded,
        "headline": run.headline,
        "unexplained": run.unexplained,
        "measured_ms": run.measured_ns / 1e6,
        "replayed_ms": run.replayed_ns / 1e6,
        "steady_iterations": run.iterations,
        "lengths_ms": (run.lengths_ns / 1e6).tolist(),
        "distance_from_mean": float(np.median(np.abs(run.lengths_ns / run.measured_ns - 1))),
        "halves": halves(run),
        "left_out": run.measured.left_out,
        "ranks": by_rank,
        "own_ops_and_gaps_of_others": dict(
            zip(("error", "naive_error"), run.gaps_errors or (None, None), strict=True)
        ),
        "other_ranks": {p.rank: p.error for p in others} or None,
        "device_only": device_only(run),
        "few_iterations": few_iterations(t),
        "first_and_other": first_and_other(run),
        "gaps": gaps(run),
        "findings": [
            {"title": f.title, "cost_ms": f.cost_ns / 1e6, "measured_ms": f.measured_ns / 1e6}
            for f in diagnose_run(run.measured).findings[:4]
        ],
        "optimize": {
            "before_ms": plan.before_ns / 1e6,
            "after_ms": plan.after_ns / 1e6,
            "listed_ms": [[x.before_ns / 1e6, x.after_ns / 1e6] for x in plan.steps],
            "seconds": plan.seconds,
            "replays": plan.evaluations,
            "tasks": len(run.graph),
            "ended": plan.ended,
        },
    }


def halves(run: Run) -> list[float] | None:
    """Returns the errors of the mean of every second iteration, predicted from the others; None for fewer than four."""
    if len(run.iterations) < 4:
        return None
    out = []
    for k in (0, 1):
        seen, asked = run.iterations[k::2], run.iterations[1 - k :: 2]
        replayed = max(mean_lengths(own_times(run.measured, seen)).values())
        out.append(replayed / statistics.fmean(run.length_ns(i) for i in asked) - 1)
    return out


def gaps(run: Run) -> dict[str, float]:
    """Returns the delays between tasks on the replayed critical path (launches, streams, events, and unexplained)."""
    lags = [s.lag_ns for s in run.replay.path()]
    return {
        "share": sum(lags) / run.replayed_ns,
        "longest_ms": max(lags, default=0.0) / 1e6,
        "above_20_ms": int((run.graph.lag_ns > 20e6).sum()),
    }


def few_iterations(t: Timeline) -> dict[int, dict[str, Any]]:
    """Returns the report on the run if only its first iterations had been traced."""
    out = {}
    numbers = sorted({m.iteration for m in t.marks})
    for count in (1, 2, 3):
        keep = np.isin(t["iteration"], numbers[:count])
        cut = replace(t.select(keep), marks=tuple(m for m in t.marks if m.iteration in numbers[:count]))
        run = Run(measured=measure(cut))
        out[count] = {
            "measured_ms": run.measured_ns / 1e6,
            "replayed_ms": run.replayed_ns / 1e6,
            "error": run.error(),
            "naive_error": run.error(naive=True),
            "headline": run.headline,
        }
    return out


def first_and_other(run: Run) -> dict[str, Any]:
    """Replays the first iteration and one other, warm-up or not; returns the replay farthest outside of their range."""
    m = run.measured
    first, *others = m.iterations()
    out = []
    for k in others:
        both = [max(m.measured_ns[r, i] for r in run.graph.ranks) for i in (first, k)]
        ns = max(evaluate(estimate(m, [first, k])).values())
        outside = max(ns / max(both) - 1, 1 - ns / min(both), 0.0)
        out.append(
            {
                "other": k,
                "range_ms": [x / 1e6 for x in sorted(both)],
                "replayed_ms": ns / 1e6,
                "outside": outside,
            }
        )
    return max(out, key=lambda x: x["outside"]) if out else {}


def device_only(run: Run) -> float:
    """Returns the error of a replay of the device ops alone, as in simulators without launching threads (Daydream)."""
    g = run.graph
    part = subgraph(g, on_stream(g.kind))
    part = replace(part, root={}, tail={}, release_ns=np.zeros(len(part)))
    return float(max(evaluate(part).values()) / run.measured_ns - 1)


def alignment(path: Path) -> dict[str, Any]:
    """Adds skews within ±5 ms and drifts within ±50 ppm to real traces; returns the errors of the recovered clocks."""
    t = load(path)
    base = align(t)
    rng = np.random.default_rng(0)
    skew_error: list[float] = []
    drift_error: list[float] = []
    for trial in range(10):
        skew = rng.uniform(-5e6, 5e6, len(t.ranks))
        drift = rng.uniform(-50e-6, 50e-6, len(t.ranks)) * (trial % 2)
        changed = align(disturbed(t, skew, drift))
        at = {mark.rank: mark.start_ns for mark in t.marks if mark.iteration == 3}
        shift = {}
        for k, r in enumerate(t.ranks):
            zero = int(t["start_ns"][t.rank_of == r].min())
            local = at[r] + skew[k] + (at[r] - zero) * drift[k]
            shift[r] = (
                changed.clock(r).to_global(np.array([local]))[0]
                - base.clock(r).to_global(np.array([at[r]]))[0]
            )
            got = (1 + changed.clock(r).drift) * (1 + drift[k]) / (1 + drift[0]) - 1
            drift_error.append(abs(got - base.clock(r).drift))
        skew_error.extend(abs(shift[r] - shift[t.ranks[0]]) for r in t.ranks[1:])
    from pase.replay.measurement.clocks import collective_costs
    from pase.replay.measurement.matching import match_collectives

    def spread(x: Timeline) -> float:
        matches = [m for m in match_collectives(x)[0] if m.iteration >= 2]
        return float(np.median([c["end_spread_ns"] for c in collective_costs(x, matches)])) / 1e3

    return {
        "trials": 10,
        "worst_skew_error_us": max(skew_error) / 1e3,
        "worst_drift_error_us_per_s": max(drift_error) * 1e6,
        "median_end_spread_us": {"ends": spread(base), "dpro": spread(align(t, "dpro"))},
        "uncertainty_us": {r: base.clock(r).uncertainty_ns / 1e3 for r in t.ranks},
    }


def disturbed(t: Timeline, skew: np.ndarray, drift: np.ndarray) -> Timeline:
    """Returns the timeline with wrong clocks: skew in ns and drift by rank."""
    columns = {k: v.copy() for k, v in t.columns.items()}
    for k, r in enumerate(t.ranks):
        mine = t.rank_of == r
        zero = int(t["start_ns"][mine].min())
        begin, end = (
            x + np.int64(skew[k]) + ((x - zero) * drift[k]).astype(np.int64)
            for x in (t["start_ns"][mine], t.end_ns[mine])
        )
        columns["start_ns"][mine], columns["duration_ns"][mine] = begin, end - begin
    return replace(t, columns=columns)


def rows(given: Namespace) -> dict[str, Path]:
    """Returns the file of each run, and of the alignment of clocks."""
    runs = {name: given.traces / file for name, file in RUNS.items()}
    also = {path.name.partition(".")[0]: path for path in given.also}
    return runs | also | {"alignment": given.traces / next(iter(RUNS.values()))}


def measured(files: dict[str, Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of the runs, and the alignment of clocks."""
    for name, file in files.items():
        yield name, (alignment if name == "alignment" else one_run)(file)


def result(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the rows of the recorded runs, those of other runs, and the alignment."""
    also = {name: row for name, row in rows.items() if name not in RUNS and name != "alignment"}
    aligned = {"alignment": rows["alignment"]} if "alignment" in rows else {}
    return {"runs": {n: r for n, r in rows.items() if n in RUNS}, "also": also} | aligned


BENCH = Benchmark(
    "replay_traces",
    rows,
    stream=measured,
    at="",
    head=result,
    options=[
        option("--traces", type=Path, default=SHARED / "traces"),
        option("--also", type=Path, nargs="*", default=[], metavar="TRACE", help="other runs, named by file"),
    ],
)
