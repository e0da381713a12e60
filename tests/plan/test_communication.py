"""The collectives of a plan as transfers: their order, their micro-batches and their links."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

import pase
from pase import costmodels, machine
from pase.errors import PaseError
from pase.machine import Mesh, load, mesh_from
from pase.machine.scale import scaled
from pase.memory.account import Memory
from pase.plan.communication import communication_problem, curves_from_model, transfer_origins
from pase.plan.types import NodePlan, PlanData, TensorPlan
from pase.schedule import Options, evaluate, get_policy
from pase.tables.itemize import Collective, NodeCost

TURN = ("backward", "forward")


@pytest.mark.some(1)
@pytest.mark.parametrize("once", ["none", "gathers", "all"])
def test_the_timeline_runs_one_micro_batch_after_the_other(once):
    """Hoisted collectives run in the first or last micro-batch, and the step is close to its price."""
    options = {
        "devices": 8,
        "mesh": "8",
        "accumulate": 4,
        "remat": "none",
        "once": once,
        "memory_limit": "none",
    }
    plan = dict(pase.compare("zoo:gpt2?layers=4&batch=32", **options))["fsdp"]
    (mark,) = plan.timeline.marks
    assert (mark.end_ns - mark.start_ns) / 1e9 == pytest.approx(plan.cost, rel=0.04)
    problem, origins = plan.bucket_problem, transfer_origins(plan)
    phases = [phase for phase, _ in itertools.groupby(b.phase for b in problem.blocks)]
    assert phases == ["forward", "backward"] * 4
    sent = {way: [o for o in origins if o.node == "wte:copy" and o.gradient is way] for way in (True, False)}
    gathers, sums = (sorted({o.repeat for o in sent[way]}) for way in (False, True))
    assert gathers == ([0, 1, 2, 3] if once == "none" else [0])
    assert sums == ([3] if once == "all" else [0, 1, 2, 3])
    begins = [
        i for i, (a, b) in enumerate(itertools.pairwise(problem.blocks), 1) if (a.phase, b.phase) == TURN
    ]
    for t, o in zip(problem.tensors, origins, strict=True):
        m = o.repeat // (o.times // 4)
        if o.gradient and m < 3:
            assert (t.needed_before, t.lag) == (begins[m], 0)
        elif not o.gradient and not o.recompute and m:
            assert (t.ready_after, t.lag) == (begins[m - 1] - 1, 0)


def test_updated_parameters_are_gathered_in_the_first_micro_batch():
    """In ZeRO-2 this holds for the timeline and for the price: forward hides at most one micro-batch's compute."""
    slow = scaled(load("h100x8"), {"bandwidth": 0.02})
    options = {"devices": 8, "mesh": "8", "accumulate": 8, "remat": "none", "machine": slow}
    plan = dict(pase.compare("zoo:gpt2?layers=4&batch=64", memory_limit="none", **options))["zero2"]
    updated = sum(c.cost for c in plan.collectives if c.phase == "update")
    forward = sum((1 - w.late) * w.cost for n in plan.nodes for w in n.work if w.phase == "forward")
    backward = plan.compute - forward
    assert updated > forward / 8
    assert plan.hidden <= (forward / 8 + backward) * (1 + 1e-9)
    origins = [o for o in transfer_origins(plan) if o.updated]
    assert origins and all(o.repeat < max(o.times // 8, 1) for o in origins)
    sent = communication_problem(plan, where="the plan").tensors
    mine = [t.nbytes for t, o in zip(sent, transfer_origins(plan), strict=True) if o.updated]
    assert sum(mine) == pytest.approx(
        sum(c.nbytes for c in plan.collectives if c.phase == "update"), rel=1e-3
    )


def test_links_are_the_machines_levels() -> None:
    m = machine.load("h100x8")
    model = costmodels.get("analytic", m)
    mesh = mesh_from("outer=4,inner=8", 32)
    curve_of = curves_from_model(model, m, mesh)
    levels = [level.name for level in m.levels]
    assert curve_of("all_reduce", ("inner",))[0] == levels[0]
    assert curve_of("all_reduce", ("outer",))[0] == levels[-1]
    assert curve_of("all_gather", ("outer", "inner"))[0] == levels[-1]
    bits = 1 << mesh.names.index("inner")
    for nbytes in (2.0**12, 2.0**20, 2.0**30):
        asked = float(model.collective("all_reduce", mesh, bits, nbytes))
        assert curve_of("all_reduce", ("inner",))[1].seconds_for(nbytes) == pytest.approx(asked, rel=1e-5)


def stepped(**changes: Any) -> PlanData:
    """A plan of two repeated layers. w is gathered over `a` for forward and for backward; its gradient is
    reduce-scattered over `a` and all-reduced over `b`."""

    def move(
        kind: Any, tensor: str, axes: str, nbytes: int, times: int, phase: Any, source: str
    ) -> Collective:
        cost = times * (1.0 + nbytes / 8)
        return Collective(
            kind=kind,
            tensor=tensor,
            axes=tuple(axes),
            nbytes=nbytes,
            times=times,
            phase=phase,
            node="dot",
            source=source,
            cost=cost,
        )

    def node(name: str, op: str, times: int, compute: float, update: float = 0.0) -> NodePlan:
        cost = NodeCost(compute=compute, communication=0.0, update=update)
        return NodePlan(name=name, op=op, einsum="", sizes={}, split={}, times=times, source="", cost=cost)

    memory = Memory(parameters=0, gradients=0, optimizer=0, activations=0, buffers=0)
    plan = PlanData(
        model="toy",
        devices=8,
        machine="",
        machine_digest="",
        device_memory=0,
        cost_model="analytic",
        unit="s",
        optimizer="adam",
        mesh=Mesh(names=("a", "b"), sizes=(4, 2)),
        parameters={},
        inputs={},
        define={},
        read={},
        memory=memory,
        cost=0.0,
        optimal=True,
        bound=0.0,
        baselines={},
        skipped={},
        tried=(),
        seconds={},
        graph_digest="",
        provenance={},
        nodes=(
            node("w", "parameter", 1, 0.0, 4.0),
            node("dot", "matmul", 2, 6.0),
            node("loss", "map", 1, 3.0),
        ),
        collectives=(
            move("all_gather", "t1", "a", 8, 4, "forward", "w"),
            move("reduce_scatter", "t1", "a", 8, 2, "backward", "w"),
            move("all_reduce", "t1", "b", 2, 2, "backward", "w"),
            move("all_reduce", "t2", "b", 16, 2, "forward", "x"),
        ),
    )
    return replace(plan, **changes)


def test_a_layout() -> None:
    p = communication_problem(stepped(), where="toy")
    # The seconds of each dot: a third of 3 s in forward, its share of the update, and the activation's all-reduce,
    # which overlaps nothing.
    assert [b.seconds for b in p.blocks] == [1 + 2 + 3, 1 + 2 + 3, 1, 2, 2, 2]
    names = [t.name for t in p.tensors]
    assert names[:4] == [
        "w[0].grad.reduce_scatter",
        "w[0].grad.all_reduce.1",
        "w[0].all_gather",
        "w[0].all_gather.again1",
    ]
    scatter, reduce, gather, again = p.tensors[:4]
    assert (scatter.ready_after, reduce.follows, gather.follows, gather.needed_before, gather.lag) == (
        5,
        (0,),
        (1,),
        0,
        1,
    )
    assert (again.lag, again.ready_after, again.needed_before) == (0, 2, 5)
    alone = communication_problem(stepped(bucket_bytes=0.0), where="toy").tensors
    assert {t.name: t.ready_after for t in alone if "again" in t.name} == {
        "w[0].all_gather.again1": 3,
        "w[1].all_gather.again1": 2,
    }
    assert p.message_s(0, 0, 8) == 2.0
    for name in ("fifo", "ddp", "bytescheduler", "tac", "ours"):
        plan = get_policy(name).make(p, Options())
        assert evaluate(p, plan).iteration_s >= p.compute_s


def test_stages_of_a_layout_follow_one_another() -> None:
    """A gather runs axis by axis, for forward and for backward. Each step takes the result of the one before it."""
    gather, *rest = stepped().collectives
    moved = (gather, replace(gather, axes=("b",), nbytes=16), *rest)
    w = TensorPlan(shape=(), dtype="bfloat16", storage=())
    p = communication_problem(stepped(collectives=moved, parameters={"w": w}), where="toy")
    by_name = {t.name: i for i, t in enumerate(p.tensors)}
    for later, earlier in (
        ("w[0].all_gather.1", "w[0].all_gather"),
        ("w[0].all_gather", "w[0].grad.all_reduce.1"),
        ("w[0].all_gather.1.again1", "w[0].all_gather.again1"),
    ):
        assert p.tensors[by_name[later]].follows == (by_name[earlier],)
    assert {t.dtype for t in p.tensors} == {"bfloat16"}


def test_bad_layouts_are_named() -> None:
    with pytest.raises(PaseError, match="FLOP") as e:
        communication_problem(stepped(unit="FLOP"), where="l.json")
    assert e.value.where == "l.json"
    with pytest.raises(PaseError, match="nothing to schedule") as e:
        communication_problem(stepped(collectives=stepped().collectives[3:]), where="l.json")
    assert e.value.where == "l.json"
