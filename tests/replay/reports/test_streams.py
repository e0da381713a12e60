"""Sums of device streams, on timelines whose sums are counted by hand."""

from __future__ import annotations

import math

import pytest

from pase.replay.reports.streams import copies, queue_courses, queue_lengths, stream_idle, streams
from pase.replay.types import Event, from_events

US = 1000


def call(at_us: int, number: int) -> Event:
    host = {"rank": 0, "lane": "main", "device": False, "kind": "runtime", "name": "launch"}
    return Event(**host, start_ns=at_us * US, duration_ns=US, correlation=number)  # type: ignore[arg-type]


def op(kind: str, begin_us: float, end_us: float, lane: str = "7", **more: object) -> Event:
    fields = {"rank": 0, "lane": lane, "device": True, "kind": kind, "name": kind} | more
    return Event(**fields, start_ns=round(begin_us * US), duration_ns=round((end_us - begin_us) * US))  # type: ignore[arg-type]


def test_busy_overlapped_and_idle_time() -> None:
    t = from_events(
        [op("kernel", 0, 10), op("collective", 5, 20, "8"), op("kernel", 8, 12, "9"), op("memcpy", 30, 40)]
    )
    s = streams(t, 0)
    assert [x / US for x in (s.total_ns, s.idle_ns, s.compute_ns, s.communication_ns, s.overlapped_ns)] == [
        40,
        10,
        12,
        15,
        7,
    ]
    assert streams(t, 1).total_ns == 0


def test_gaps_are_the_hosts_the_devices_or_nobodys() -> None:
    """Launches: the first two early, the third after its predecessor has ended, and the fourth early again."""
    ops = [
        op("kernel", a, b, correlation=k)
        for k, (a, b) in enumerate([(10, 20), (25, 30), (60, 70), (150, 160)])
    ]
    t = from_events([*ops, *(call(at, k) for k, at in enumerate((1, 2, 55, 56)))])
    assert stream_idle(t, 0) == {"7": {"kernel": 5 * US, "host": 30 * US, "other": 80 * US}}


def test_queued_ops_are_those_launched_and_not_begun() -> None:
    ops = [op("kernel", a, a + 5, correlation=k) for k, a in enumerate((10, 20, 30))] + [op("kernel", 40, 45)]
    t = from_events([*ops, *(call(at, k) for k, at in enumerate((1, 2, 25)))])
    # Launch, launch, begin, begin, launch, begin. The last op has no launch in the trace.
    assert queue_courses(t, 0)["7"].tolist() == [1, 2, 1, 0, 1, 0]
    assert queue_lengths(t, 0) == {"7": (2, pytest.approx(5 / 6))}


def test_copies_by_kind_with_their_mean_rate() -> None:
    moved = [(0, 2, 8000), (10, 10.5, 2000)]  # the second one counts as 1 µs
    events = [op("memcpy", a, b, name="Memcpy HtoD (Pageable -> Device)", nbytes=n) for a, b, n in moved]
    found = copies(from_events([*events, op("memset", 20, 21, name="Memset (Device)")]), 0)
    assert found["Memcpy HtoD"] == (2, pytest.approx((4 + 2) / 2))
    assert found["Memset"][0] == 1 and math.isnan(found["Memset"][1])
