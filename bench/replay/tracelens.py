"""pase's sums of traces beside the tables that TraceLens publishes with its tests.

    python -m bench replay.tracelens --traces TraceLens/tests/traces

TraceLens (github.com/AMD-AGI/TraceLens, MIT) keeps the tables that it makes of a trace beside that trace. Compared are
the times of its timeline (computing, communicating, copying, idle), the FLOPs of each row of its tables of convolutions
and attention, forward and backward, and the calls, bytes and mean times of each row of its table of collectives.
Numbers are equal within 1e-4, and times within 1 ns. Times are those of ops whose launch is in the trace. Writes
bench/results/replay_tracelens.json.
"""

from __future__ import annotations

import ast
import csv
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bench.runner import Benchmark, option
from pase.replay import load
from pase.replay.measurement.breakdown import union
from pase.replay.traces.stated_flops import stated_flops
from pase.replay.types import COLLECTIVE, KINDS, OPERATIONS, Timeline

EQUAL, EQUAL_MS = 1e-4, 1e-6
FLOPS = ("CONV_fwd", "CONV_bwd", "SDPA_fwd", "SDPA_bwd")
BACKWARD = {"aten::_scaled_dot_product_flash_attention": (5, 2)}
"""TraceLens lists the backward of this op by its forward's arguments: five products where forward has two."""
WHY = {
    "fills": "The table leaves out memsets, which TraceLens's gpu_event_analyser.py counts as computing (and its other "
    "tables do).",
    "gradients": "TraceLens counts both gradients of a convolution whose arguments say that the image needs none.",
}


def pairs(given: Namespace) -> list[str]:
    """Returns the traces that have tables beside them."""
    found = sorted(given.traces.rglob("*.json.gz")) if given.traces else []
    return [str(p.relative_to(given.traces)) for p in found if tables(p) is not None]


def tables(trace: Path) -> Path | None:
    """Returns the folder of a trace's tables."""
    name = trace.name.removesuffix(".json.gz")
    return next((f for f in sorted(trace.parent.glob(f"{name}*perf_report_csvs")) if f.is_dir()), None)


def measured(name: str, given: Namespace) -> list[dict[str, Any]]:
    """Returns the numbers of one trace, ours and TraceLens's."""
    path = given.traces / name
    folder = tables(path)
    assert folder is not None
    t = load(path)
    out = [*times(t, folder), *flops(folder), *collectives(t, folder)]
    for row in out:
        near = "ms" in row["number"] and abs(row["pase"] - row["tracelens"]) < EQUAL_MS
        ratio = row["pase"] / row["tracelens"] - 1 if row["tracelens"] else row["pase"]
        row["difference"] = 0.0 if near else ratio
    return out


def read(folder: Path, table: str) -> list[dict[str, str]]:
    """Returns the rows of a table; none if the folder does not have it."""
    path = folder / f"{table}.csv"
    csv.field_size_limit(1 << 24)
    return list(csv.DictReader(path.open(encoding="utf-8"))) if path.exists() else []


