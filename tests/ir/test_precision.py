"""Products in fp8 as an option: which products, what they cost, and what a plan says about them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pase
from pase import costmodels, machine, zoo
from pase.errors import PaseError
from pase.frontends.jax.frontend import trace
from pase.ir import from_text, named, simplify, to_text
from pase.ir.precision import FP8, in_fp8
from pase.machine import mesh_from
from pase.plan.throughput import model_flops
from pase.questions.explain import explain
from pase.tables.build import build, work_price
from pase.tables.itemize import config_of
from pase.tables.work import node_work

S = jax.ShapeDtypeStruct
H100 = machine.load("h100x8")
MODEL = costmodels.get("analytic", H100)


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]).astype(jnp.float32) ** 2)


def wide(rows, width):
    weights = {"up": S((width, 4 * width), "bfloat16"), "down": S((4 * width, width), "bfloat16")}
    return weights, S((rows, width), "bfloat16")


def graph_of(rows=4096, width=2048):
    return named(simplify(trace(loss, *wide(rows, width)).graph))


def test_all_products_with_weights_but_the_last_run_in_fp8():
    m = zoo.get("llama3_8b", batch=2, seq=64, layers=2, attention="plain", remat=0)
    graph = in_fp8(named(simplify(trace(m.loss_fn, m.params, m.batch).graph)))
    products = {n.name: n.ops for n in graph.nodes if n.kind == "matmul"}
    turned = {k for k, ops in products.items() if any(op.product_dtype == FP8 for op in ops)}
    left = {k for k in products if k not in turned}
    assert turned and all(k.startswith("blocks.") for k in turned)
    assert "output:dot" in left and not any(k.startswith("blocks.") for k in left)  # scores are not weights
    assert from_text(to_text(graph)) == graph


def test_price_is_the_products_at_their_rate_and_what_scaling_moves():
    """Computed by hand for one device: three products at fp8's rate; operands and the result's gradient are read twice
    and written twice."""
    rows, width = 4096, 2048
    graph, mesh = graph_of(rows, width), mesh_from("1", 1)
    eighth = in_fp8(graph)
    plain, small = (sum(float(c.min()) for c in build(g, mesh, MODEL)[0].node_costs) for g in (graph, eighth))
    (up,) = (n for n in eighth.nodes if any(op.product_dtype for op in n.ops))
    cfg = np.full((1, 1), -1, dtype=np.int8)

    def seconds(g):
        return sum(
            w.times * float(np.ravel(work_price(w, MODEL))[0])
            for w in node_work(g, g.node[up.name], cfg, mesh)
        )

    assert plain - small == pytest.approx(seconds(graph) - seconds(eighth), rel=1e-9)
    casts = [w for w in node_work(eighth, up, cfg, mesh) if w.casts]
    elements = rows * width, width * 4 * width, rows * 4 * width
    assert sorted(float(w.nbytes[0]) for w in casts) == sorted(6.0 * e for e in elements)
    products = [w for w in node_work(eighth, up, cfg, mesh) if w.kind == "matmul"]
    assert {w.dtype for w in products} == {FP8} and len(products) == 2  # the input has no gradient
    assert small < plain


def test_of_a_recomputed_product_by_groups_half_the_casts_are_in_backward():
    """A third read, the ends of groups of rows, is not cast, and changes nothing for the other reads."""
    eighth = in_fp8(graph_of(64, 32))
    (up,) = (n for n in eighth.nodes if any(op.product_dtype for op in n.ops))
    ops = (
        replace(op, remat=True, reads=(*op.reads, op.reads[0])) if op.product_dtype else op for op in up.ops
    )
    grouped = replace(up, ops=tuple(ops))
    work = node_work(eighth, grouped, np.full((1, 1), -1, dtype=np.int8), mesh_from("1", 1))
    casts = [w for w in work if w.casts and w.phase == "forward"]
    assert len(casts) == 2 and all(w.recompute and w.times == 2 for w in casts)


def test_few_rows_make_casts_take_longer_than_products_save():
    few = (pase.compile(loss, *wide(64, 2048), devices=1, precision=p).cost for p in ("model", "fp8"))
    many = (pase.compile(loss, *wide(65536, 2048), devices=1, precision=p).cost for p in ("model", "fp8"))
    (plain, eighth), (plain_many, eighth_many) = few, many
    assert eighth > plain and eighth_many < plain_many


def test_a_plan_says_so_and_is_explained_alike(tmp_path):
    name = "zoo:gpt2?layers=2&batch=16&vocab=4096&dtype=bfloat16"
    plan = pase.compile(name, devices=4, mesh="4", precision="fp8", accumulate=2)
    assert plan.provenance["precision"] == "fp8" and any("fp8" in r for r in plan.remarks)
    assert plan.baselines and all(plan.cost <= c * (1 + 1e-9) for c in plan.baselines.values())
    assert plan.cost + plan.hidden == pytest.approx(sum(n.cost.total for n in plan.nodes), rel=1e-9)
    plan.save(tmp_path / "layout.json")
    again = explain(pase.load(tmp_path / "layout.json"), model=name, time_limit=0.1)
    assert again.problem is not None
    configs = {n.name: config_of(n, plan.strategy[n.name], plan.mesh) for n in again.problem.graph.nodes}
    assert again.problem.pricing.cost(plan.mesh, configs) == pytest.approx(plan.cost, rel=1e-9)


def test_utilisation_is_of_fp8_s_peak():
    graph = graph_of()
    by_dtype = dict.fromkeys(("bfloat16", FP8), 0.0)
    for dtype, flops in model_flops(in_fp8(graph)):
        by_dtype[dtype] += flops
    assert sum(by_dtype.values()) == sum(f for _, f in model_flops(graph))
    assert by_dtype[FP8] > 0 and by_dtype["bfloat16"] > 0


def test_a_machine_without_a_rate_is_refused():
    with pytest.raises(PaseError, match="'a100x8': it has no rate for fp8"):
        pase.compile(loss, *wide(64, 64), devices=2, machine="a100x8", precision="fp8")
    without = replace(H100, device=replace(H100.device, peak_flops={"bfloat16": 1e12}))
    with pytest.raises(PaseError, match=r"float8_e4m3fn in \[device.peak_flops\]"):
        pase.compile(loss, *wide(64, 64), devices=2, machine=without, precision="fp8")
    with pytest.raises(PaseError, match=r"precision: .*'int8'"):
        pase.compile(loss, *wide(64, 64), devices=2, precision="int8")
