"""The table of collectives."""

from __future__ import annotations

from dataclasses import replace

from pase.replay.measurement.transfers import CollectiveCalls
from pase.replay.reports.sent import sent_lines, transfers_report

WHOLE = CollectiveCalls(
    operation="reduce_scatter",
    nbytes=123_456_789,
    group="all",
    ways=1024,
    traced=1024,
    calls=50,
    transfer_ns=12.345e6,
    total_ns=617e6,
    skew_ns=1e6,
    last={1000: 30, 3: 20},
    link_bytes_per_s=50e9,
)


def test_each_collective_has_a_line_of_80_columns() -> None:
    part = replace(WHOLE, traced=1, skew_ns=None, last={}, nbytes=-1)
    lines = list(sent_lines(transfers_report([WHOLE, part] * 6, 5)))
    assert all(len(x) <= 80 for x in lines)
    assert lines[1].split()[-2:] == ["1000", "(60%)"] and " 20%" in lines[1] and "<12.345" in lines[2]
    assert lines[-2].startswith("... and 4 more") and "not traced" in lines[-1]


def test_a_run_without_collectives_has_no_lines() -> None:
    assert not list(sent_lines([]))