def times(t: Timeline, folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the times in which a device computes, communicates, copies or idles, in ms."""
    listed = read(folder, "gpu_timeline")
    if not listed or "is_recompute" in listed[0]:
        return  # there, it lists recomputation apart
    copying, filling = KINDS.index("memcpy"), KINDS.index("memset")
    calls = t["correlation"][t["kind"] == KINDS.index("runtime")]
    launched = np.isin(t["correlation"], calls) if len(calls) else t["correlation"] == t["correlation"]

    def busy(*kinds: int) -> np.ndarray:
        mine = np.isin(t["kind"], kinds) & launched
        return union(t["start_ns"][mine], t.end_ns[mine])

    def ms(spans: np.ndarray) -> float:
        return float((spans[:, 1] - spans[:, 0]).sum()) / 1e6

    def both(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return union(*np.concatenate([a, b]).T)

    compute = busy(KINDS.index("kernel"), filling)
    fills = ms(compute) - ms(busy(KINDS.index("kernel")))
    sent, copied = busy(COLLECTIVE), busy(copying)
    worked = both(compute, sent)
    every = both(worked, copied)
    total = float(every[-1, 1] - every[0, 0]) / 1e6
    ours = {
        "computation_time": ms(compute),
        "exposed_comm_time": ms(worked) - ms(compute),
        "exposed_memcpy_time": ms(every) - ms(worked),
        "busy_time": ms(every),
        "idle_time": total - ms(every),
        "total_time": total,
        "total_comm_time": ms(sent),
        "total_memcpy_time": ms(copied),
    }
    for row in listed:
        if row["type"] in ours:
            mine, theirs = ours[row["type"]], float(row["time ms"])
            found = {"number": f"{row['type']}, ms", "pase": mine, "tracelens": theirs}
            yield found | ({"why": "fills"} if fills and abs(mine - fills - theirs) < EQUAL * theirs else {})


def flops(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the GFLOPs of each convolution and attention."""
    for table in FLOPS:
        for k, row in enumerate(read(folder, table)):
            dims = ast.literal_eval(row["Input Dims_first"])
            operands = tuple(tuple(d) if all(isinstance(x, int) for x in d) else () for d in dims)
            stated = ast.literal_eval(row["Concrete Inputs_first"])
            ours = stated_flops(row["name"], operands, stated) / 1e9
            if table == "SDPA_bwd" and row["name"] in BACKWARD:
                a, b = BACKWARD[row["name"]]
                ours = ours * a / b
            found = {"number": f"{table} {k}: GFLOPs", "pase": ours, "tracelens": float(row["GFLOPS_first"])}
            partial = row["name"] == "aten::convolution_backward" and stated[-1].startswith("[False")
            yield found | ({"why": "gradients"} if partial else {})


def collectives(t: Timeline, folder: Path) -> Iterator[dict[str, Any]]:
    """Yields calls, MiB and mean ms of each collective."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for e in np.flatnonzero(t["kind"] == COLLECTIVE).tolist():
        key = (OPERATIONS[int(t["operation"][e])].replace("_", ""), int(t["nbytes"][e]))
        found[key].append(float(t["duration_ns"][e]) / 1e6)
    widths = {"BFloat16": 2, "Half": 2, "Float": 4, "Long": 8, "Int": 4}
    for row in read(folder, "coll_analysis"):
        width = widths.get(row["dtype"], 0)
        size = int(max(float(row["In msg nelems"]), float(row["Out msg nelems"]))) * width
        name = row["Collective name"].replace("_", "")
        ours = found.get((name, size), [])
        most = max(float(row["In msg size (MB)_first"]), float(row["Out msg size (MB)_first"]))
        label = f"{name} of {size} bytes"
        yield {"number": f"{label}: calls", "pase": len(ours), "tracelens": float(row["operation_count"])}
        yield {"number": f"{label}: MiB", "pase": size / 2**20 if ours else 0.0, "tracelens": most}
        theirs = float(row["dur_mean"]) / 1e3
        yield {"number": f"{label}: mean ms", "pase": fmean(ours) if ours else 0.0, "tracelens": theirs}


def summary(traces: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Returns how many numbers are equal, and why the others differ."""
    rows = [r for some in traces.values() for r in some]
    other = [r for r in rows if abs(r["difference"]) >= EQUAL]
    return {
        "numbers": len(rows),
        "equal": len(rows) - len(other),
        "explained": {WHY[w]: sum(r.get("why") == w for r in other) for w in WHY},
        "unexplained": [r["number"] for r in other if "why" not in r],
    }


BENCH = Benchmark(
    "replay_tracelens",
    pairs,
    stream=lambda chosen, given: ((name, measured(name, given)) for name in chosen),
    at="traces",
    head=summary,
    line=lambda name, rows: f"{name}: {len(rows)} numbers",
    options=[option("--traces", type=Path, help="TraceLens's folder tests/traces")],
)
