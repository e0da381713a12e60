"""The events of a run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pase.replay.types import Clock, Event, Group, Lane, from_events


def test_ops_that_overlap_keep_their_names_on_any_lane() -> None:
    assert Lane(rank=0, name="XLA ops beside 2", device=True).stream == "XLA ops"
    assert Lane(rank=0, name="stream 7", device=True).stream == "stream 7"


def op(**more: object) -> Event:
    fields = {
        "rank": 0,
        "lane": "7",
        "device": True,
        "kind": "kernel",
        "name": "gemm",
        "start_ns": 0,
        "duration_ns": 5,
    }
    return Event(**{**fields, **more})  # type: ignore[arg-type]


def test_events_come_back_in_order_of_their_lane_and_start() -> None:
    events = [
        op(start_ns=9, shapes=((2, 3), ())),
        op(kind="collective", operation="all_reduce", group="dp", nbytes=64, correlation=3, iteration=1),
        op(rank=1, lane="main", device=False, kind="host", name="aten::mm"),
    ]
    t = from_events(events, groups=(Group(name="dp", ranks=(0, 1)),))
    assert list(t) == [events[1], events[0], events[2]]
    assert t.ranks == (0, 1) and t.rank_of.tolist() == [0, 0, 1] and t.groups[0].ranks == (0, 1)
    assert list(t.select(np.array([2, 0]))) == [events[2], events[1]]


def test_each_rank_has_its_own_clock() -> None:
    late = Clock(rank=1, offset_ns=100.0, drift=0.5, reference_ns=10)
    t = from_events([op(start_ns=20), op(rank=1, start_ns=20)], clocks=(late,))
    assert t.global_start_ns().tolist() == [20.0, 20 + 100 + 0.5 * 10]


@pytest.mark.parametrize("wrong", [{"kind": "magic"}, {"operation": "gossip"}])
def test_an_unknown_kind_or_operation_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="event 'gemm'"):
        from_events([op(**wrong)])


def test_columns_that_are_missing_or_differ_in_length_are_refused() -> None:
    t = from_events([op()])
    with pytest.raises(ValueError, match="needs the columns"):
        replace(t, columns={k: v for k, v in t.columns.items() if k != "name"})
    with pytest.raises(ValueError, match="one length"):
        replace(t, columns={**t.columns, "name": np.zeros(2, np.int32)})
