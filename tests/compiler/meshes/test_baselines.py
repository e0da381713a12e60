"""Baselines as answers: the cheapest takes the place of a dearer answer, and pinned nodes keep their configs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import pase
from pase.baselines import Baseline
from pase.compiler.compilation import compile_model
from pase.compiler.meshes import baselines
from pase.compiler.meshes.baselines import Rivals, complete, never_worse, price_baselines
from pase.compiler.meshes.search import search_meshes
from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import SplitProblem
from pase.machine import mesh_from
from pase.search.check import cost_of
from tests.ir.graphs import raw

MESH = mesh_from("4", 4)


@pytest.fixture(scope="module")
def problem() -> SplitProblem:
    return SplitProblem.of(raw("mlp"), 4, "h100x8", "analytic", "adam", "none")


def test_a_cheaper_baseline_takes_the_place_of_the_answer(problem: SplitProblem) -> None:
    found = search_meshes(problem, [MESH])
    given, _ = price_baselines(problem)
    assert {"data_parallel", "fsdp"} <= {b.name for b in given}
    assert never_worse(problem, found, given) is found and never_worse(problem, found, []) is found
    dear = replace(found, solution=replace(found.solution, cost=1.0, optimal=False, bound=0.0))
    best = min(given, key=lambda b: b.cost)
    taken = never_worse(problem, dear, given)
    assert taken.solution.cost == best.cost and taken.solution.method == f"the strategy of {best.name}"
    assert not taken.solution.optimal and taken.solution.bound == 0.0
    for name, config in taken.configs.items():
        np.testing.assert_array_equal(config, best.strategy[name])


def test_a_baseline_is_priced_alike_alone_among_all_and_without_the_tables_of_the_search() -> None:
    problem = SplitProblem.of(raw("mlp"), 4, "h100x8", "analytic", "adam", "parameters")
    rivals, later = Rivals(problem), Rivals(problem)
    (alone,) = (b for b in rivals.where(lambda m: m.sizes == (4,)) if b.name == "fsdp")
    given, skipped = rivals.all
    assert alone in given
    del problem  # and with it its tables
    again, also = later.all
    assert [(b.name, b.cost, b.notes) for b in again] == [(b.name, b.cost, b.notes) for b in given]
    assert also == skipped and [*map(later.bytes_of, again)] == [*map(rivals.bytes_of, given)]


def test_only_what_can_be_taken_is_priced_before_it_is_asked_for(monkeypatch) -> None:
    priced: list[str] = []
    fill_in = baselines.fill_in_if_allowed

    def counted(made, *rest):
        priced.append(made.name)
        return fill_in(made, *rest)

    monkeypatch.setattr(baselines, "fill_in_if_allowed", counted)
    plan = pase.compile("zoo:mlp?layers=1&batch=64", devices=4, mesh="4")
    assert plan.optimal and not priced
    assert {"data_parallel", "fsdp"} <= set(plan.baselines) <= set(priced)
    assert set(plan.baseline_memory) == set(plan.baselines) and len(priced) == len({*priced})


def test_the_users_mesh_is_kept_where_a_baseline_on_another_is_cheaper() -> None:
    model = "zoo:gpt2?layers=2&batch=8"
    done = compile_model(model, None, (), CompileOptions(devices=32, mesh="32", cost_model="analytic"))
    assert done.plan.mesh.sizes == (32,) and done.plan.optimal
    assert min(done.plan.baselines.values()) < done.plan.cost


def test_pinned_nodes_keep_their_configs_and_the_rest_is_the_cheapest(problem: SplitProblem) -> None:
    tables, space = problem.tables(MESH)
    rng = np.random.default_rng(0)
    free = Baseline(name="free", mesh=MESH, strategy=complete(problem, {}, MESH), cost=0.0)
    assert cost_of(tables, space.index(free.strategy)) == pytest.approx(
        search_meshes(problem, [MESH]).solution.cost, rel=1e-9
    )
    for v in rng.choice(len(space.configs), 5, replace=False):
        name = problem.graph.nodes[v].name
        costs = []
        for config in space.configs[v]:
            made = complete(problem, {name: config}, MESH)
            np.testing.assert_array_equal(made[name], config)
            costs.append(cost_of(tables, space.index(made)))
        assert min(costs) == pytest.approx(cost_of(tables, space.index(free.strategy)), rel=1e-9)
