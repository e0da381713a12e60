"""Perfetto's flows and counters of traces and of plans: arrows to waiting ranks, rates that return to 0, and memory."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

import pase
from bench.cases.timelines import ImaginedRun, simulate, write
from pase.replay.measurement.clocks import align
from pase.replay.reports.report import load_any
from pase.replay.traces.timeline_io import chrome_trace
from tests.command import printed

Events = list[dict]


def test_the_slow_rank_is_where_the_arrows_come_from(tmp_path: Path) -> None:
    run = ImaginedRun(ranks=3, iterations=2, slow_rank=1, slow_by=1.5)
    t = align(load_any(write(simulate(run), tmp_path / "traces")), "ends")
    events = chrome_trace(t)["traceEvents"]
    lanes = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    ends = {"s": {}, "f": {}}
    for e in events:
        if e["ph"] in ends:
            ends[e["ph"]][e["id"]] = e
    assert ends["s"] and ends["s"].keys() == ends["f"].keys()
    for at, start in ends["s"].items():
        end = ends["f"][at]
        assert start["pid"] != end["pid"] and start["ts"] <= end["ts"]
        assert {(e["pid"], e["tid"]) for e in (start, end)} <= lanes
    slow = sum(e["name"] == "waited for rank 1" for e in ends["s"].values())
    assert slow > 0.6 * len(ends["s"])

    rates: dict[tuple[int, str], list[float]] = defaultdict(list)
    for e in events:
        if e["ph"] == "C":
            rates[e["pid"], e["name"]].append(e["args"]["GB/s"])
    assert {rank for rank, _ in rates} == {0, 1, 2}
    assert all(r[-1] == 0 and max(r) > 0 and min(r) >= 0 for r in rates.values())


def written(plan: pase.Plan, folder: Path) -> Events:
    """Returns the events of the file that `pase report --timeline` writes."""
    plan.save(folder / "layout.json")
    step = folder / "step.json.gz"
    printed(
        "report", folder / "layout.json", "-o", folder / "page.html", "--time-limit", 0, "--timeline", step
    )
    return json.loads(gzip.decompress(step.read_bytes()))["traceEvents"]


def arrows(events: Events) -> list[tuple[dict, dict]]:
    """Returns (source slice, destination slice) of every arrow."""
    slices = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            slices[e["pid"], e["tid"]].append(e)

    def on(e: dict) -> dict:
        return next(x for x in slices[e["pid"], e["tid"]] if x["ts"] <= e["ts"] <= x["ts"] + x["dur"])

    def begins(e: dict) -> dict:
        return next(x for x in slices[e["pid"], e["tid"]] if x["ts"] == e["ts"])

    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    starts = [e for e in events if e["ph"] == "s"]
    assert len(starts) == len(ends)
    return [(on(e), begins(ends[e["id"]])) for e in starts]


def names(events: Events, what: str) -> list[str]:
    return [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == what]


def test_a_pipelines_step_for_perfetto(tmp_path: Path) -> None:
    plan = pase.compile(
        "zoo:gpt2?layers=4&batch=16&seq=128&vocab=2048",
        devices=4,
        pipeline="2",
        accumulate=4,
        baselines=False,
        memory_limit="none",
    )
    p, events = plan.pipeline, written(plan, tmp_path)
    assert p is not None
    assert names(events, "process_name") == ["rank 0 on devices 0 to 1", "rank 1 on devices 2 to 3"]
    assert {"stream work", "stream sends to rank 1", "stream sends to rank 0"} <= {
        *names(events, "thread_name")
    }
    found = arrows(events)
    crossed = sum(a.rank != b.rank for a, b in pairwise(p.stages))
    assert len(found) == 2 * p.micro_batches * crossed  # activations and gradients of each micro-batch
    for sent, needing in found:
        assert sent["pid"] != needing["pid"] and sent["ts"] + sent["dur"] <= needing["ts"] + 2e-3
        micro, stage = (sent["name"].split(w)[1].split()[0].strip(",") for w in ("micro-batch", "to"))
        assert needing["name"].startswith(f"{micro}: ") and needing["name"].endswith(f"stage {stage}")
        assert sent["args"]["nbytes"] == p.stages[0].send_bytes
    most: dict[int, float] = defaultdict(float)
    for e in events:
        if e["ph"] == "C" and "in flight" in e["name"]:
            most[e["pid"]] = max(most[e["pid"]], e["args"]["GiB"])
    for rank, top in most.items():
        (stays,) = [
            e["args"]["GiB"] for e in events if "weights" in e["name"] and e["ph"] == "C" and e["pid"] == rank
        ]
        mine = next(s.memory_bytes for s in p.stages if s.rank == rank)
        assert top > 0 and stays + top == pytest.approx(mine / 2**30, abs=1e-6)
    last = {e["pid"]: e["args"]["GiB"] for e in events if e["ph"] == "C" and "in flight" in e["name"]}
    assert last == {0: 0.0, 1: 0.0}


def test_a_plans_step_for_perfetto(tmp_path: Path) -> None:
    plan = pase.compile("zoo:gpt2?layers=2&batch=16", devices=8, mesh="2x4", baselines=False)
    events = written(plan, tmp_path)
    assert names(events, "process_name") == ["rank 0 on each of 8 devices"]
    sent = [e for e in events if e.get("cat") == "collective"]
    assert sent and all(e["args"]["group"] for e in sent)
    found = arrows(events)
    assert found and all(a["cat"] == "collective" and a["ts"] + a["dur"] <= b["ts"] + 2e-3 for a, b in found)
    rates = [e for e in events if e["ph"] == "C" and "GB/s" in e["args"]]
    moved = 0.0
    for what in {e["name"] for e in rates}:
        mine = [e for e in rates if e["name"] == what]
        moved += sum(a["args"]["GB/s"] * (b["ts"] - a["ts"]) * 1e3 for a, b in pairwise(mine))
    assert moved == pytest.approx(sum(e["args"]["nbytes"] for e in sent), rel=1e-3)
    held = {e["name"]: e["args"]["GiB"] for e in events if e["ph"] == "C" and "GiB" in e["args"]}
    assert held["memory: parameters"] * 2**30 == pytest.approx(plan.memory.parameters, abs=len(plan.nodes))
    assert held["memory: gradients"] * 2**30 == pytest.approx(
        sum(n.keeps.get("gradients", 0) for n in plan.nodes), abs=len(plan.nodes)
    )
    assert held["memory: activations"] == pytest.approx(0, abs=1e-6)
