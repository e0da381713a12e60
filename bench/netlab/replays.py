"""Traces of real runs: replayed, asked what a change would give, and the run that really changed then measured.

Changed are the links' rate (twice and half of it) and a host that is late in each step: from its trace ``balance=1``
predicts the run without the delay, which is measured as well.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.netlab.jobs import calibrated, results_of
from bench.netlab.net import LabError, Network, Topology
from bench.netlab.session import Session
from bench.netlab.steps import planned

__all__ = ["CASES", "measure"]

CASES = (("mlp", 1024), ("gpt2", 32), ("alexnet", 32))
METHODS = ("data_parallel", "fsdp", "megatron")
MBIT = 200.0
LATE_S = 0.1
"""What the last host waits before each step of a run that is traced so."""


def wire_bytes_per_s(machine: Path) -> float:
    """What a host's link carries, as the calibration found it: an all-reduce's bytes beyond its smallest size, over
    the time that they add. Bubbles between a ring's turns are in it, as they grow with the link too."""
    from pase.machine import load

    curves = [c for c in load(machine).collectives if c.kind == "all_reduce"]
    largest = max(curves, key=lambda c: c.curve.nbytes[-1])
    n, t, ways = largest.curve.nbytes, largest.curve.seconds, math.prod(largest.ways)
    return 2 * (ways - 1) / ways * (n[-1] - n[0]) / max(t[-1] - t[0], 1e-9)


def measure(session: Session, *, cases: Sequence[tuple[str, int]], hosts: int, steps: int) -> dict[str, Any]:
    """A row a run: the replay's error by rank, and the what-if's against the run with twice the bandwidth."""
    topology = Topology(racks=(hosts,), host_mbit=MBIT)
    rows = []
    with Network(topology) as network:
        machine = calibrated(network, session)
        stamp = session.stamp(machine)
        made = session.folder / f"plans_{topology.slug}"
        made.mkdir(parents=True, exist_ok=True)
        if not session.resume:
            shutil.rmtree(session.folder / "traces", ignore_errors=True)
        cells = []
        for model, batch in cases:
            for cell in planned(model, batch, hosts, machine, made, stamp):
                if cell.strategy in METHODS:
                    key = f"{model} {batch} {cell.strategy}"
                    traces = session.folder / "traces" / key.replace(" ", "_")
                    given = dataclasses.asdict(cell) | {"same_as": None}
                    cells.append({"key": key, "cell": given, "repeats": steps, "traces": str(traces)})
        rates = f"{MBIT / 2:g}, {MBIT:g} and {2 * MBIT:g} Mbit"
        session.say(f"{len(cells)} runs, six times each: at {rates}, traced and not, and with a late host")
        plain = [{k: v for k, v in c.items() if k != "traces"} for c in cells]
        again = [c | {"traces": c["traces"] + "_faster"} for c in cells]

        def ran(name: str, given: Sequence[dict[str, Any]], traced: bool) -> dict[str, dict[str, Any]]:
            return results_of(network, session, f"replay_{name}", given, stamp=stamp, traced=traced)

        traced = ran("traced", cells, True)
        delayed = [c | {"traces": c["traces"] + "_late", "late_s": LATE_S} for c in cells]
        late = ran("late", delayed, True)
        # The same steps without a profiler at work, at this bandwidth and at twice as much.
        bare = ran("bare", plain, False)
        network.limit(2 * MBIT)
        faster = ran("faster", plain, False)
        # And traced too: the profiler slows steps down, so like is compared with like.
        faster_traced = ran("faster_traced", again, True)
        network.limit(MBIT / 2)
        slower_traced = ran("slower_traced", [c | {"traces": c["traces"] + "_slower"} for c in cells], True)
    wire = wire_bytes_per_s(machine)
    results = (traced, late, bare, faster, faster_traced, slower_traced)
    for c in cells:
        median_s = [statistics.median(r[c["key"]].get("steps_s", [math.nan])) for r in results]
        known = {"mbit": MBIT, "hosts": hosts, "wire_bytes_per_s": wire}
        failed = any(math.isnan(s) for s in median_s)
        rows.append({"run": c["key"], "failed": True} if failed else _row(c, median_s, wire) | known)
    return {"summary": _summary(rows), "rows": rows}


def _row(cell: dict[str, Any], median_s: Sequence[float], wire: float) -> dict[str, Any]:
    """A run's what-ifs beside what was measured: seconds of a step as it was traced, with a late host, bare, twice as
    fast bare and traced, half as fast traced."""
    traced_s, late_s, bare_s, faster_s, faster_traced_s, slower_traced_s = median_s
    traces = cell["traces"]
    row = {
        "run": cell["key"],
        "bare_s": bare_s,
        "traced_s": traced_s,
        "faster_bare_s": faster_s,
        "faster_traced_s": faster_traced_s,
        "others": [
            _other("bandwidth=0.5", _replayed(Path(traces), wire, "bandwidth=0.5"), slower_traced_s),
            _other("balance=1", _replayed(Path(traces + "_late"), wire, "balance=1"), traced_s, late_s),
        ],
        **_replayed(Path(traces), wire, "bandwidth=2"),
    }
    if "what_if_s" in row:
        row["what_if_error"] = row["what_if_s"] / faster_traced_s - 1
        gain = traced_s / faster_traced_s
        row["speedup_measured"], row["speedup_predicted"] = gain, row["replayed_s"] / row["what_if_s"]
    return row


def _other(
    what_if: str, made: dict[str, Any], measured_s: float, now_s: float | None = None
) -> dict[str, Any]:
    """A what-if beside the run that really changed. now_s: of the run that it was asked of."""
    if "what_if_s" not in made:
        return {"what_if": what_if, "refused": made["refused"]}
    error = made["what_if_s"] / measured_s - 1
    out = {"what_if": what_if, "predicted_s": made["what_if_s"], "measured_s": measured_s, "error": error}
    return out | {"believable": made["believable"]} | ({} if now_s is None else {"traced_s": now_s})


def _replayed(traces: Path, wire: float, what_if: str) -> dict[str, Any]:
    from pase.errors import PaseError
    from pase.replay.report import replay_report

    try:
        report = replay_report(traces, what_if=[what_if], wire_bytes_per_s=wire, force=True)
    except PaseError as e:
        return {"refused": str(e)}
    ranks = report["ranks"]
    if not ranks:
        raise LabError(f"{traces}: a replay without ranks")
    return {
        "headline": report["headline"],
        "believable": report["believable"],
        "errors_by_rank": [r["error"] for r in ranks if r["error"] is not None],
        "measured_s": max(r["measured_s"] for r in ranks),
        "replayed_s": max(r["replayed_s"] for r in ranks),
        "communication_s": max(r["communication_s"] for r in ranks),
        "what_if_s": report["what_if"][-1]["iteration_s"],
    }


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(e) for r in rows for e in r.get("errors_by_rank", ())]
    ifs = [abs(r["what_if_error"]) for r in rows if "what_if_error" in r and r["believable"]]
    others = [o for r in rows for o in r.get("others", ()) if o.get("believable")]
    for name in sorted({o["what_if"] for o in others}):
        ifs += [abs(o["error"]) for o in others if o["what_if"] == name]
    return {
        "runs": len(rows),
        "refused_or_failed": sum("refused" in r or "failed" in r for r in rows),
        "not_believable": sum(not r.get("believable", True) for r in rows),
        "median_error_by_rank": statistics.median(errors) if errors else None,
        "largest_error_by_rank": max(errors, default=None),
        "median_what_if_error": statistics.median(ifs) if ifs else None,
        "largest_what_if_error": max(ifs, default=None),
    }
