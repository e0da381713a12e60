"""What Perfetto draws beside a trace's events: arrows to who waited, and rates that come back to nothing."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from bench.cases.timelines import ImaginedRun, simulate, write
from pase.replay.clocks import align
from pase.replay.report import load_any
from pase.replay.timeline_io import chrome_trace


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
