"""Where the time of an iteration goes: each moment belongs to one op or one cause of idling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cases.timelines import ImaginedRun, simulate
from pase.machine import load as load_machine
from pase.replay.measurement.clocks import align
from pase.replay.measurement.model import measure
from pase.replay.measurement.origins import Origin
from pase.replay.measurement.spending import floor_ns, peak_flops, spendings
from pase.replay.traces.ingest import load
from pase.replay.types import Event, Mark, from_events, on_stream
from tests.needs import SHARED
from tests.replay.runs import measured

REAL = [
    *(SHARED / "gpu_h100/traces").glob("*.gz"),
    *(SHARED / "measured/tracelens").glob("*.json.gz"),
    SHARED / "measured/deepseek_profile/train.json",
    SHARED / "traces/tracelens/tw003.xplane.pb",
    SHARED / "traces/hta/nccl_parser_config_nccl_data.json.gz",
]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 90), st.integers(1, 60), st.integers(0, 2), st.booleans()),
        min_size=1,
        max_size=25,
    )
)
def test_each_moment_is_attributed_once_to_an_op_that_runs(
    ops: list[tuple[int, int, int, bool]],
) -> None:
    """By brute force, nanosecond by nanosecond: computing ops before collectives, and the one that began last."""
    events = [
        Event(
            rank=0,
            lane=f"s{lane}",
            device=True,
            kind="collective" if sends else "kernel",
            operation="all_reduce" if sends else "",
            name=f"op{i}",
            start_ns=start,
            duration_ns=length,
            iteration=0,
        )
        for i, (start, length, lane, sends) in enumerate(ops)
    ]
    t = from_events(events, marks=(Mark(rank=0, iteration=0, start_ns=0, end_ns=200),))
    m = measure(t)
    (s,) = spendings(m)
    span = m.iteration_of[0, 0]
    by_kind: dict[bool, int] = {False: 0, True: 0}
    for at in range(span.begin_ns, span.end_ns):
        running = [sends for a, n, _, sends in ops if a <= at < a + n]
        if running:
            by_kind[all(running)] += 1
    assert sum(a.clock_ns for k, a in s.kinds.items() if k != "all_reduce") == by_kind[False]
    assert sum(a.clock_ns for k, a in s.kinds.items() if k == "all_reduce") == by_kind[True]
    assert sum(a.clock_ns for a in s.ops.values()) + sum(s.idle.values()) == s.total_ns
    assert sum(a.busy_ns for a in s.ops.values()) == sum(n for _, n, _, _ in ops)


@pytest.mark.parametrize("shape", [{"ranks": 2, "bucket_bytes": 8 << 20}, {"ranks": 1, "kernel_us": 12.0}])
def test_kinds_and_idle_time_sum_to_the_iterations(tmp_path: Path, shape: dict[str, Any]) -> None:
    for s in spendings(measured(tmp_path, simulate(ImaginedRun(noise=0.05, **shape)))):
        assert sum(a.clock_ns for a in s.kinds.values()) + sum(s.idle.values()) == s.total_ns


def test_the_floor_is_the_slower_of_compute_and_memory() -> None:
    device = load_machine("h100x8").device
    o = Origin(kind="product bf16", name="", precision="bf16", flops=10**12, nbytes=10**6)
    assert floor_ns(o, device) == pytest.approx(1e9 * 10**12 / device.peak_flops["bfloat16"])
    light = Origin(kind="elementwise", name="", nbytes=10**9)
    assert floor_ns(light, device) == pytest.approx(1e18 / device.memory_bandwidth_bytes_per_s)
    assert floor_ns(Origin(kind="other", name=""), device) == floor_ns(o, None) == -1
    assert peak_flops(device, "tf32") == device.peak_flops["float32"]
    assert peak_flops(device, "fp32") == device.vector_flops


@pytest.mark.some(3)
@pytest.mark.data("measured/tracelens")
@pytest.mark.parametrize("path", REAL, ids=lambda p: p.name[-40:])
def test_sums_of_real_traces_are_exact(path: Path) -> None:
    m = measure(align(load(path)))
    t = m.timeline
    for s in spendings(m):
        assert sum(a.clock_ns for a in s.kinds.values()) + sum(s.idle.values()) == s.total_ns
        mine = on_stream(t["kind"]) & (t.rank_of == s.rank) & np.isin(t["iteration"], s.iterations)
        assert sum(a.busy_ns for a in s.kinds.values()) == int(t["duration_ns"][mine].sum())


@pytest.mark.data("measured/deepseek_profile")
def test_dispatch_and_combine_are_communication() -> None:
    m = measure(align(load(SHARED / "measured/deepseek_profile/train.json")))
    (s,) = spendings(m)
    sent = sum(a.busy_ns for k, a in s.kinds.items() if k.startswith(("dispatch", "combine")))
    assert sent / 1e6 == pytest.approx(113, abs=1)
    assert sum(a.busy_ns for a in s.kinds.values()) / 1e6 == pytest.approx(244, abs=1)
