"""Work as a program's own kernels run it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pase.plan.step import EAGER, step_time
from pase.stated.place import place
from pase.stated.program import PROGRAMS
from pase.stated.strategy import parse
from tests.stated.prices import GRAPH, MODEL, graph_of, price

PLACED = place(GRAPH, parse("dp=8", 8), MODEL)


def test_a_library_s_kernel_may_take_longer_than_its_traffic():
    one = replace(EAGER, kernels=frozenset({"rms_norm"}))
    times = [
        step_time(GRAPH, PLACED.mesh, PLACED.strategy, MODEL, executor=replace(one, traffic=traffic))
        for traffic in ({}, {"rms_norm": (2.0, 1.0)}, {"rms_norm": (3.0, 1.0)})
    ]
    forward = [t.passes[0].device_s for t in times]
    assert forward[2] - forward[1] == pytest.approx(forward[1] - forward[0], rel=1e-6)
    assert forward[1] > forward[0]
    assert len({t.passes[1].device_s for t in times}) == 1


def test_fp8_is_faster_and_its_casts_are_counted():
    """With few tokens per device, the casts of weights take longer than the products save."""
    long = graph_of(seq=8192)
    bf16, fp8 = (price(f"fsdp=8,precision={p}", graph=long) for p in ("bf16", "fp8"))
    assert bf16.step_s / 2 < fp8.step_s < bf16.step_s
    read_once = replace(PROGRAMS["compiled"], fp8_passes=0)
    assert price("fsdp=8,precision=fp8", program=read_once, graph=long).step_s < fp8.step_s
    assert price("fsdp=8,precision=fp8").step_s > price("fsdp=8").step_s
