"""Phases, micro-batches and layers of measured tasks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.bridges.degrees import by_stages
from pase.errors import Infeasible
from pase.replay.measurement.clocks import align
from pase.replay.measurement.model import measure
from pase.replay.reports.trust import Run
from pase.replay.simulation.sections import OpShape, StepPhase, product_of, sections
from pase.replay.simulation.steady import evaluate
from pase.replay.traces.timeline_io import from_json, to_json
from pase.replay.types import CompiledOp, Event, Mark, Timeline, from_events
from tests.replay.traces.compiled import US, facts_of_step, timeline_of_steps

LAYERS = 3


def test_a_compiled_program_says_what_its_ops_belong_to() -> None:
    facts = facts_of_step(LAYERS)
    products = [op for op in facts.ops.values() if op.product]
    assert [op.part for op in products].count("forward") == LAYERS
    assert [op.part for op in products].count("backward") == 2 * LAYERS
    assert {op.product for op in products if op.part == "forward"} == {((8, 16), (16, 16), (8, 16))}
    t = timeline_of_steps(facts)
    assert from_json(to_json(t)).compiled == t.compiled
    run = Run(measured=measure(align(t)))
    s = sections(t, run.graph)
    assert s.layers == LAYERS and s.micro_batches == 1 and len(s.product) == 3 * LAYERS
    assert {StepPhase.FORWARD, StepPhase.BACKWARD} <= {StepPhase(int(p)) for p in s.phase[s.order]}
    made = by_stages(LAYERS, 1e12)(t, run.graph)
    graph = made.graph
    # The single micro-batch passes through all stages in order, and then each stage updates its parameters.
    assert len(graph.ranks) == LAYERS and "1 micro-batches" in made.note
    update = sum(s.phase == StepPhase.UPDATE)
    want = 10 * US * (len(s.order) - update + update / LAYERS)
    assert max(evaluate(graph).values()) == pytest.approx(want, rel=0.01)


@given(seed=st.integers(0, 1 << 20))
@settings(max_examples=10, deadline=None)
def test_phases_do_not_depend_on_when_the_ops_ran(seed: int) -> None:
    """Two micro-batches without a loop: the ops of a step start in any order, each step in another one."""
    shape = ((8, 16), (16, 16), (8, 16))
    parts = [*["forward"] * 3, *["backward"] * 6] * 2
    compiled = {
        f"dot.{i}": CompiledOp(part=p, operands=shape[:2], product=shape) for i, p in enumerate(parts)
    }  # type: ignore[arg-type]
    shuffle = random.Random(seed).sample
    starts = [shuffle(range(len(parts)), len(parts)) for _ in range(3)]
    long = 10 * US * len(parts)
    events = [
        Event(
            rank=0,
            lane="XLA ops",
            device=True,
            kind="kernel",
            name=name,
            start_ns=k * long + 10 * US * at,
            duration_ns=10 * US,
            iteration=k,
        )
        for k, order in enumerate(starts)
        for name, at in zip(compiled, order, strict=True)
    ]
    marks = [Mark(rank=0, iteration=k, start_ns=k * long, end_ns=(k + 1) * long) for k in range(3)]
    t = replace(from_events(events, marks=tuple(marks)), compiled=compiled)
    g = Run(measured=measure(align(t))).graph
    s = sections(t, g)
    ops = [i for i in s.order.tolist() if i in s.product]
    assert [g.task_name(i) for i in ops] == list(compiled)
    assert [StepPhase(int(p)).name.lower() for p in s.phase[ops]] == parts
    assert s.micro[ops].tolist() == [0] * 9 + [1] * 9 and (s.layers, s.micro_batches) == (3, 2)


@pytest.mark.parametrize("micro_batches", [8])
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
    graph = by_stages(2, 1e12)(t, run.graph).graph
    # 1F1B takes (micro-batches + stages − 1) times half of the layers, and the update.
    want = 100 * US * ((micro_batches + 1) * len(turn) / 2 + 0.5)
    assert max(evaluate(graph).values()) == pytest.approx(want, rel=0.01)
    odd = timeline([*turn, *turn[2:], "add"])
    with pytest.raises(Infeasible, match="the same products"):
        sections(odd, Run(measured=measure(align(odd))).graph)


def test_a_program_without_backward_is_refused() -> None:
    facts = facts_of_step(2)
    forward = {n: replace(op, part="forward") for n, op in facts.ops.items()}
    t = replace(timeline_of_steps(facts), compiled=forward)
    with pytest.raises(Infeasible, match="not a training step"):
        sections(t, Run(measured=measure(align(t))).graph)


def test_products_are_told_however_they_are_laid_out() -> None:
    one = OpShape(name="aten::mm", operands=((6, 4), (4, 10)))
    turned = OpShape(name="aten::addmm", operands=((10,), (6, 4), (4, 10), ()))
    assert product_of(one) == product_of(turned) == (24, 40, 60)
    assert product_of(OpShape(name="aten::mm", operands=((6, 4), (5, 10)))) is None
    assert product_of(OpShape(name="aten::add", operands=((6, 4), (6, 4)))) is None


def test_an_op_of_scalars_alone_has_one_element() -> None:
    assert OpShape(name="aten::add", operands=((), ())).elements == 1
