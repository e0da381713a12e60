"""`pase explain`: causes add up to the plan's cost, and alternatives are the exact optima around a layer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import pase
from pase.api import Plan
from pase.compiler.problem.problem import SplitProblem
from pase.errors import PaseError
from pase.questions.explain import causes, explain
from pase.search import brute_force


def squares(w: Any, x: Any) -> Any:
    return ((x @ w) ** 2).mean()


@pytest.fixture(scope="module")
def small() -> Plan:
    """A model with few enough choices for brute force."""
    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    return pase.compile(squares, shape, shape, devices=4, mesh="2x2", baselines=False)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A zoo model, whose layout can find the model by its name."""
    return pase.compile(
        "zoo:mlp?batch=64&layers=2&features=64&hidden=64&classes=16", devices=4, mesh="2x2", baselines=False
    )


@pytest.mark.parametrize("model", ["mlp", "gpt2?layers=2", "alexnet"])
def test_causes_add_up(model: str) -> None:
    p = pase.compile(f"zoo:{model}", devices=8, mesh="2x4", baselines=False)
    assert sum(c.cost for c in causes(p)) == pytest.approx(p.cost, rel=1e-9)
    assert sum(c.nbytes for c in causes(p)) == sum(c.nbytes * c.times for c in p.collectives)
    assert sum(c.count for c in causes(p) if c.group == "communication") == len(p.collectives)


def test_alternatives_are_the_best_around_a_layer(small: Plan) -> None:
    """The reference is brute force on the same tables without the layer's other configs."""
    assert small.traced is not None
    problem = SplitProblem.of(small.traced.graph, 4, small.machine, small.cost_model, small.optimizer)
    tables, space = problem.tables(small.mesh)
    layer = next(n.name for n in small.nodes if n.op == "matmul")
    v = [n.name for n in problem.graph.nodes].index(layer)
    report = explain(small, layer).layer
    assert report is not None and len(report.alternatives) > 3
    seen = 0
    for a in report.alternatives:
        want = [a.ways.get(d.name, 1) for d in problem.graph.nodes[v].space.dims]
        so = np.array(
            [
                [
                    int(np.prod([s for c, s in zip(cfg, small.mesh.sizes, strict=True) if c == d]))
                    for d in range(len(want))
                ]
                for cfg in space.configs[v]
            ]
        )
        allowed = (so == want).all(axis=1)
        seen += int(allowed.sum())
        costs = list(tables.node_costs)
        costs[v] = np.where(allowed, costs[v], np.inf)
        assert a.cost == pytest.approx(brute_force(replace(tables, node_costs=tuple(costs))).cost, rel=1e-9)
    assert seen == len(space.configs[v])
    (chosen,) = [a for a in report.alternatives if a.chosen]
    assert chosen.cost == pytest.approx(small.cost, rel=1e-9)
    assert dict(chosen.split) == dict(report.node.split)
    next_best = min(a.cost for a in report.alternatives if not a.chosen)
    assert explain(small).next_best[layer] == pytest.approx(next_best, rel=1e-9)


def test_a_layers_items_add_up(plan: Plan) -> None:
    for n in plan.nodes:
        report = explain(plan, n.name).layer
        assert report is not None
        assert sum(w.cost for w in report.work) == pytest.approx(n.cost.compute + n.cost.update, rel=1e-9)
        assert sum(c.cost for c, _ in report.collectives) == pytest.approx(n.cost.communication, rel=1e-9)


def test_what_overlap_hides_is_taken_off() -> None:
    p = pase.compile("zoo:gpt2?layers=2", devices=4, mesh="2x2", baselines=False, overlap="parameters")
    assert p.hidden > 0
    assert sum(c.cost for c in causes(p)) == pytest.approx(p.cost, rel=1e-9)
    e = explain(p, max(p.nodes, key=lambda n: n.cost.total).name)
    assert e.layer is not None and e.problem is not None
    assert min(a.cost for a in e.layer.alternatives) >= e.problem.pricing.solve(p.mesh).bound * (1 - 1e-9)
    (chosen,) = [a for a in e.layer.alternatives if a.chosen]
    assert chosen.cost == pytest.approx(p.cost, rel=1e-9)


def test_a_plan_in_micro_batches_is_explained_as_it_runs() -> None:
    p = pase.compile("zoo:gpt2?layers=2", devices=4, mesh="2x2", baselines=False, accumulate=2, remat="all")
    layer = max((n for n in p.nodes if n.op == "matmul"), key=lambda n: n.cost.total)
    report = explain(p, layer.name).layer
    assert report is not None
    (chosen,) = [a for a in report.alternatives if a.chosen]
    assert chosen.cost == pytest.approx(p.cost, rel=1e-9)
    assert sum(w.cost for w in report.work) == pytest.approx(layer.cost.compute, rel=1e-9)


def test_an_unknown_layer_names_what_is_near(plan: Plan) -> None:
    with pytest.raises(PaseError, match="'dat'") as e:
        explain(plan, "dat")
    assert e.value.where == "--layer" and any(n.name in e.value.fix for n in plan.nodes)


def test_a_strangers_model_is_not_imported(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stranger.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "layout.json"
    plan.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": "stranger:model"}))
    e = explain(pase.load(path))
    assert not e.next_best and "--model" in e.remark
    assert sum(c.cost for c in e.causes) == pytest.approx(plan.cost)


def test_another_machine_is_refused(plan: Plan) -> None:
    with pytest.raises(PaseError, match="'a100x8'") as e:
        explain(plan, machine="a100x8")
    assert e.value.where == "--machine"


def test_what_is_cheaper_but_does_not_fit_is_said() -> None:
    free = pase.compile("zoo:mlp", devices=8, mesh="2x4", baselines=False)
    tight = pase.compile(
        "zoo:mlp", devices=8, mesh="2x4", memory_limit=0.95 * free.memory.total, baselines=False
    )
    assert tight.cost > free.cost
    assert "without the memory limit" in explain(tight).remark
    assert "memory limit" not in explain(free).remark
