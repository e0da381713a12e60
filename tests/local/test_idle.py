"""Mesh axes of size 1 leave no trace in a local program."""

from __future__ import annotations

from bench.cases.plans import reduced
from pase.local.idle import without_idle_axes
from pase.local.lower import program_of
from pase.local.verify import verify_program
from pase.machine import Mesh


def test_a_program_on_one_device_sends_nothing_and_splits_nothing() -> None:
    c = reduced("mlp")
    graph, mesh = c.problem.graph, Mesh(names=("x", "y"), sizes=(1, 1))
    split = {
        n.name: {d.name: ("x",) if i == 0 else ("y",) for i, d in enumerate(n.space.dims[:2])}
        for n in graph.nodes
    }
    program = program_of(graph, mesh, split)
    assert any(t.forward or t.backward for t in program.transfers)
    made = without_idle_axes(program)
    verify_program(made)
    assert not any(t.forward or t.backward for t in made.transfers)
    states = {s for op in made.ops for r in (*op.operands, *op.results) for s in (*r.layout, *r.gradient)}
    assert states <= {None} and not any(op.sent for op in made.ops)


def test_other_axes_stay() -> None:
    c = reduced("mlp")
    plan = c.plan("data_parallel")
    assert plan is not None
    program = program_of(c.problem.graph, plan.mesh, plan.strategy)
    assert without_idle_axes(program) is program
