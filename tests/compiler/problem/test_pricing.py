"""The price of a strategy with overlap is that of its items, by their positions in the step."""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import pase
from pase.compiler.meshes.plans import plan_of
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.variants import Variant
from pase.frontends.jax.frontend import trace
from pase.machine import load, mesh_from
from pase.tables.layouts import configs
from pase.tables.work import node_work
from tests.compiler.problem.steps import S, rerun, two_layers, weights


def one_layer(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)


def step(problem, plan, mesh, chosen):
    """Compute the step of a model without loops directly, from the plan's collectives and the work of each op."""
    graph, turns, once = problem.graph, problem.variant.accumulate, problem.variant.hoisted
    stored = {n.name for n in graph.nodes if n.kind == "parameter"}
    place = {n.name: i for i, n in enumerate(graph.nodes)}
    readers = [place[e.dst] for e in graph.edges if e.src in stored]
    again = [place[e.dst] for e in graph.edges if e.src in stored and e.access.recompute]
    first, last = min(readers), max(readers)
    waited, compute, moved = 0.0, {"forward": 0.0, "backward": 0.0}, {"forward": 0.0, "backward": 0.0}
    updated = 0.0
    for c in plan.collectives:
        gathered = c.phase == "forward"
        lone = graph.tensors[c.tensor].nbytes < problem.machine.lone_gather_bytes
        if c.source not in stored:
            waited += c.cost
        elif c.phase == "update":  # of a parameter whose state is split further, before its reader in forward
            early = place[next(e.dst for e in graph.edges if e.src == c.node)] == first or lone
            waited, updated = waited + c.cost * early, updated + c.cost * (not early)
        elif not gathered:
            late = problem.machine.sums_alone or place[c.node] == first
            waited, moved["backward"] = waited + c.cost * late, moved["backward"] + c.cost * (not late)
        else:
            runs = turns if once == "none" else 1
            each = c.cost / c.times * runs
            early = place[c.node] == first or lone
            waited, moved["forward"] = waited + each * early, moved["forward"] + each * (not early)
            if c.times == 2 * runs:
                early = place[c.node] == max(again) or lone
                waited, moved["backward"] = waited + each * early, moved["backward"] + each * (not early)
    for n in graph.nodes:
        for w in node_work(graph, n, chosen[n.name][None, :], mesh, problem.optimizer):
            each = float(np.ravel(problem.model.compute(w.kind, w.dtype, w.flops, w.nbytes, mnk=w.mnk))[0])
            if w.phase == "update" or place[n.name] >= last:
                waited += w.times * each
            elif w.phase == "backward":
                compute["backward"] += w.times * each
            else:
                compute["forward"] += turns * each
                compute["backward"] += (w.times - turns) * each
    slow = problem.machine.collective_units / problem.machine.device.compute_units
    for phase, single in (("forward", once != "none"), ("backward", once == "all")):
        if single:  # only one micro-batch has collectives to overlap with
            waited += (1 - 1 / turns) * compute[phase]
            compute[phase] /= turns
    first = 1 / turns if once == "none" else 1.0  # updated parameters are gathered before their first read
    there = first * compute["forward"], first * moved["forward"] + updated
    later = (1 - first) * compute["forward"], (1 - first) * moved["forward"]
    return waited + sum(
        max(c + slow * m, m) for c, m in (there, later, (compute["backward"], moved["backward"]))
    )


CASES = [
    (one_layer, ("w",), 64, 4096),
    (one_layer, ("w",), 4096, 256),
    (two_layers, ("w", "v"), 1024, 1024),
    (two_layers, ("w", "v"), 4096, 1024),
    (rerun, ("w", "v"), 2048, 1024),
]


