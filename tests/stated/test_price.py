"""The price of a stated strategy, compared with the tables and the step on which it is based, and with known laws."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pase.plan.step import COMPILED, step_time
from pase.stated.place import place
from pase.stated.program import PROGRAMS
from tests.stated.prices import GRAPH, MODEL, price

PLAIN = replace(
    PROGRAMS["compiled"],
    executor=COMPILED,
    attention=(),
    prefetches=(False, False),
    sums_overlap=False,
    copied=(0.0, 0.0),
)


def test_on_one_device_it_is_the_sum_of_the_search_s_own_prices():
    """Without overlap and without a framework's own kernels, it is the additive step."""
    p = price("micro=16", devices=1, program=PLAIN)
    t = step_time(GRAPH, p.mesh, place(GRAPH, p.strategy, MODEL).strategy, MODEL)
    assert p.step_s == pytest.approx(t.total_s, rel=1e-9)


def test_seconds_add_up_and_units_agree():
    p = price("fsdp=8,remat=full")
    assert sum(p.seconds.values()) == pytest.approx(p.step_s)
    assert all(v >= 0 for v in p.seconds.values())
    assert p.throughput.tokens_per_s_per_device == pytest.approx(16 * 512 / 8 / p.step_s)
    assert p.to_json()["mfu"] == p.throughput.mfu < 1


def test_a_sequence_is_split_over_context_parallel_ranks():
    p = price("dp=2,cp=4", examples=16)
    assert dict(zip(p.mesh.names, p.mesh.sizes, strict=True)) == {"data": 2, "context": 4}
    assert any("context" in name for name in p.collectives_s)
    whole = price("dp=2,tp=4")
    assert p.work.flops == whole.work.flops
