"""Memory over the course of a step comes to what a plan counts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

import pase
from pase.api import Plan
from pase.plan.step_memory import step_memory


@pytest.mark.parametrize("how", ["", "&remat=0"])
def test_memory_over_the_step_comes_to_what_is_counted(how: str) -> None:
    p = pase.compile(f"zoo:gpt2?layers=3&batch=16{how}", devices=4, mesh="2x2", baselines=False)
    course = step_memory(p)
    assert course is not None
    held, end = course.held, course.times.index(course.forward)
    slack = len(p.nodes)
    kept = {k: sum(n.keeps.get(k, 0) for n in p.nodes) for k in ("activations", "gradients")}
    assert held["activations"][end] == pytest.approx(kept["activations"], abs=slack)
    assert held["gradients"][-1] == pytest.approx(kept["gradients"], abs=slack)
    assert p.memory.gradients <= kept["gradients"] + slack
    assert held["activations"][-1] == pytest.approx(0, abs=slack)
    assert course.times[-1] == pytest.approx(
        p.cost - sum(n.cost.update for n in p.nodes) - sum(x.cost for x in _on_parameters(p)), rel=0.05
    )
    assert course.peak <= p.memory.total + slack
    assert all(a <= b for a, b in pairwise(course.times))


def _on_parameters(p: Plan) -> list[Any]:
    parameters = {n.name for n in p.nodes if n.op == "parameter"}
    return [c for c in p.collectives if c.node in parameters]