@pytest.mark.some(1)
@pytest.mark.parametrize(("loss", "names", "rows", "width"), CASES)
def test_a_strategy_costs_what_its_items_do_by_position(loss, names, rows, width):
    """No directly priced strategy is cheaper than the answer, whether collectives or compute dominate the model."""
    args = (weights(width, *names), S((rows, width), "float32"))
    traced, mesh = trace(loss, *args), mesh_from("2", 2)
    problem = SplitProblem.of(traced.graph, 2, None, "analytic", "adam", "parameters")
    priced = []
    every = list(itertools.product(*(configs(n, mesh) for n in problem.graph.nodes)))
    some = np.random.default_rng(0).permutation(len(every))[:150]
    for choice in (every[i] for i in some):
        chosen = {n.name: row for n, row in zip(problem.graph.nodes, choice, strict=True)}
        plan = plan_of(problem, chosen, mesh, "loss", traced)
        priced.append(step(problem, plan, mesh, chosen))
        assert plan.cost == pytest.approx(priced[-1], rel=1e-9)
        assert plan.cost + plan.hidden == pytest.approx(sum(n.cost.total for n in plan.nodes), rel=1e-9)
    options = {"devices": 2, "mesh": "2", "baselines": False, "memory_limit": None}
    plan = pase.compile(loss, *args, overlap="parameters", **options)
    assert "under cost model 'analytic', collectives of parameters hidden behind compute" in str(plan)
    additive = pase.compile(loss, *args, overlap="none", **options)
    assert "under cost model 'analytic', nothing hidden behind compute" in str(additive)
    assert plan.optimal
    assert plan.cost <= min(priced) * (1 + 1e-9)
    assert plan.cost <= additive.cost * (1 + 1e-9)


@pytest.mark.some(2)
@pytest.mark.parametrize("once", ["none", "gathers", "all"])
@pytest.mark.parametrize(("loss", "names", "rows", "width"), [CASES[1], CASES[4]])
def test_what_is_sent_once_has_one_micro_batch_beside_it(loss, names, rows, width, once):
    """The price equals the direct computation from the plan's collectives and the work of each op."""
    args = (weights(width, *names), S((rows, width), "float32"))
    traced, mesh = trace(loss, *args), mesh_from("2", 2)
    written = SplitProblem.of(traced.graph, 2, None, "analytic", "adam", "parameters")
    problem = written.varied(traced, Variant(accumulate=4, hoisted=once))
    every = list(itertools.product(*(configs(n, mesh) for n in problem.graph.nodes)))
    for i in np.random.default_rng(1).permutation(len(every))[:60]:
        chosen = {n.name: row for n, row in zip(problem.graph.nodes, every[i], strict=True)}
        plan = plan_of(problem, chosen, mesh, "loss", traced)
        assert plan.cost == pytest.approx(step(problem, plan, mesh, chosen), rel=1e-9)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("case", "waiting"),
    [(CASES[2], {"sums_alone": True}), (CASES[4], {"sums_alone": True, "lone_gather_bytes": 1 << 23})],
)
def test_what_the_compiler_runs_alone_is_waited_for(case, waiting):
    """These are sums of gradients, and gathers of parameters that are too small to be combined or hidden."""
    loss, names, rows, width = case
    args = (weights(width, *names), S((rows, width), "float32"))
    traced, mesh = trace(loss, *args), mesh_from("2", 2)
    both = [
        SplitProblem.of(traced.graph, 2, replace(load("h100x8"), **changed), "analytic", "adam", "parameters")
        for changed in (waiting, {})
    ]
    assert both[0].machine.digest != both[1].machine.digest == load("h100x8").digest
    every = list(itertools.product(*(configs(n, mesh) for n in both[0].graph.nodes)))
    longer = 0
    for i in np.random.default_rng(2).permutation(len(every))[:60]:
        chosen = {n.name: row for n, row in zip(both[0].graph.nodes, every[i], strict=True)}
        waits, hides = (plan_of(problem, chosen, mesh, "loss", traced) for problem in both)
        assert waits.cost == pytest.approx(step(both[0], waits, mesh, chosen), rel=1e-9)
        assert waits.cost >= hides.cost * (1 - 1e-9)
        longer += waits.cost > hides.cost * 1.001
    assert longer
