"""Replays traces of real runs, predicts changes, and measures the changed runs.

The changes are: twice and half the links' rate; a host that is late in each step (``balance=1`` predicts the run
without the delay from its trace); twice the batch; twice the number of hosts with the same number of examples each; and
another bucket plan of PyTorch's DDP. Each host has its own core, or half of one if the number of hosts changes, so that
hosts only affect each other on the network.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.netlab.jobs import calibrated, results_of
from bench.netlab.net import LabError, Network, Topology
from bench.netlab.session import Session
from bench.netlab.steps import planned

if TYPE_CHECKING:
    from pase.replay.changes.rewrite import Rewrite

__all__ = ["CASES", "measure", "summary"]

CASES = (("mlp", 1024), ("gpt2", 32), ("alexnet", 32))
BASELINES = ("data_parallel", "fsdp", "megatron")
HOSTS = 2
MBIT = 200.0
LATE_S = 0.1
"""Seconds that the last host waits before each step in a run with a late host."""
TRACED_PLAN, OTHER_PLANS = "fifo", ("ddp", "mg_wfbp")
"""The bucket plan of the traced run of DDP, and those of the what-ifs and of the changed runs."""


@dataclass(frozen=True, kw_only=True)
class _ChangedRun:
    """A way to change the runs. times: the batch over the usual one."""

    name: str
    mbit: float = MBIT
    late_s: float = 0.0
    times: int = 1
    traced: bool = True


VARIANTS = (
    _ChangedRun(name="traced"),
    _ChangedRun(name="bare", traced=False),
    _ChangedRun(name="late", late_s=LATE_S),
    _ChangedRun(name="batch", times=2),
    _ChangedRun(name="faster", mbit=2 * MBIT),
    _ChangedRun(name="slower", mbit=MBIT / 2),
)
"""All but one run under the profiler, because it slows steps down and the comparison must be fair."""


PAYLOAD = 1448 / 1514
"""The payload of a frame without the headers of Ethernet, IP and TCP (1500 bytes of IP, with timestamps), over its
size."""
WIRE = MBIT * 1e6 / 8 * PAYLOAD
"""Bytes per second in each direction on a host's link; a user knows it from the network (``pase replay --wire``)."""


def measure(
    session: Session, *, cases: Sequence[tuple[str, int]], steps: int, plans: bool = True
) -> dict[str, Any]:
    """Returns a row per run: the replay's error by rank, and each what-if compared with the changed run. plans: whether
    to run PyTorch's DDP under other bucket plans as well."""
    if not session.resume:
        shutil.rmtree(session.folder / "traces", ignore_errors=True)
    with Network(Topology(racks=(HOSTS,), host_mbit=MBIT, hosts_a_core=1)) as network:
        machine = calibrated(network, session)
        found = _variants(network, session, machine, cases, steps)
    rows = [_row(session, key, found, WIRE) for key in found["traced"]]
    rows += _more_hosts(session, machine, WIRE, cases, steps)
    rows += _bucket_plans(session, steps) if plans else []
    rows = [{"commit": session.commit, **r} for r in rows]
    about = {"mbit": MBIT, "wire_bytes_per_s": WIRE}
    return {"summary": summary(rows), **about, "rows": rows}


def _cells(
    session: Session, machine: Path, cases: Sequence[tuple[str, int]], hosts: int, times: int, steps: int
) -> list[dict[str, Any]]:
    """Returns the job of each run for the hosts: its plan and the number of steps."""
    made = session.folder / f"plans_replay_{hosts}_{times}"
    made.mkdir(parents=True, exist_ok=True)
    return [
        {
            "key": f"{model} {batch} {cell.strategy}",
            "cell": dataclasses.asdict(cell) | {"same_as": None},
            "repeats": steps,
        }
        for model, batch in cases
        for cell in planned(model, batch * times, hosts, machine, made, session.stamp(machine))
        if cell.strategy in BASELINES
    ]


def _traces(session: Session, key: str, name: str) -> Path:
    return session.folder / "traces" / f"{key.replace(' ', '_')}_{name}"


