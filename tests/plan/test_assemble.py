"""A plan's items add up to the price from the tables, and its parts agree with one another."""

import re

import numpy as np
import pytest

import pase
from pase import zoo
from pase.plan.answer import mesh_text
from pase.plan.table import as_text, bytes_text, cost_text

MODELS = ["mlp", "gpt2?layers=2", "alexnet", "rnnlm", "mixtral_8x7b"]


@pytest.fixture(scope="module", params=MODELS)
def plan(request):
    return pase.compile(f"zoo:{request.param}", devices=8)


@pytest.mark.some(3)
def test_items_sum_to_the_searched_cost(plan):
    """Each second of the cost is in some node's compute, update or communication, which also include what is hidden."""
    assert sum(n.cost.total for n in plan.nodes) == pytest.approx(plan.cost + plan.hidden, rel=1e-9)
    assert sum(c.cost for c in plan.collectives) == pytest.approx(plan.communication, rel=1e-9)


def test_never_worse_than_any_baseline(plan):
    assert plan.optimal
    assert plan.baselines or plan.skipped
    assert all(plan.cost <= cost * (1 + 1e-12) for cost in plan.baselines.values())


def test_every_parameter_is_there_once_with_its_shape(plan):
    import jax

    m = zoo.get(plan.model.removeprefix("zoo:"))
    leaves = jax.tree_util.tree_flatten_with_path(m.params)[0]
    shapes = {jax.tree_util.keystr(k, simple=True, separator="."): v.shape for k, v in leaves}
    assert {k: t.shape for k, t in plan.parameters.items()} == shapes


def test_memory_of_parameters_is_what_the_storage_says(plan):
    sizes = dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    total = 0.0
    for t in plan.parameters.values():
        ways = 1
        for axes in t.storage:
            for a in axes:
                ways *= sizes[a]
        elements = 1
        for s in t.shape:
            elements *= s
        total += elements / ways * {"float32": 4, "bfloat16": 2}[t.dtype]
    assert plan.memory.parameters == pytest.approx(total, abs=len(plan.parameters))


def test_collectives_name_real_axes_and_nodes(plan):
    nodes = {n.name for n in plan.nodes}
    for c in plan.collectives:
        assert set(c.axes) <= set(plan.mesh.names)
        assert c.axes
        assert c.node in nodes
        assert c.nbytes > 0


def test_the_text_shows_the_mesh_the_step_and_every_matmul(plan):
    text = as_text(plan, every_layer=True)
    assert f"mesh   {mesh_text(plan.mesh)}" in text
    assert cost_text(plan.cost, plan.unit) in text
    assert bytes_text(plan.memory.total) in text
    for n in plan.nodes:
        if n.op in ("matmul", "conv"):  # equal layers have one row
            alike = re.sub(r"(?<=\.)\d+(?=\.)", "*", re.sub(r"~\d+$", "", n.name))
            assert n.name in text or alike in text


def test_one_device_needs_no_collectives():
    plan = pase.compile("zoo:mlp", devices=1)
    assert not plan.collectives
    assert plan.communication == 0


def test_axes_are_named_by_what_they_split_in_most_of_the_work():
    """Three of five products split the batch, but those with nearly all FLOPs split their columns and rows."""
    import jax

    from pase.compiler.problem.problem import SplitProblem
    from pase.frontends.jax.frontend import trace
    from pase.machine import Mesh
    from pase.plan.assemble import axes_by_use

    def loss(w, x):
        y = sum((x * 2.0 + k) @ w["small"] for k in range(3)).sum()
        return y + (x @ w["wide"] @ w["back"]).sum()

    shapes = {"small": (1024, 8), "wide": (1024, 65536), "back": (65536, 64)}
    w = {k: jax.ShapeDtypeStruct(s, "bfloat16") for k, s in shapes.items()}
    traced = trace(loss, w, jax.ShapeDtypeStruct((64, 1024), "bfloat16"))
    graph = SplitProblem.of(traced.graph, 8, "h100x8", "analytic", "adam").graph
    configs = {}
    for n in graph.nodes:
        dims = [d.name for d in n.space]
        wide = [d.name for d in n.space if d.size == 65536]
        at = dims.index(wide[0]) if wide else dims.index("b") if "b" in dims else -1
        configs[n.name] = np.array([at], np.int8)
    assert sum(n.kind == "matmul" and "b" in [d.name for d in n.space] for n in graph.nodes) >= 5
    assert axes_by_use(graph, Mesh(names=("x",), sizes=(8,)), configs).names == ("model",)
