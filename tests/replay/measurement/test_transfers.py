"""What collectives send, apart from what their ranks wait for."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.replay.measurement.clocks import align
from pase.replay.measurement.model import measure
from pase.replay.measurement.transfers import CollectiveCalls, link_bytes_per_s, transfers
from pase.replay.types import Event, Group, Mark, Timeline, from_events
from tests.needs import SHARED

US = 1000
NBYTES = 64 << 20


def run(late_us: list[int], sends_us: int, clocks_us: list[int], known: int = 0) -> Timeline:
    """Five steps: each rank computes, arrives late by its own time, and all end the all-reduce together.

    clocks_us: the offset of each rank's clock. known: the group has this many ranks; default: those that are traced.
    """
    events, marks = [], []
    ranks = range(len(late_us))
    for k in range(5):
        for r in ranks:
            zero = k * 20_000 * US + clocks_us[r] * US
            arrives, ends = (500 + late_us[r]) * US, (500 + max(late_us) + sends_us) * US
            at = {"rank": r, "lane": "s", "device": True, "iteration": k}
            events.append(Event(kind="kernel", name="gemm", start_ns=zero, duration_ns=arrives, **at))
            events.append(
                Event(
                    kind="collective",
                    name="ncclDevKernel_AllReduce",
                    operation="all_reduce",
                    start_ns=zero + arrives,
                    duration_ns=ends - arrives,
                    nbytes=NBYTES,
                    group="all",
                    **at,
                )
            )
            marks.append(Mark(rank=r, iteration=k, start_ns=zero, end_ns=zero + ends))
    group = Group(name="all", ranks=tuple(range(known or len(late_us))))
    t = from_events(events, groups=(group,), marks=tuple(marks))
    return replace(t, devices=dict.fromkeys(ranks, "NVIDIA H100 80GB HBM3"))


@given(
    late=st.lists(st.integers(0, 3000), min_size=2, max_size=4, unique=True),
    sends=st.integers(100, 2000),
    clock=st.integers(-5000, 5000),
)
@settings(max_examples=15, deadline=None)
def test_skew_and_transfer_come_back_out(late: list[int], sends: int, clock: int) -> None:
    """The oracle is the run itself: what was put in, on clocks that differ."""
    m = measure(align(run(late, sends, [clock * r for r in range(len(late))])))
    (x,) = transfers(m, m.steady())
    assert (x.operation, x.nbytes, x.ways, x.traced, x.whole) == (
        "all_reduce",
        NBYTES,
        len(late),
        len(late),
        True,
    )
    assert x.transfer_ns == sends * US and x.calls == len(m.steady())
    assert x.skew_ns == pytest.approx((max(late) - min(late)) * US, abs=1)
    assert x.last == {late.index(max(late)): x.calls}
    wire = 2 * (len(late) - 1) / len(late) * NBYTES
    assert x.bus_bytes_per_s == pytest.approx(wire / (sends * 1e-6))
    assert x.link_bytes_per_s == 450e9


def test_of_one_rank_of_a_group_the_transfer_is_only_bounded() -> None:
    m = measure(align(run([0], 700, [0], known=16)))
    (x,) = transfers(m, m.steady())
    assert not x.whole and x.skew_ns is None and not x.last and x.transfer_ns == 700 * US
    assert x.link_bytes_per_s == 50e9  # 16 ranks do not fit into a node of 8


def test_a_device_without_a_machine_file_has_no_link() -> None:
    t = replace(run([0, 10], 100, [0, 0]), devices={0: "NVIDIA H800"})
    assert link_bytes_per_s(t, (0, 1)) is None


@pytest.mark.data("measured/tracelens")
def test_tracelens_has_the_same_bandwidths() -> None:
    """Each row of its summary of eight MI300, from its bytes and its shortest latency; its GB are 2**30 bytes."""
    names = {
        "_reduce_scatter_base": "reduce_scatter",
        "_allgather_base": "all_gather",
        "allreduce": "all_reduce",
    }
    file = SHARED / "measured/tracelens/mi300_llama_70b_fsdp__nccl_summary_implicit_sync.csv"
    rows = [r for r in csv.DictReader(file.open()) if r["Collective name"] in names]
    for r in rows:
        x = CollectiveCalls(
            operation=names[r["Collective name"]],
            nbytes=round(float(r["Full msg size (MB)"]) * 2**20),
            group="",
            ways=int(r["Group size"]),
            traced=int(r["Group size"]),
            calls=1,
            transfer_ns=float(r["comm_latency_min"]) * 1e3,
            total_ns=0.0,
            skew_ns=None,
        )
        assert x.bus_bytes_per_s is not None
        assert x.bus_bytes_per_s / 2**30 == pytest.approx(float(r["bus bw (GB/s)_max"]), rel=1e-4), r
    assert len(rows) > 2
