"""A plan beside a trace. The traces are made of the plan's own items, so that it is known which assumption is off."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pase
from pase.bridges.plan_trace import Beside, plan_beside
from pase.errors import PaseError
from pase.plan.stage_timeline import stage_timeline
from pase.replay import Event, align, measure
from pase.replay.measurement.spending import spendings
from pase.replay.reports.against import against_lines, against_section
from pase.replay.types import COLLECTIVE, CompiledOp, Group, Mark, Timeline, from_events, on_stream

STEPS = 3
WORKS = {"matmul": "product", "conv": "convolution", "attention": "attention", "memory": "elementwise"}
Change = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def plan() -> pase.Plan:
    return pase.compile("zoo:mlp", devices=2, mesh="2", machine="h100x8", memory_limit="none")


def traced(plan: pase.Plan, change: Change = lambda op: op, gap_ns: int = 0) -> Beside:
    """The plan beside a run in which each item takes its predicted time, after ``change``, one after the other."""
    ops: list[dict[str, Any]] = []
    for n in plan.nodes:
        for i, w in enumerate(n.work):
            ops += [
                {
                    "name": f"{n.name} {i}",
                    "ns": round(w.cost / w.times * 1e9),
                    "work": "optimizer" if w.phase == "update" else WORKS[w.kind],
                    "flops": round(w.flops) if w.mnk else 0,
                    "nbytes": round(w.nbytes),
                    "dtype": "f32",
                    "source": n.source,
                }
            ] * round(w.times)
    for c in plan.collectives:
        ops.append({"name": c.kind, "ns": max(round(c.cost * 1e9), 1), "work": c.kind, "nbytes": c.nbytes})
    events, marks, compiled, now = [], [], {}, 1000
    for step in range(STEPS):
        begin = now
        for op in map(change, map(dict, ops)):
            sends = op["work"] in ("all_reduce", "all_gather", "reduce_scatter")
            events.append(
                Event(
                    rank=0,
                    lane="7",
                    device=True,
                    kind="collective" if sends else "kernel",
                    name=op["name"],
                    start_ns=now,
                    duration_ns=op["ns"],
                    nbytes=op["nbytes"] if sends else -1,
                    operation=op["work"] if sends else "",
                    group="pair" if sends else "",
                    iteration=step,
                )
            )
            if not sends:
                compiled[op["name"]] = CompiledOp(
                    part="forward",
                    operands=(),
                    work=op["work"],
                    flops=op["flops"],
                    nbytes=op["nbytes"],
                    dtype=op["dtype"],
                    op_name=op["name"],
                    source=op["source"].rpartition(":")[0],
                )
            now += op["ns"]
        now += gap_ns
        marks.append(Mark(rank=0, iteration=step, start_ns=begin, end_ns=now))
    t = from_events(events, groups=(Group(name="pair", ranks=(0, 1)),), marks=tuple(marks))
    m = measure(align(replace(t, compiled=compiled, devices={0: "NVIDIA H100 80GB HBM3"})))
    found = plan_beside(plan, m, spendings(m), "layout.json")
    assert math.fsum(a.difference_s for a in found.assumptions) == pytest.approx(
        found.measured_s - found.predicted_s, abs=1e-12
    )
    return found


def parts(found: Beside) -> dict[str, float]:
    """Assumption → µs, without what rounding to ns makes."""
    return {a.name: us for a in found.assumptions if abs(us := a.difference_s * 1e6) > 0.2}


def of(plan: pase.Plan, products: bool) -> float:
    """The predicted µs of products, or of light ops."""
    return 1e6 * math.fsum(
        w.cost for n in plan.nodes for w in n.work if w.phase != "update" and (w.mnk is not None) == products
    )


def test_a_run_as_predicted_has_no_difference(plan: pase.Plan) -> None:
    hidden = plan.hidden * 1e6  # the trace hides nothing
    found = traced(plan)
    assert parts(found) == pytest.approx({"overlap": hidden} if hidden > 0.2 else {}, abs=0.2)
    assert not found.notes
    planned = sum(len(n.work) for n in plan.nodes)
    assert sum(r.measured_calls for r in found.rows) == planned + len(plan.collectives)
    for r in found.rows:
        assert r.measured_s == pytest.approx(r.predicted_s, abs=1e-7), r
    assert all(len(line) <= 80 for line in against_lines(_json(found)))
    assert "Assumptions that were off" in against_section(_json(found))


def test_each_assumption_is_named(plan: pase.Plan) -> None:
    base = parts(traced(plan))

    def more(change: Change, gap_ns: int = 0) -> dict[str, float]:
        found = parts(traced(plan, change, gap_ns))
        return {
            k: round(us) for k in {*found, *base} if abs(us := found.get(k, 0.0) - base.get(k, 0.0)) > 0.3
        }

    products, light = of(plan, True), of(plan, False)
    sends = 1e6 * plan.communication

    def when(kind: str, **changes: Any) -> Change:
        return lambda op: {**op, **{k: f(op[k]) for k, f in changes.items()}} if op["work"] == kind else op

    slow = {"ns": lambda ns: 2 * ns}
    assert more(when("product", **slow)) == {"rate of products": round(products)}
    assert more(when("product", **slow, dtype=lambda _: "f64")) == {"precision": round(products)}
    assert more(when("product", **slow, flops=lambda f: 2 * f)) == {"products": round(products)}
    assert more(when("elementwise", **slow)) == {"rate of light ops": round(light)}
    assert more(when("elementwise", **slow, nbytes=lambda b: 2 * b)) == {"bytes of light ops": round(light)}
    assert sum(more(when("all_reduce", **slow)).values()) == pytest.approx(sends, rel=0.02)
    assert more(lambda op: op, gap_ns=20_000) == {"idle": 20}


def test_another_batch_is_said(plan: pase.Plan) -> None:
    half = lambda op: {**op, "flops": op.get("flops", 0) // 2}  # noqa: E731
    assert "0.50 times the FLOPs" in traced(plan, half).notes[0]


def test_a_plan_that_is_not_of_the_run_is_refused(plan: pase.Plan) -> None:
    m: Any = SimpleNamespace(timeline=from_events([]))  # only the plan is looked at
    for other, what in (
        (replace(plan, unit="FLOP"), "FLOP"),
        (replace(plan, devices=-1), "ranks"),
    ):
        with pytest.raises(PaseError) as e:
            plan_beside(other, m, [], "layout.json")
        assert what in e.value.what and e.value.where == "layout.json" and e.value.fix


@pytest.fixture(scope="module")
def staged() -> pase.Plan:
    """A pipeline of two ranks with a device each, so that the predicted step's ranks are the run's."""
    return pase.compile(
        "zoo:gpt2",
        devices=2,
        pipeline=2,
        baselines=False,
        mesh="1",
        machine="h100x8",
        memory_limit="none",
        stage_schedule="1f1b",
    )


def beside_stages(plan: pase.Plan, change: Callable[[Timeline], Timeline] = lambda t: t) -> Beside:
    """The pipeline beside its own predicted step, after ``change``."""
    m = measure(align(change(_run_of(plan))))
    found = plan_beside(plan, m, spendings(m), "layout.json")
    assert math.fsum(a.difference_s for a in found.assumptions) == pytest.approx(
        found.measured_s - found.predicted_s, abs=1e-12
    )
    return found


def test_a_pipeline_as_predicted_works_and_waits_as_predicted(staged: pase.Plan) -> None:
    found = beside_stages(staged)
    assert [(r.rank, r.traced, r.stages) for r in found.stages] == [(0, (0,), (0,)), (1, (1,), (1,))]
    assert found.measured_s == pytest.approx(staged.cost, rel=1e-5)
    for r in found.stages:
        assert r.measured_s == pytest.approx(r.predicted_s, rel=1e-4)
        assert r.measured_idle_s == pytest.approx(r.predicted_idle_s, rel=1e-3)
    assert abs(parts(found).get("bubble", 0.0)) < 1e-4 * staged.cost * 1e6
    lines = [*against_lines(_json(found))]
    assert all(len(line) <= 80 for line in lines)
    assert any(line.split()[:2] == ["1", "1"] for line in lines)
    assert "The pipeline" in against_section(_json(found))


def test_a_stage_that_works_less_waits_longer(staged: pase.Plan) -> None:
    found = beside_stages(staged)
    shorter = beside_stages(staged, lambda t: _shortened(t, rank=0, by=0.5))
    before, after = found.stages[0], shorter.stages[0]
    assert after.measured_s == pytest.approx(before.measured_s / 2, rel=1e-3)
    assert after.measured_idle_s == pytest.approx(before.measured_idle_s + before.measured_s / 2, rel=1e-3)
    assert shorter.stages[1] == found.stages[1]


def _run_of(plan: pase.Plan) -> Timeline:
    """The predicted step of a pipeline, several times in a row."""
    t = stage_timeline(plan)
    assert t is not None
    step = max(m.end_ns for m in t.marks)
    columns = {k: np.concatenate([v] * (STEPS + 1)) for k, v in t.columns.items()}
    number = np.repeat(np.arange(STEPS + 1), len(t))
    columns["start_ns"] = columns["start_ns"] + number * step
    columns["iteration"] = number.astype(columns["iteration"].dtype)
    marks = tuple(
        replace(m, iteration=i, start_ns=i * step, end_ns=(i + 1) * step)
        for m in t.marks
        for i in range(STEPS + 1)
    )
    order = np.lexsort((columns["start_ns"], columns["lane"]))
    return replace(t, columns={k: v[order] for k, v in columns.items()}, marks=marks)


def _shortened(t: Timeline, rank: int, by: float) -> Timeline:
    mine = (t.rank_of == rank) & on_stream(t["kind"]) & (t["kind"] != COLLECTIVE)
    duration = t["duration_ns"].copy()
    duration[mine] = (duration[mine] * by).astype(duration.dtype)
    return replace(t, columns={**t.columns, "duration_ns": duration})


def test_traces_that_do_not_show_the_pipeline_are_refused(staged: pase.Plan) -> None:
    t = _run_of(staged)
    m = measure(align(t.select(t.rank_of == 0)))
    with pytest.raises(PaseError) as e:
        plan_beside(staged, m, spendings(m), "layout.json")
    assert "no device of rank 1" in e.value.what and e.value.fix
    m = measure(align(t))
    first, second = spendings(m)
    with pytest.raises(PaseError) as e:
        plan_beside(staged, m, [first, replace(second, total_ns=2 * second.total_ns)], "layout.json")
    assert "steps" in e.value.what and e.value.fix


def _json(found: Beside) -> Any:
    from dataclasses import asdict

    return asdict(found)
