"""Baselines as answers: the cheapest takes the place of a dearer answer, and pinned nodes keep their configs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pase.baselines import Baseline
from pase.compiler.meshes.baselines import complete, never_worse, price_baselines
from pase.compiler.meshes.search import search_meshes
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
