"""TicTac: its properties, its figures, Johnson's rule, and the models of its Table 1."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cases.schedules import link, random_problem
from pase.schedule import (
    BucketPlan,
    Options,
    ScheduleProblem,
    evaluate,
    get_policy,
    whole,
)
from pase.schedule.pipedream import Layer, problem_from_layers
from pase.schedule.policies.tictac import (
    dependencies,
    parameter_server,
    tac_order,
    tic_order,
    update_properties,
)
from tests.schedule.tictac_models import MODELS, TABLE_1


def two_machine_flow_shop(m: list[float], p: list[float]) -> ScheduleProblem:
    """Transfers of m seconds, each of which frees one independent block of p seconds."""
    layers = [
        Layer(name=f"x{i}", forward_s=c, backward_s=0.0, parameters=((f"x{i}", int(t)),), after=())
        for i, (t, c) in enumerate(zip(m, p, strict=True))
    ]
    return problem_from_layers(layers, (link(),), name="flow shop", dataflow=True)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5))
def test_tac_is_johnsons_rule_and_optimal_on_flow_shops(jobs: list[tuple[int, int]]) -> None:
    problem = two_machine_flow_shop([j[0] for j in jobs], [j[1] for j in jobs])

    def makespan(order: tuple[int, ...] | list[int]) -> float:
        a = b = 0.0
        for i in order:
            a += jobs[i][0]
            b = max(b, a) + jobs[i][1]
        return b

    best = min(makespan(o) for o in itertools.permutations(range(len(jobs))))
    assert makespan(tac_order(problem)) == best


def test_the_printed_comparator_is_reversed_and_not_transitive() -> None:
    """For (P, M, M+) = (2,3,3), (1,1,4), (3,2,5), Eq. 6 with ties broken by M+ gives a cycle."""
    ops = [(2, 3, 3), (1, 1, 4), (3, 2, 5)]

    def before(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
        left, right = min(b[0], a[1]), min(a[0], b[1])
        return left < right if left != right else a[2] < b[2]

    assert before(ops[0], ops[1]) and before(ops[1], ops[2]) and before(ops[2], ops[0])


def figure_1() -> ScheduleProblem:
    """TicTac's toy graph: op1 needs recv1, op2 needs op1 and recv2."""
    layers = [
        Layer(name="op1", forward_s=2.0, backward_s=0.0, parameters=(("recv1", 3),)),
        Layer(name="op2", forward_s=4.0, backward_s=0.0, parameters=(("recv2", 5),), after=(0,)),
    ]
    return problem_from_layers(layers, (link(),), name="figure 1", dataflow=True)


def test_properties_of_figure_1() -> None:
    problem = figure_1()
    dep = dependencies(problem)[:2]
    assert dep.tolist() == [[True, False], [True, True]]
    p, m_plus = update_properties(dep, np.array([2.0, 4.0]), np.array([3.0, 5.0]), np.ones(2, bool))
    assert p.tolist() == [2.0, 0.0]
    assert m_plus.tolist() == [8.0, 8.0]
    p, m_plus = update_properties(dep, np.array([2.0, 4.0]), np.array([3.0, 5.0]), np.array([False, True]))
    assert p.tolist() == [0.0, 4.0] and m_plus[1] == np.inf
    assert tac_order(problem) == tic_order(problem) == [0, 1]


def test_figure_4b_the_pair_that_frees_a_block_goes_first() -> None:
    """All P are 0. A and B free a block together, C and D only later, so M+ decides."""
    layers = [
        Layer(name="ab", forward_s=1.0, backward_s=0.0, parameters=(("A", 2), ("B", 2))),
        Layer(name="abc", forward_s=1.0, backward_s=0.0, parameters=(("C", 1),), after=(0,)),
        Layer(name="abcd", forward_s=1.0, backward_s=0.0, parameters=(("D", 1),), after=(1,)),
    ]
    problem = problem_from_layers(layers, (link(),), name="figure 4b", dataflow=True)
    assert tac_order(problem) == tic_order(problem) == [0, 1, 2, 3]


def test_in_a_chain_tac_and_tic_are_layer_order() -> None:
    problem = random_problem(12, 1)
    assert tac_order(problem) == tic_order(problem) == list(range(12))


def test_a_dag_with_many_receives_in_both_forms() -> None:
    """With dataflow, a branch whose transfer is late must not delay the other branch, with all-reduce and with a
    parameter server."""
    layers = [
        Layer(name="stem", forward_s=1.0, backward_s=1.0, parameters=(("s", 1),)),
        Layer(name="wide", forward_s=1.0, backward_s=1.0, parameters=(("w", 20),), after=(0,)),
        Layer(name="deep", forward_s=6.0, backward_s=6.0, parameters=(("d", 2),), after=(0,)),
        Layer(name="join", forward_s=1.0, backward_s=1.0, parameters=(("j", 1),), after=(1, 2)),
    ]
    flow = problem_from_layers(layers, (link(),), name="dag", dataflow=True)
    tac = get_policy("tac")
    assert tac_order(flow)[0] == 0
    order = [flow.tensors[i].name for i in tac_order(flow)]
    assert order.index("d") < order.index("w")
    in_order = problem_from_layers(layers, (link(),), name="dag", dataflow=False)
    cost = {p.dataflow: evaluate(p, tac.make(p, Options())).iteration_s for p in (flow, in_order)}
    assert cost[True] <= cost[False]
    server = parameter_server(flow, push=link("up"), pull=link("down"))
    e = evaluate(server, tac.make(server, Options()))
    assert e.iteration_s >= server.compute_s
    assert {i.resource for i in e.timeline} == {"compute", "up", "down"}


@pytest.mark.parametrize("name", list(TABLE_1))
def test_tictac_table_1(name: str) -> None:
    """The number of parameters and MiB of the ten models."""
    sizes = [n for layer in MODELS[name]() for _, n in layer.parameters]
    assert len(sizes) == TABLE_1[name][0]
    assert sum(sizes) / 2**20 == pytest.approx(TABLE_1[name][1], abs=0.006)


@pytest.mark.parametrize("name", ["Inception v1", "ResNet-50 v2", "AlexNet v2"])
def test_order_matters_as_tictac_says(name: str) -> None:
    """All pulls are ready when the iteration starts, and compute is a DAG. TIC is about as good as TAC, and both beat a
    random order."""
    layers = MODELS[name]()
    rate = sum(n for x in layers for _, n in x.parameters) / sum(x.forward_s for x in layers)
    made = problem_from_layers(layers, (link(beta=1 / rate),), name=name, dataflow=True)
    forward = [b for b in made.blocks if b.phase == "forward"]
    pulls = tuple(replace(t, ready_after=None, lag=0) for t in made.tensors)
    problem = replace(made, blocks=tuple(forward), tensors=pulls)  # inference, with forward only

    def efficiency(order: list[int]) -> float:
        messages = tuple(whole(problem, [t]) for t in order)
        e = evaluate(problem, BucketPlan(policy="x", messages=messages, dispatch="priority"), timeline=False)
        return e.efficiency

    g = np.random.default_rng(0)
    chance = [efficiency(g.permutation(len(pulls)).tolist()) for _ in range(3)]
    tac, tic = efficiency(tac_order(problem)), efficiency(tic_order(problem))
    assert tac > max(chance) and tic > max(chance)
    assert tac >= tic - 0.02
