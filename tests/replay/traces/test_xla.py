"""Traces of compiled XLA programs: the part of each op, collectives under any name, and lanes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pase.bridges.degrees import _Pair, by_stages
from pase.errors import Infeasible
from pase.replay.changes.whatif import apply
from pase.replay.collect.profiling import profile
from pase.replay.graph import Carried, build_graph
from pase.replay.measurement.breakdown import breakdowns
from pase.replay.measurement.clocks import align
from pase.replay.measurement.model import measure
from pase.replay.reports.trust import Run
from pase.replay.simulation.sections import StepPhase, sections
from pase.replay.simulation.steady import evaluate
from pase.replay.traces.hlo import HloFacts, read_hlo
from pase.replay.traces.ingest import load
from pase.replay.traces.timeline_io import from_json, to_json
from pase.replay.traces.xla import describe
from pase.replay.types import COLLECTIVE, OPERATIONS, CompiledOp, Event, Lane, Mark, Timeline, from_events
from pase.tables.itemize import LocalWork
from tests.replay.traces.test_hlo import varint

US = 1000
LAYERS = 3


def _facts(layers: int) -> HloFacts:
    """Returns the facts of a training step with equal layers that jax compiles here."""
    jax = pytest.importorskip("jax")

    def loss(w: Any, x: Any) -> Any:
        for v in w:
            x = jax.numpy.tanh(x @ v)
        return (x * x).sum()

    def step(w: Any, x: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, (w, x), jax.grad(loss, (0, 1))(w, x))

    arrays = [jax.numpy.ones((16, 16))] * layers
    compiled = jax.jit(step).lower(arrays, jax.numpy.ones((8, 16))).compile()
    module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    return read_hlo(b"\x0a" + varint(len(module)) + module, "here")


def _trace(facts: HloFacts, ranks: int = 1, late_us: int = 0, steps: int = 5) -> Timeline:
    """A timeline of consecutive steps, in which each op takes 10 µs.

    If there are several ranks, the last one begins each step late, and an all-reduce ends the step.
    """
    ops = [n for n in facts.order if n in facts.ops]
    events, marks, begin = [], [], 0
    for k in range(steps):
        longest = begin + late_us * US + (10 * len(ops) + 50) * US
        for r in range(ranks):
            at = begin + (late_us * US if r == ranks - 1 else 0)
            first = at
            for n in ops:
                kind: dict[str, Any] = {"rank": r, "lane": "XLA ops", "device": True, "iteration": k}
                events.append(Event(kind="kernel", name=n, start_ns=at, duration_ns=10 * US, **kind))
                at += 10 * US
            if ranks > 1:
                more = {"operation": "all_reduce", "group": "", "nbytes": 1 << 10}
                events.append(
                    Event(
                        kind="collective", name="sum.1", start_ns=at, duration_ns=longest - at, **kind, **more
                    )
                )
                at = longest
            marks.append(Mark(rank=r, iteration=k, start_ns=first, end_ns=at))
        begin = longest
    return replace(from_events(events, marks=tuple(marks)), compiled=dict(facts.ops))


def test_a_compiled_program_says_what_its_ops_belong_to() -> None:
    facts = _facts(LAYERS)
    products = [op for op in facts.ops.values() if op.product]
    assert [op.part for op in products].count("forward") == LAYERS
    assert [op.part for op in products].count("backward") == 2 * LAYERS
    assert {op.product for op in products if op.part == "forward"} == {((8, 16), (16, 16), (8, 16))}
    t = _trace(facts)
    assert from_json(to_json(t)).compiled == t.compiled
    run = Run(measured=measure(align(t)))
    s = sections(t, run.graph)
    assert s.layers == LAYERS and s.micro_batches == 1 and len(s.product) == 3 * LAYERS
    assert {StepPhase.FORWARD, StepPhase.BACKWARD} <= {StepPhase(int(p)) for p in s.phase[s.order]}
    graph, said = by_stages(LAYERS, 1e12)(t, run.graph)
    # The single micro-batch passes through all stages in order, and then each stage updates its parameters.
    assert len(graph.ranks) == LAYERS and "1 micro-batches" in said["note"]
    update = sum(s.phase == StepPhase.UPDATE)
    want = 10 * US * (len(s.order) - update + update / LAYERS)
    assert max(evaluate(graph).values()) == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize("width", [32, 64])
def test_of_programs_with_one_name_the_one_that_ran_is_read(tmp_path: Path, width: int) -> None:
    """The profiler records all programs that the process compiled, so the first one of that name may not have run."""
    jax = pytest.importorskip("jax")

    def step(w: Any) -> Any:
        return w @ w

    made = {n: jax.jit(step).lower(jax.numpy.ones((n, n))).compile() for n in (32, 64)}
    w = jax.numpy.ones((width, width))
    with profile(tmp_path) as run:
        for _ in range(3):
            with run.step():
                jax.block_until_ready(made[width](w))
    (product,) = [op.product for op in load(tmp_path).compiled.values() if op.product]
    assert product == ((width, width),) * 3


@pytest.mark.parametrize("micro_batches", [2, 8])
def test_a_program_that_accumulates_in_a_loop_has_micro_batches(micro_batches: int) -> None:
    """Iterations of the loop are recognized as micro-batches, not as layers."""
    shape = ((8, 16), (16, 16), (8, 16))
    ops = {
        n: CompiledOp(part=part, operands=shape[:2], product=shape)
        for n, part in (("dot.f", "forward"), ("dot.b", "backward"))
    } | {
        "tanh": CompiledOp(part="forward", operands=shape[:1]),
        "add": CompiledOp(part="update", operands=shape[1:2]),
    }
    turn = [*["dot.f", "tanh"] * 4, *["dot.b"] * 8]

    def timeline(names: list[str]) -> Timeline:
        op: dict[str, Any] = {"rank": 0, "lane": "XLA ops", "device": True, "kind": "kernel"}
        long = 100 * US * len(names)
        events = [
            Event(name=n, start_ns=k * long + 100 * US * i, duration_ns=100 * US, iteration=k, **op)
            for k in range(3)
            for i, n in enumerate(names)
        ]
        marks = [Mark(rank=0, iteration=k, start_ns=k * long, end_ns=(k + 1) * long) for k in range(3)]
        return replace(from_events(events, marks=tuple(marks)), compiled=ops)

    t = timeline([*turn * micro_batches, "add"])
    run = Run(measured=measure(align(t)))
    s = sections(t, run.graph)
    assert (s.layers, s.micro_batches) == (4, micro_batches)
    graph, _ = by_stages(2, 1e12)(t, run.graph)
    # 1F1B takes (micro-batches + stages − 1) times half of the layers, and the update.
    want = 100 * US * ((micro_batches + 1) * len(turn) / 2 + 0.5)
    assert max(evaluate(graph).values()) == pytest.approx(want, rel=0.01)
    odd = timeline([*turn, *turn[2:], "add"])
    with pytest.raises(Infeasible, match="the same products"):
        sections(odd, Run(measured=measure(align(odd))).graph)


def test_a_program_without_backward_is_refused() -> None:
    facts = _facts(2)
    forward = {n: replace(op, part="forward") for n, op in facts.ops.items()}
    t = replace(_trace(facts), compiled=forward)
    with pytest.raises(Infeasible, match="not a training step"):
        sections(t, Run(measured=measure(align(t))).graph)


def test_a_collective_is_one_whatever_jax_calls_it() -> None:
    """In a manual lowering, XLA's all-gather may be named all_gather.9, and must not count as compute."""
    facts = replace(_facts(1), kinds={"all_gather.9": "all_gather"}, nbytes={"all_gather.9": 64})
    event: dict[str, Any] = {"rank": 0, "lane": "XLA ops", "device": True, "kind": "kernel", "duration_ns": 5}
    t = describe(
        from_events([Event(name=n, start_ns=k, **event) for k, n in enumerate(("dot", "all_gather.9"))]),
        facts,
    )
    assert t["kind"].tolist()[1] == COLLECTIVE and t["kind"].tolist()[0] != COLLECTIVE
    assert OPERATIONS[int(t["operation"][1])] == "all_gather" and t["nbytes"][1] == 64 and t["group"][1] >= 0


