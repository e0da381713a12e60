"""The graph passes: what they propose, and graphs under a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.cases.timelines import ImaginedRun, simulate, write
from pase.errors import PaseError
from pase.replay.changes import passes
from pase.replay.changes.coarse import coarsen
from pase.replay.changes.optimize import optimize_graph
from pase.replay.changes.passes import PASSES, GraphChanges, apply_plan, graph_pass
from pase.replay.measurement.clocks import align
from pase.replay.measurement.model import estimate, measure
from pase.replay.simulation.simulate import replay_graph
from pase.replay.traces.ingest import load
from tests.replay.changes.graphs import backward


def test_the_empty_plan_changes_nothing() -> None:
    g = backward([10_000] * 3, [1_000_000, 2_000_000, 3_000_000])
    same = apply_plan(g, coarsen(g, replay_graph(g)), GraphChanges())
    assert np.array_equal(same.duration_ns, g.duration_ns)
    assert np.array_equal(same.src, g.src)


def test_small_collectives_are_fused_on_a_trace(tmp_path: Path) -> None:
    run = simulate(
        ImaginedRun(
            ranks=2,
            layers=24,
            bucket_layers=1,
            bucket_bytes=1 << 18,
            collective_us=400.0,
            kernel_us=30.0,
            bucket_growth=0.1,
        )
    )
    m = measure(align(load(write(run, tmp_path / "x"))))
    o = optimize_graph(estimate(m, m.steady()), passes=["tensor-fusion"])
    assert o.after_ns < 0.8 * o.before_ns
    members = [b for b in o.plan.buckets(len(o.coarse.tensors)).values() if len(b) > 1]
    assert members


def test_launch_bound_runs_gain_from_op_fusion(tmp_path: Path) -> None:
    run = simulate(ImaginedRun(ranks=2, layers=16, kernel_us=5.0, between_us=50.0))
    for events in run.events.values():
        for e in events:
            if e["name"].startswith(("fwd_", "adam_")):
                e["name"] = "vectorized_elementwise_kernel " + e["name"]
    m = measure(align(load(write(run, tmp_path / "x"))))
    o = optimize_graph(estimate(m, m.steady()), passes=["op-fusion"])
    assert o.plan.runs
    # 15 of 16 forward launches (56 µs each) are saved, and 2 of 3 of the optimizer's, which may overlap with the last
    # all-reduce.
    assert 15 * 56e3 * 0.98 <= o.before_ns - o.after_ns <= 17 * 56e3 * 1.02


def test_a_registered_pass_is_used_and_unknown_ones_are_refused() -> None:
    g = backward([100_000] * 3, [1000, 2000, 3000])

    @graph_pass("test-half-gemm")
    def half(view: passes.View):
        yield "16-bit matrix products", replace(view.plan, op_scale=(("gemm", 0.5),))

    try:
        o = optimize_graph(g, passes=["test-half-gemm"])
    finally:
        PASSES.remove("test-half-gemm")
    assert o.before_ns - o.after_ns == pytest.approx(150_000, rel=0.02)
    with pytest.raises(PaseError, match="no pass 'nothing'"):
        optimize_graph(g, passes=["nothing"])
