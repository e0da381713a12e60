"""The sums of Holistic Trace Analysis, compared with HTA number by number.

    python -m venv /tmp/hta && /tmp/hta/bin/pip install HolisticTraceAnalysis==0.5.0
    python -m bench replay.hta --hta /tmp/hta/bin/python
    python -m bench replay.hta      # with HTA's numbers as the result file has them

HTA needs its own package versions, so it runs in its own environment. Times are in µs; ``difference`` is relative for
times and absolute for percentages. A number that differs is computed again by HTA's definition, and ``as_hta`` has the
bounds of that result; ``why`` states the definition and which of the two is right. The bounds differ if HTA's answer
depends on how pandas sorts simultaneous events: one has all begins first, the other all ends first. Writes
bench/results/replay_hta.json.
"""

from __future__ import annotations

import gzip
import json
import subprocess
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.cases import SHARED
from bench.runner import RESULTS, Benchmark, option
from pase.replay.reports.streams import copies, queue_courses, queue_lengths, stream_idle, streams
from pase.replay.traces.ingest import load
from pase.replay.types import Timeline

EQUAL = 1e-4
COMMITTED = json.loads((RESULTS / "replay_hta.json").read_text(encoding="utf-8"))
FILES = (
    "hta/nccl_parser_config_nccl_data.json.gz",
    "hta/df_index_resolver_df_index_resolver.json.gz",
    "hta/trace_diff_control_control.json.gz",
    "hta/trace_filter_sampled_rank-0.json.gz",
    "hta/trace_filter_sampled_rank-1.json.gz",
)

THEIRS = """
import json, logging, os, shutil, sys, tempfile
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
out = {}
with tempfile.TemporaryDirectory() as d:
    path = shutil.copy(sys.argv[1], os.path.join(d, "trace.json.gz"))
    a = TraceAnalysis(trace_files={0: path}, trace_dir=d, include_last_profiler_step=True)
    t = a.get_temporal_breakdown(visualize=False).iloc[0]
    for mine, theirs in (("idle", "idle_time(us)"), ("compute", "compute_time(us)"), ("total", "kernel_time(us)")):
        out["temporal: " + mine] = float(t[theirs])
    out["overlap %"] = float(a.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"])
    names = {"host_wait": "host", "kernel_wait": "kernel", "other": "other"}
    for r in a.get_idle_time_breakdown(ranks=[0], visualize=False)[0].to_dict("records"):
        out["idle of stream %s: %s" % (r["stream"], names[r["idle_category"]])] = float(r["idle_time"])
    try:
        q = a.get_queue_length_summary(ranks=[0])["queue_length"]
        for (_, stream), row in q.iterrows():
            out["queue of stream %s: most" % stream] = float(row["max"])
            out["queue of stream %s: mean" % stream] = float(row["mean"])
    except Exception as e:
        out["queue: error"] = repr(e)
    bw = a.get_memory_bw_summary(ranks=[0])
    if bw is not None:
        for (_, name), row in bw["memory_bw_gbps"].iterrows():
            out["%s: mean GB/s" % name] = float(row["mean"])
print(json.dumps(out))
"""


WHY = {
    "whole µs": "HTA takes begins up and ends down to whole µs (its parser's default), which cuts 0.5 µs off every op "
    "on average; the trace has ns. Ours is right.",
    "two digits": "HTA rounds percentages to two digits; the same number.",
    "ties": "a launch and an op that begin in the same µs: HTA sorts by time alone with an unstable sort, and its mean "
    "of the length depends on the outcome. Ours counts the launch first, as no op begins before it is launched.",
    "running sum": "HTA takes the mean over the changes of a running sum of the bandwidths that the trace states, "
    "without those where it is zero; copies that touch or overlap count twice as much, ties as they are sorted, and a "
    "sum that ends a little above zero by rounding counts as a sample. The mean of the copies' bandwidths is ours.",
}


def measured(name: str, given: Namespace) -> list[dict[str, Any]]:
    """Returns the numbers of one trace, ours and HTA's; without ``--hta``, HTA's as the committed file has them."""
    path = given.traces / name
    if given.hta:
        return explained(compared(ours(load(path)), theirs(given.hta, path)), path)
    kept = {r["number"]: r["hta"] for r in COMMITTED["traces"][name] if r["hta"] is not None}
    return explained(compared(ours(load(path)), kept), path)


def summary(traces: dict[str, list[dict[str, Any]]], given: Namespace) -> dict[str, Any]:
    """Returns how many numbers are equal, and why the others differ."""
    known = [r for rows in traces.values() for r in rows if r["difference"] is not None]
    differing = [r for r in known if abs(r["difference"]) >= EQUAL]
    return {
        "version": _version(given.hta) if given.hta else COMMITTED["version"],
        "numbers": len(known),
        "equal": len(known) - len(differing),
        "explained": sum(bool(r["explained"]) for r in differing),
        "causes": {c: sum(r["why"] == w for r in differing) for c, w in WHY.items()},
        "largest_difference": max(abs(r["difference"]) for r in known),
    }


