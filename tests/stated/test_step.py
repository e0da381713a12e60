"""The step of a stated strategy: what overlaps, what waits, and what is added once."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pase import costmodels
from pase.machine import mesh_from
from pase.stated.parts import parts_of
from pase.stated.place import place, stage_mesh
from pase.stated.program import PROGRAMS, Buckets, Decomposition
from pase.stated.step import StatedStep
from pase.stated.strategy import parse
from pase.tables.itemize import collectives
from tests.stated.prices import AHEAD, GRAPH, H100, MODEL, price


def test_overlap_hides_and_contention_costs():
    fast = PROGRAMS["eager"]
    apart = replace(fast, prefetches=(False, False), sums_overlap=False)
    assert price("fsdp=8", program=fast).step_s < price("fsdp=8", program=apart).step_s
    free = costmodels.get("analytic", replace(H100, collective_units=0))
    assert price("fsdp=8", model=free).step_s < price("fsdp=8").step_s


def test_gradients_are_added_by_the_product_or_by_a_kernel_of_their_own():
    """A separate kernel reads them, and reads and writes their sum, for all micro-batches except the first."""
    rate = H100.device.memory_bandwidth_bytes_per_s * H100.device.efficiency["memory"]
    elements = sum(t.elements for t in GRAPH.tensors.values() if t.role == "parameter")
    apart, few = (replace(AHEAD, adds_apart=a, sums_overlap=False) for a in (True, False))
    for s, micro, m in (("dp=8", 2, 1), ("dp=8", 2, 4)):
        more, less = (price(f"{s},micro={micro}", program=p, examples=16 * m).step_s for p in (apart, few))
        assert more - less == pytest.approx((m - 1) * elements * (2 + 2 * 4) / rate, rel=1e-6)
    passes = replace(few, whole_passes=3.0)
    once = price("dp=8,zero=1", program=passes).step_s - price("dp=8,zero=1", program=few).step_s
    assert once == pytest.approx(elements * 4 * 3 / rate, rel=1e-6)


def test_zero_may_sum_whole_gradients():
    """This takes as long as without ZeRO: twice as long as a reduce-scatter, minus its latencies."""
    whole = replace(PROGRAMS["eager"], sums_whole=True)
    sums = [
        price(s, program=p).collectives_s["sums of gradients"]
        for s, p in (("dp=8", "eager"), ("dp=8,zero=1", whole), ("dp=8,zero=1", "eager"))
    ]
    assert sums[0] == sums[1] > 1.5 * sums[2]


def test_whole_weights_are_summed_in_buckets_that_grow_with_the_ranks():
    """Each call has its latency: fewer calls of the same bytes take less. What no bucket fills is one call."""
    plain = PROGRAMS["megatron"]
    elements = sum(t.elements for t in GRAPH.tensors.values() if t.role == "parameter")
    found = {}
    for least, for_rank in ((1.0, 0.0), (elements / 4, 0.0), (1.0, elements), (math.inf, 0.0)):
        p = replace(plain, buckets=Buckets(least=least, for_rank=for_rank))
        found[least, for_rank] = price("dp=8,zero=1", program=p).collectives_s["sums of gradients"]
    each, quarter, whole, one = found.values()
    assert each > quarter > whole == one
    axis = MODEL.collective("reduce_scatter", mesh_from("data=8", 8), 1, elements * plain.bytes.summed)
    assert one == pytest.approx(float(axis), rel=1e-6)
    unbucketed = [price("fsdp=8", program=replace(plain, buckets=b)).step_s for b in (None, plain.buckets)]
    assert unbucketed[0] == unbucketed[1]


def test_tensor_parallelism_along_a_later_dim_copies_what_it_moves():
    eager, plain = AHEAD, replace(AHEAD, rearranges=False)
    rate = H100.device.memory_bandwidth_bytes_per_s * H100.device.efficiency["memory"]
    with_copies, without = (price("tp=8,sp", program=p) for p in (eager, plain))
    placed = place(GRAPH, with_copies.strategy, MODEL)
    moved = sum(
        c.nbytes * c.times
        for c in collectives(GRAPH, placed.mesh, placed.strategy, MODEL)
        if c.kind in ("all_gather", "reduce_scatter") and "model" in c.axes
    )
    assert with_copies.step_s - without.step_s == pytest.approx(2 * moved / rate, rel=1e-6) != 0
    asynchronous = [price("tp=8,sp,async", program=p).step_s for p in (eager, plain)]
    assert asynchronous[0] == asynchronous[1]


def test_stages_share_layers_and_pay_a_bubble():
    one = price("dp=2,tp=4")
    two = price("dp=2,tp=2,pp=2,micro=1", program="megatron")
    assert two.pipeline is not None and 0 < two.pipeline.bubble < 0.5
    assert two.memory.parameters < 2 * one.memory.parameters
    more = price("dp=2,tp=2,pp=2,vp=2,micro=1", program="megatron")
    assert more.pipeline is not None and more.pipeline.bubble < two.pipeline.bubble
    assert one.pipeline is None


def test_a_collective_during_products_runs_during_its_own():
    """Half of a block's collectives feed small products: the large ones beside them cannot hide these."""
    s = replace(parse("tp=8,sp,async", 8), micro=16, remat="none")
    program = replace(PROGRAMS["xla"], decomposition=Decomposition(after=0.0, near=False))
    parts = parts_of(GRAPH, place(GRAPH, s, MODEL), s, program, MODEL)
    block, mesh = parts.block, stage_mesh(s)
    run = StatedStep(parts=parts, s=s, program=program, model=MODEL, mesh=mesh, micro_batches=1)
    for backward in (False, True):
        own = [c for c in block.sent if c.backward == backward and c.kind != "all_reduce"]
        assert len(own) == 4 and all(c.beside_s > 0 for c in own)
        waited = run.decomposed_s([(c, c.seconds) for c in own])
        assert waited == pytest.approx(sum(max(c.seconds - c.beside_s, 0.0) for c in own))
        assert waited > max(sum(c.seconds for c in own) - sum(c.beside_s for c in own), 0.0)
        # Layers written out have equal collectives, each of which waits.
        assert run.decomposed_s([(c, c.seconds) for c in own] * 3) == pytest.approx(3 * waited)
    # The products of forward, each of which feeds or follows one of its collectives, and as many of backward.
    whole = [sum(c.beside_s for c in block.sent if c.backward == b) for b in (False, True)]
    assert whole[1] == pytest.approx(whole[0], rel=0.1)
