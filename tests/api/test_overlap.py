"""Gradient synchronisation behind backward: against enumeration with the items' own prices."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pase
from pase.compiler.plans import plan_of
from pase.compiler.problem import SplitProblem
from pase.errors import PaseError
from pase.frontends.from_jax import trace
from pase.machine import mesh_from
from pase.tables.layouts import configs
from pase.tables.work import node_work

S = jax.ShapeDtypeStruct


def loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)


def exposed(problem, plan, mesh, chosen):
    """C + max(0, S - V), from the plan's list of collectives and the nodes' work."""
    parameters = {n.name for n in problem.graph.nodes if n.kind == "parameter"}
    sync = sum(c.cost for c in plan.collectives if c.phase == "backward" and c.source in parameters)
    behind = sum(
        w.times * float(np.ravel(problem.model.compute(w.kind, w.dtype, w.flops, w.nbytes, mnk=w.mnk))[0])
        for n in problem.graph.nodes
        for w in node_work(problem.graph, n, chosen[n.name][None, :], mesh)
        if w.phase == "backward"
    )
    return sum(n.cost.total for n in plan.nodes) - min(sync, behind)


@pytest.mark.parametrize(("rows", "width"), [(64, 4096), (4096, 256), (1024, 1024), (512, 2048), (2048, 512)])
def test_nothing_is_cheaper_than_the_bound_and_the_answer_is_near(rows, width):
    """Every strategy priced by hand; from models that gradients rule to models that compute does."""
    args = ({"w": S((width, width), "float32")}, S((rows, width), "float32"))
    traced, mesh = trace(loss, *args), mesh_from("2", 2)
    problem = SplitProblem.of(traced.graph, 2, None, "analytic", "adam")
    cheapest = np.inf
    for choice in itertools.product(*(configs(n, mesh) for n in problem.graph.nodes)):
        chosen = {n.name: row for n, row in zip(problem.graph.nodes, choice, strict=True)}
        plan = plan_of(problem, chosen, mesh, "loss", traced)
        cheapest = min(cheapest, exposed(problem, plan, mesh, chosen))
    plan = pase.compile(loss, *args, devices=2, mesh="2", overlap="gradients")
    assert "under cost model 'analytic', sums of gradients hidden behind backward's compute" in str(plan)
    additive = pase.compile(loss, *args, devices=2, mesh="2")
    assert "under cost model 'analytic', nothing hidden behind compute" in str(additive)
    assert plan.bound <= cheapest * (1 + 1e-9)
    assert cheapest * (1 - 1e-9) <= plan.cost <= additive.cost * (1 + 1e-9)
    assert plan.cost <= cheapest * 1.02
    assert not plan.optimal or plan.cost == pytest.approx(cheapest, rel=1e-9)
    assert plan.cost + plan.hidden == pytest.approx(sum(n.cost.total for n in plan.nodes), rel=1e-9)


@pytest.mark.parametrize("model", ["mlp", "alexnet", "gpt2?layers=2", "transformer?batch=64"])
def test_never_worse_than_a_baseline_priced_alike(model):
    plan = pase.compile(f"zoo:{model}", devices=8, mesh="2x4", overlap="gradients")
    additive = pase.compile(f"zoo:{model}", devices=8, mesh="2x4")
    assert plan.bound <= plan.cost <= additive.cost * (1 + 1e-9)
    assert plan.cost - plan.bound <= 0.01 * plan.cost
    assert all(plan.cost <= c * (1 + 1e-12) for c in plan.baselines.values())
    assert all(plan.baselines[k] <= c * (1 + 1e-12) for k, c in additive.baselines.items())


def test_what_cannot_be_asked_for():
    with pytest.raises(PaseError, match="overlap is 'none' or 'gradients', not 'all'"):
        pase.compile("zoo:mlp", devices=2, overlap="all")


def test_a_memory_limit_holds_with_overlap_too():
    """The answer fits and hides gradients, and is what the limit's absence finds where it does not bind."""
    options = {"devices": 8, "mesh": "2x4", "overlap": "gradients"}
    free = pase.compile("zoo:gpt2?layers=2&batch=32", **options)
    same = pase.compile("zoo:gpt2?layers=2&batch=32", memory_limit=free.memory.total, **options)
    assert same.cost == pytest.approx(free.cost, rel=1e-9)
    limit = 0.6 * free.memory.total
    tight = pase.compile("zoo:gpt2?layers=2&batch=32", memory_limit=limit, **options)
    additive = pase.compile("zoo:gpt2?layers=2&batch=32", memory_limit=limit, devices=8, mesh="2x4")
    assert tight.memory.total <= limit
    assert free.cost <= tight.cost <= additive.cost * (1 + 1e-9)
    assert tight.bound <= tight.cost
