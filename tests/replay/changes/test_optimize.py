"""The optimizer against brute force and closed forms, and its invariants."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cases.timelines import ImaginedRun, simulate, write
from pase.errors import Infeasible, PaseError
from pase.replay.changes import passes
from pase.replay.changes.coarse import coarsen
from pase.replay.changes.memory import MemoryUse
from pase.replay.changes.optimize import optimize_graph
from pase.replay.changes.passes import PASSES, GraphChanges, apply_plan, graph_pass
from pase.replay.graph import DataflowGraph, build_graph
from pase.replay.measurement.clocks import align
from pase.replay.measurement.model import estimate, measure
from pase.replay.simulation.fine import best_parts, sync_ns
from pase.replay.simulation.simulate import replay_graph
from pase.replay.simulation.steady import evaluate
from pase.replay.traces.ingest import load
from pase.replay.types import COLLECTIVE, OPERATIONS

ALPHA, BETA = 50_000.0, 1e-2


def _backward(compute: list[int], nbytes: list[int]) -> DataflowGraph:
    """A sequence of backward ops, each with a gradient to all-reduce on one link, and an optimizer op after all."""
    tasks, edges = [], []
    previous = {"c": -1, "q": -1}
    for k, (c, b) in enumerate(zip(compute, nbytes, strict=True)):
        tasks.append({"device": (0, "stream 7"), "duration_ns": c, "name": f"gemm_{k}"})
        tasks.append(
            {
                "device": (0, "link"),
                "duration_ns": ALPHA + BETA * b,
                "nbytes": b,
                "kind": COLLECTIVE,
                "operation": OPERATIONS.index("all_reduce"),
                "name": f"all-reduce.{k}",
            }
        )
        for name, i in (("c", 2 * k), ("q", 2 * k + 1)):
            if previous[name] >= 0:
                edges.append((previous[name], i))
            previous[name] = i
        edges.append((2 * k, 2 * k + 1))
    tasks.append({"device": (0, "stream 7"), "duration_ns": 1000, "name": "adam"})
    edges.append((previous["q"], len(tasks) - 1))
    edges.append((previous["c"], len(tasks) - 1))
    return build_graph(tasks, edges)


def _by_brute_force(g: DataflowGraph) -> float:
    """The best time over all ways to divide the tensors into contiguous buckets, computed independently."""
    c = [i for i in range(len(g)) if g.task_name(i).startswith("gemm")]
    q = [i for i in range(len(g)) if g.kind[i] == COLLECTIVE]
    ready = np.cumsum(g.duration_ns[c])
    best = np.inf
    for cuts in itertools.product((False, True), repeat=len(q) - 1):
        link, size = 0.0, 0.0
        for k, i in enumerate(q):
            size += float(g.nbytes[i])
            if k == len(q) - 1 or cuts[k]:
                link = max(link, float(ready[k])) + ALPHA + BETA * size
                size = 0.0
        best = min(best, link + 1000)
    return best


@settings(max_examples=40)
@given(st.data())
def test_tensor_fusion_is_close_to_brute_force(data: st.DataObject) -> None:
    n = data.draw(st.integers(4, 8))
    compute = data.draw(st.lists(st.integers(1_000, 200_000), min_size=n, max_size=n))
    nbytes = data.draw(st.lists(st.integers(100_000, 20_000_000), min_size=n, max_size=n, unique=True))
    g = _backward(compute, nbytes)
    best = _by_brute_force(g)
    o = optimize_graph(g, passes=["tensor-fusion"], budget_s=20)
    assert o.after_ns >= best * (1 - 0.03)  # the split into latency and bytes is fitted from the graph
    assert o.after_ns <= best * 1.05
    assert o.after_ns <= o.before_ns


@settings(max_examples=20)
@given(st.data())
def test_the_best_so_far_only_falls_and_bad_steps_are_undone(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 6))
    compute = data.draw(st.lists(st.integers(1_000, 200_000), min_size=n, max_size=n))
    nbytes = data.draw(st.lists(st.integers(100_000, 20_000_000), min_size=n, max_size=n))
    o = optimize_graph(_backward(compute, nbytes), budget_s=20)
    best = o.before_ns
    for s in o.steps:
        assert s.before_ns == pytest.approx(best)
        assert s.kept == (s.after_ns < s.before_ns * (1 - 1e-4))
        best = s.after_ns if s.kept else best
    assert max(evaluate(o.graph).values()) == pytest.approx(o.after_ns)


def test_the_empty_plan_changes_nothing() -> None:
    g = _backward([10_000] * 3, [1_000_000, 2_000_000, 3_000_000])
    same = apply_plan(g, coarsen(g, replay_graph(g)), GraphChanges())
    assert np.array_equal(same.duration_ns, g.duration_ns)
    assert np.array_equal(same.src, g.src)


def test_fusing_past_a_matrix_product_that_may_need_the_result_is_refused() -> None:
    """The consumer of a forward all-gather runs before the next producer, so no bucket may contain both."""
    kind = {"kind": COLLECTIVE, "operation": OPERATIONS.index("all_gather"), "nbytes": 1000}
    tasks = [
        {"device": (0, "stream 7"), "duration_ns": 10, "name": "elementwise"},
        {"device": (0, "link"), "duration_ns": 10, "name": "all-gather.1", **kind},
        {"device": (0, "stream 7"), "duration_ns": 10, "name": "gemm"},
        {"device": (0, "link"), "duration_ns": 10, "name": "all-gather.2", **kind},
    ]
    g = build_graph(tasks, [(0, 1), (1, 2), (2, 3)])
    c = coarsen(g, replay_graph(g))
    assert not c.may_join([0, 1])
    light = replace(g, names=tuple("copy" if n == "gemm" else n for n in g.names))
    assert coarsen(light, replay_graph(light)).may_join([0, 1])


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
    g = _backward([100_000] * 3, [1000, 2000, 3000])

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


def test_a_budget_ends_the_search() -> None:
    g = _backward([1000 * (k % 7 + 1) for k in range(60)], [10_000 * (k + 1) for k in range(60)])
    o = optimize_graph(g, budget_s=1e-6)
    assert o.ended == "time budget"
    assert o.after_ns <= o.before_ns


@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 10**6))
@settings(max_examples=30)
def test_ring_replay_is_the_closed_form(ranks: int, parts: int, nbytes: int) -> None:
    """A ring takes 2(n−1) steps of nbytes/n, and parts are sent in sequence."""
    ns = sync_ns(float(nbytes), parts, ranks=ranks, latency_ns=100.0, bytes_per_ns=2.0)
    assert ns == pytest.approx(parts * 2 * (ranks - 1) * (100.0 + nbytes / parts / ranks / 2.0))


def test_parts_help_parameter_servers_and_not_rings() -> None:
    shape = {"ranks": 4, "latency_ns": 1000.0, "bytes_per_ns": 10.0}
    assert best_parts(1e8, scheme="ring", **shape)[0] == 1
    k, ns = best_parts(1e8, scheme="ps", **shape)
    assert k > 1
    assert ns < 0.6 * sync_ns(1e8, 1, scheme="ps", **shape)
    assert best_parts(10.0, scheme="ps", **shape)[0] == 1


def test_memory_passes_meet_the_limit_or_say_so(tmp_path: Path) -> None:
    run = simulate(ImaginedRun(ranks=2, kernel_us=100.0, between_us=4.0))
    m = measure(align(load(write(run, tmp_path / "x"))))
    g = estimate(m, m.steady())
    use = MemoryUse(rank=0, peak_bytes=16 << 30, start_bytes=4 << 30, kept=0.4)
    free = optimize_graph(g, memory=use, budget_s=1)
    assert free.memory is not None and free.memory.name == "as it is"
    tight = optimize_graph(g, memory=use, memory_limit_bytes=12 << 30, budget_s=1)
    assert tight.memory is not None and tight.memory.peak_bytes <= 12 << 30
    fitting = [o for o in tight.memory_options if o.peak_bytes <= 12 << 30]
    assert tight.memory.iteration_ns == min(o.iteration_ns for o in fitting)
    # Every option that saves memory takes more time than the unchanged run.
    assert all(o.iteration_ns >= tight.memory_options[0].iteration_ns * 0.999 for o in tight.memory_options)
    with pytest.raises(Infeasible, match=r"4\.00 GiB") as e:
        optimize_graph(g, memory=use, memory_limit_bytes=4 << 30)
    assert e.value.where == "--memory-limit"
    with pytest.raises(PaseError, match="no memory events") as e:
        optimize_graph(g, memory_limit_bytes=4 << 30)
    assert "profile_memory=True" in e.value.fix