def test_ops_that_overlap_keep_their_names_on_any_lane() -> None:
    assert Lane(rank=0, name="XLA ops beside 2", device=True).stream == "XLA ops"
    assert Lane(rank=0, name="stream 7", device=True).stream == "stream 7"


def test_a_rank_that_is_late_by_itself_is_what_balance_takes_away() -> None:
    """The delay is unexplained, so other changes of the run cannot be trusted. Balancing removes the delay."""
    facts = _facts(2)
    late, even = (Run(measured=measure(align(_trace(facts, ranks=2, late_us=u)))) for u in (5000, 0))
    assert late.unexplained > 0.5 and late.doubts and not even.doubts
    ns, doubt = late.judged(apply(late.graph, [("balance", "", 1.0)]))
    assert not doubt and ns == pytest.approx(even.replayed_ns, rel=0.05)
    assert "nothing in the trace explains" in late.judged(apply(late.graph, [("bandwidth", "", 2.0)]))[1]


def test_no_launch_is_late_where_the_trace_holds_none() -> None:
    """Without launches in the trace, the cause of idle time is unexplained, not a late launch."""
    late = breakdowns(measure(align(_trace(_facts(2), ranks=2, late_us=5000))))[1]
    assert late.mean_ns("launch") == 0 and late.mean_ns("unexplained") == pytest.approx(5000 * US)


def test_balance_sees_what_waits_and_not_what_for() -> None:
    """The first ops of the two ranks wait for different ops of the previous iteration."""
    tasks: list[dict[str, object]] = [
        {"device": (r, "stream"), "duration_ns": 10.0, "name": n} for r in (0, 1) for n in ("a", "b")
    ]
    g = build_graph(tasks, [(0, 1), (2, 3)])
    keys = tuple(("op", r, "stream", n, 1) for r in (0, 1) for n in ("a", "b"))
    carried = Carried(
        src=np.array([1, 2]), dst=np.array([0, 2]), lag_ns=np.array([3.0, 500.0]), kind=np.zeros(2, np.uint8)
    )
    balanced = apply(replace(g, key=keys, carried=carried), [("balance", "", 1.0)])
    assert balanced.carried.lag_ns.tolist() == [3.0, 3.0]


def test_the_products_of_an_attention_are_those_of_its_heads() -> None:
    now = LocalWork(
        phase="forward",
        kind="attention",
        dtype="float32",
        flops=8e6,
        nbytes=0,
        times=1,
        cost=2.0,
        mnk=(32, 32, 24),
    )
    half = replace(now, flops=4e6, cost=1.0)
    p = _Pair(node="attend", now=now, then=half, heads=256)
    assert p.key(now) == (256 * 32 * 24, 256 * 32 * 24, 256 * 32 * 32)
    assert p.key(half) == (128 * 32 * 24, 128 * 32 * 24, 128 * 32 * 32) and p.roofline == 0.5


def test_operands_of_ops_outlive_a_file() -> None:
    op = CompiledOp(part="update", operands=((2, 3), ()), itemsize=2)
    t = replace(_trace(_facts(1)), compiled={"x": op})
    assert from_json(to_json(t)).compiled == {"x": op}