def _variants(
    network: Network, session: Session, machine: Path, cases: Sequence[tuple[str, int]], steps: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns for each variant and run the measurement with its layout."""
    out = {}
    session.say(f"every run {len(VARIANTS)} times: {', '.join(v.name for v in VARIANTS)}")
    for v in VARIANTS:
        cells = [
            c
            | {"late_s": v.late_s}
            | ({"traces": str(_traces(session, c["key"], v.name))} if v.traced else {})
            for c in _cells(session, machine, cases, HOSTS, v.times, steps)
        ]
        network.limit(v.mbit)
        stamp = session.stamp(machine)
        done = results_of(network, session, f"replay_{v.name}", cells, stamp=stamp, traced=v.traced)
        out[v.name] = {c["key"]: done[c["key"]] | {"layout": c["cell"]["layout"]} for c in cells}
    return out


def _row(
    session: Session, key: str, found: Mapping[str, Mapping[str, dict[str, Any]]], wire: float
) -> dict[str, Any]:
    """Returns the row of a run and its what-ifs. A variant in which another strategy is the best has no such run."""
    seconds = {v: _median_s(runs.get(key, {})) for v, runs in found.items()}
    others = {
        v: runs[key]["others_cores"] for v, runs in found.items() if "others_cores" in runs.get(key, {})
    }
    if math.isnan(seconds["traced"]):
        return {"run": key, "failed": found["traced"][key].get("failed", "no time")}
    now = _traces(session, key, "traced")
    late = _traces(session, key, "late")
    changes = [
        _change(now, "bandwidth=2", wire, seconds["faster"]),
        _change(now, "bandwidth=0.5", wire, seconds["slower"]),
        _change(late, "balance=1", wire, seconds["traced"]),
    ]
    if key in found["batch"]:
        from pase.bridges.restrategy import by_ratio

        other = by_ratio(Path(found["traced"][key]["layout"]), Path(found["batch"][key]["layout"]))
        changes.append(_change(now, "strategy=twice the batch", wire, seconds["batch"], other))
    measured = {"bare_s": seconds["bare"], "traced_s": seconds["traced"], "others_cores": others}
    return {"run": key, "hosts": HOSTS, **measured, **_replayed(now, wire), "changes": changes}


def _median_s(row: Mapping[str, Any]) -> float:
    return statistics.median(row.get("steps_s", [math.nan]))


def _more_hosts(
    session: Session, machine: Path, wire: float, cases: Sequence[tuple[str, int]], steps: int
) -> list[dict[str, Any]]:
    """Returns the rows of data parallelism over twice the hosts, with two hosts per core before and after, and the same
    work per host."""
    runs: list[dict[str, dict[str, Any]]] = []
    for hosts, times in ((HOSTS, 1), (2 * HOSTS, 2)):
        cells = [
            c | {"traces": str(_traces(session, c["key"], f"{hosts}_hosts"))}
            for c in _cells(session, machine, cases, hosts, times, steps)
            if c["cell"]["strategy"] == "data_parallel"
        ]
        with Network(Topology(racks=(hosts,), host_mbit=MBIT, hosts_a_core=2)) as network:
            session.say(f"{len(cells)} runs on {hosts} hosts, two a core")
            stamp = session.stamp(machine)
            name = f"replay_{hosts}_hosts"
            runs.append(results_of(network, session, name, cells, stamp=stamp, traced=True))
    rows = []
    for key, traced in runs[0].items():
        if math.isnan(_median_s(traced)) or math.isnan(_median_s(runs[1].get(key, {}))):
            rows.append({"run": f"{key}, two a core", "failed": "not measured on both"})
            continue
        now = _traces(session, key, f"{HOSTS}_hosts")
        row = {"run": f"{key}, two a core", "hosts": HOSTS, "traced_s": _median_s(traced)}
        changes = [_change(now, f"ranks={2 * HOSTS}", wire, _median_s(runs[1][key]))]
        rows.append({**row, **_replayed(now, wire), "changes": changes})
    return rows


def _bucket_plans(session: Session, steps: int) -> list[dict[str, Any]]:
    """Returns the rows of PyTorch's DDP under one bucket plan, with what-ifs of others that are then run."""
    from bench.netlab.buckets import POLICIES
    from pase.bridges.replan import by_policy

    traces = session.folder / "traces" / "ddp"
    cells = [
        {"key": p, "what": "traced", "policy": p, "iterations": steps, "traces": f"{traces}_{p}"}
        for p in (TRACED_PLAN, *OTHER_PLANS)
    ]
    with Network(Topology(racks=(HOSTS,), host_mbit=MBIT, hosts_a_core=1)) as network:
        session.say(f"PyTorch's DDP under {len(cells)} bucket plans")
        about = {"policies": POLICIES, "compute_s": 1.0, "learning_rate": 0.1}
        found = results_of(network, session, "replay_plans", cells, kind="torch", **about)
    if any("steps_s" not in found[c["key"]] for c in cells):
        return [{"run": "PyTorch DDP", "failed": str(found)[:600]}]
    now = Path(f"{traces}_{TRACED_PLAN}")
    changes = [_change(now, f"bucket-plan={p}", None, _median_s(found[p]), by_policy(p)) for p in OTHER_PLANS]
    row = {"run": f"PyTorch DDP, plan '{TRACED_PLAN}'", "hosts": HOSTS}
    return [row | {"traced_s": _median_s(found[TRACED_PLAN]), **_replayed(now, None), "changes": changes}]


def _change(
    traces: Path, what_if: str, wire: float | None, measured_s: float, rewrite: Rewrite | None = None
) -> dict[str, Any]:
    """Returns a what-if compared with the changed run."""
    made = _replayed(traces, wire, what_if, rewrite)
    if "what_if_s" not in made:
        return {"what_if": what_if, "measured_s": measured_s, "refused": made["refused"]}
    if math.isnan(measured_s):
        return {"what_if": what_if, "predicted_s": made["what_if_s"], "failed": "not measured"}
    return {
        "what_if": what_if,
        "now_s": made["measured_s"],
        "predicted_s": made["what_if_s"],
        "measured_s": measured_s,
        "error": made["what_if_s"] / measured_s - 1,
        "believable": made["doubt"] is None,
        "why_not": made["doubt"] or "",
    }


def _replayed(
    traces: Path, wire: float | None, what_if: str = "", rewrite: Rewrite | None = None
) -> dict[str, Any]:
    from pase.errors import PaseError
    from pase.replay.reports.report import replay_report

    asked = [what_if] if what_if else []
    given = {what_if: rewrite} if rewrite is not None else {}
    try:
        report = replay_report(traces, what_if=asked, rewrites=given, wire_bytes_per_s=wire, force=True)
    except PaseError as e:
        return {"refused": str(e), "believable": False}
    ranks = report["ranks"]
    if not ranks:
        raise LabError(f"{traces}: a replay without ranks")
    out = {
        "headline": report["headline"],
        "believable": report["believable"],
        "errors_by_rank": [r["error"] for r in ranks if r["error"] is not None],
        "measured_s": max(r["measured_s"] for r in ranks),
        "replayed_s": max(r["replayed_s"] for r in ranks),
        "communication_s": max(r["communication_s"] for r in ranks),
    }
    if not what_if:
        return out
    asked_of = report["what_if"][-1]
    return out | {"what_if_s": asked_of["iteration_s"], "doubt": asked_of["doubt"]}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns errors over all runs, and by kind of what-if, without those that pase itself doubts."""
    by_rank = [abs(e) for r in rows for e in r.get("errors_by_rank", ())]
    changes = [c for r in rows for c in r.get("changes", ())]
    kept = [c for c in changes if c.get("believable")]
    kinds: dict[str, list[float]] = {"all": [abs(c["error"]) for c in kept]}
    for c in kept:
        kinds.setdefault(c["what_if"].partition("=")[0], []).append(abs(c["error"]))
    return {
        "runs": len(rows),
        "failed": sum("failed" in x for x in (*rows, *changes)),
        "refused": sum("refused" in x for x in (*rows, *changes)),
        "called_into_question": sum(not c.get("believable", True) for c in changes),
        "median_error_by_rank": statistics.median(by_rank) if by_rank else None,
        "largest_error_by_rank": max(by_rank, default=None),
        "what_ifs": {
            k: {"count": len(e), "median": statistics.median(e), "worst": max(e)}
            for k, e in kinds.items()
            if e
        },
    }
