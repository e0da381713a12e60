"""The collectives of a plan as transfers: their order, their micro-batches and their links."""

from __future__ import annotations

import itertools

import pytest

import pase
from pase import costmodels, machine
from pase.machine import load, mesh_from
from pase.machine.scale import scaled
from pase.plan.communication import communication_problem, curves_from_model, transfer_origins

TURN = ("backward", "forward")


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
    sent = {way: [o for o in origins if o.node == "wte:dot" and o.gradient is way] for way in (True, False)}
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
