"""The sums of Holistic Trace Analysis, computed by pase and by HTA itself on the same traces, number by number.

    python -m venv /tmp/hta && /tmp/hta/bin/pip install HolisticTraceAnalysis==0.5.0
    .venv/bin/python -m bench.replay_hta --hta /tmp/hta/bin/python    # writes bench/results/replay_hta.json

HTA needs versions of its own and is run in an environment of its own. Times in µs. HTA gives whole µs where it reads
traces so (its default), percentages with two digits; ``difference`` is relative for times and absolute for percentages.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from bench.cases import SHARED
from bench.provenance import RESULTS, save
from pase.replay.ingest import load
from pase.replay.streams import copies, queue_lengths, stream_idle, streams

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


def main() -> None:
    """Writes bench/results/replay_hta.json: HTA's sums beside ours, trace by trace."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--traces", type=Path, default=SHARED / "traces")
    parser.add_argument("--hta", type=Path, required=True, help="a Python that has HolisticTraceAnalysis")
    args = parser.parse_args()
    out: dict[str, Any] = {"version": _version(args.hta), "traces": {}}
    for name in FILES:
        out["traces"][name] = compared(ours(args.traces / name), theirs(args.hta, args.traces / name))
    rows = [r for t in out["traces"].values() for r in t]
    known = [r for r in rows if r["difference"] is not None]
    out["numbers"], out["equal"] = len(known), sum(abs(r["difference"]) < 1e-4 for r in known)
    out["largest_difference"] = max(abs(r["difference"]) for r in known)
    print(save(out, RESULTS / "replay_hta.json").read_text())


def _version(python: Path) -> str:
    code = "import importlib.metadata as m; print(m.version('HolisticTraceAnalysis'))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def theirs(python: Path, trace: Path) -> dict[str, Any]:
    """HTA's sums of a trace, by name."""
    done = subprocess.run([python, "-c", THEIRS, trace], check=True, capture_output=True, text=True)
    numbers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def ours(trace: Path) -> dict[str, float]:
    """The same sums by pase."""
    t = load(trace)
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
    """A row for each number that either has; a category that HTA leaves out is zero there."""
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


if __name__ == "__main__":
    main()