def _version(python: Path) -> str:
    code = "import importlib.metadata as m; print(m.version('HolisticTraceAnalysis'))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def theirs(python: Path, trace: Path) -> dict[str, Any]:
    """Returns HTA's sums of a trace, by name."""
    done = subprocess.run([python, "-c", THEIRS, trace], check=True, capture_output=True, text=True)
    numbers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def ours(t: Timeline) -> dict[str, float]:
    """Returns the same sums by pase."""
    (rank,) = t.ranks
    s = streams(t, rank)
    out = {
        "temporal: idle": s.idle_ns / 1e3,
        "temporal: compute": s.compute_ns / 1e3,
        "temporal: total": s.total_ns / 1e3,
        "overlap %": 100 * s.overlapped_ns / s.communication_ns if s.communication_ns else 0.0,
    }
    for stream, idle in stream_idle(t, rank).items():
        out |= {f"idle of stream {stream}: {k}": v / 1e3 for k, v in idle.items()}
    for stream, (most, mean) in queue_lengths(t, rank).items():
        out |= {f"queue of stream {stream}: most": float(most), f"queue of stream {stream}: mean": mean}
    return out | {f"{name}: mean GB/s": rate for name, (_, rate) in copies(t, rank).items()}


def compared(mine: dict[str, float], other: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each number that either has; a category that HTA leaves out is zero there."""
    rows = []
    for name in sorted({*mine, *other}):
        a, b = mine.get(name), other.get(name)
        if b is None and name.startswith("idle of") and a == 0.0:
            continue
        difference = None
        if isinstance(a, float) and isinstance(b, float):
            difference = (a - b) if name.endswith("%") else (a / b - 1 if b else a)
        rows.append({"number": name, "pase": a, "hta": b, "difference": difference})
    return rows


def explained(rows: list[dict[str, Any]], trace: Path) -> list[dict[str, Any]]:
    """Adds to rows that differ the result of HTA's own definition (``as_hta``: lowest and highest) and the reason."""
    t = load(trace)
    read = in_whole_us(t)
    rounded = ours(read)
    lengths, rates = queue_bounds(read), running_sums(trace)
    for r in rows:
        if r["difference"] is None or abs(r["difference"]) < EQUAL:
            continue
        name = r["number"]
        if name.startswith("queue of"):
            bounds, why = lengths[name], WHY["ties"]
        elif name.endswith("GB/s"):
            bounds, why = rates[name], WHY["running sum"]
        elif name.endswith("%"):
            finer = (t["start_ns"] % 1000).any() or (t.end_ns % 1000).any()
            bounds, why = (round(rounded[name], 2),) * 2, WHY["whole µs" if finer else "two digits"]
        else:
            bounds, why = (rounded[name],) * 2, WHY["whole µs"]
        slack = EQUAL * abs(r["hta"])
        r |= {
            "as_hta": list(bounds),
            "explained": bounds[0] - slack <= r["hta"] <= bounds[1] + slack,
            "why": why,
        }
    return rows


def in_whole_us(t: Timeline) -> Timeline:
    """Rounds begins up and ends down to whole µs, as HTA's parser does."""
    start = -(-t["start_ns"] // 1000) * 1000
    length = np.maximum(t.end_ns // 1000 * 1000 - start, 0)
    return replace(t, columns={**t.columns, "start_ns": start, "duration_ns": length})


def queue_bounds(t: Timeline) -> dict[str, tuple[float, float]]:
    """Returns mean queue lengths with simultaneous ops first, and with simultaneous launches first."""
    (rank,) = t.ranks
    low, high = (queue_courses(t, rank, launches_first=first) for first in (False, True))
    return {f"queue of stream {k}: mean": (float(low[k].mean()), float(high[k].mean())) for k in low}


def running_sums(trace: Path) -> dict[str, tuple[float, float]]:
    """Returns HTA's mean bandwidths of copies: over the changes of the sum of the stated bandwidths, if not zero."""
    with gzip.open(trace) as f:
        events = json.load(f)["traceEvents"]
    of: dict[str, list[tuple[int, int, float]]] = {}
    for e in events:
        if e.get("cat") in ("gpu_memcpy", "gpu_memset"):
            start = -(-int(e["ts"] * 1000) // 1000)
            end = int((e["ts"] + e["dur"]) * 1000) // 1000
            name = " ".join(e["name"].partition("(")[0].split())
            of.setdefault(name, []).append((start, max(end - start, 1), e["args"]["memory bandwidth (GB/s)"]))
    out = {}
    for name, copied in of.items():
        at = np.array([s for s, _, _ in copied] + [s + d for s, d, _ in copied])
        change = np.array([r for _, _, r in copied] + [-r for _, _, r in copied])
        means = []
        for sign in (1, -1):
            total = np.maximum(np.cumsum(change[np.lexsort((sign * change, at))]), 0.0)
            # A rounding residue in a sum that should be zero may or may not count.
            means += [float(total[total > least].mean()) for least in (0.0, 1e-9)]
        out[f"{name}: mean GB/s"] = (min(means), max(means))
    return out


BENCH = Benchmark(
    "replay_hta",
    FILES,
    stream=lambda chosen, given: ((name, measured(name, given)) for name in chosen),
    at="traces",
    head=summary,
    line=lambda name, rows: f"{name}: {len(rows)} numbers",
    options=[
        option("--traces", type=Path, default=SHARED / "traces"),
        option("--hta", type=Path, help="a Python that has HolisticTraceAnalysis"),
    ],
)
