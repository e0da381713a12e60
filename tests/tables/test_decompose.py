"""Decomposed gathers and scatters: against a hop-by-hop simulation, item by item, and in plans."""

from __future__ import annotations

import numpy as np
import pytest

import pase
from pase import costmodels, machine, zoo
from pase.errors import PaseError
from pase.frontends.jax.frontend import trace
from pase.ir import Graph, named, simplify
from pase.machine import CollectiveKind, Mesh, mesh_from
from pase.questions.explain import explain
from pase.search.check import cost_of
from pase.tables.build import build
from pase.tables.decompose import (
    DecomposedProduct,
    decomposed,
    decomposed_times,
    made_by,
    read_by,
    slowed,
    sums_apart,
)
from pase.tables.itemize import collectives, local_work, node_costs
from pase.tables.layouts import configs, read_rule, write_rule

MODEL = costmodels.get("analytic", machine.load("h100x8"))
LLAMA = "llama3_8b?layers=2&batch=8&seq=2048&attention=fused"
MESHES = [Mesh(names=("a",), sizes=(8,)), Mesh(names=("a", "b"), sizes=(2, 4))]


@pytest.fixture(scope="module")
def written() -> Graph:
    m = zoo.get(LLAMA)
    return named(simplify(trace(m.loss_fn, m.params, m.batch).graph))


@pytest.fixture(scope="module")
def apart(written: Graph) -> Graph:
    return decomposed(written)


def simulated(n: int, piece: float, added: float, hop: float, slow: float) -> float:
    """Simulate compute and a link, hop by hop. While the link is busy, compute has the rest of the device.

    added: the work to read and add what has arrived.
    """
    now = 0.0
    for _ in range(n - 1):
        done = hop * (1 - slow)
        now += hop + max(piece + added - done, 0.0)
    return now + piece


@pytest.mark.parametrize("rows", [256, 4096, 65536])
@pytest.mark.parametrize("ways", [2, 8])
@pytest.mark.parametrize(
    ("kind", "back"),
    [("all_gather", False), ("all_gather", True), ("reduce_scatter", False), ("reduce_scatter", True)],
)
def test_the_price_is_that_of_pieces_hop_by_hop(
    rows: int, ways: int, kind: CollectiveKind, back: bool
) -> None:
    mesh = mesh_from(str(ways), ways)
    p = DecomposedProduct(
        rows=rows, columns=8192, depth=4096, dtype="bfloat16", read_bytes=2, weight_bytes=2, made_bytes=2
    )
    made = (kind == "all_gather") == back  # the collective is next to the tensor's producer
    whole = 2.0 * rows * (8192 if made else 4096)
    got = float(decomposed_times((p,), kind, back, np.array(1), np.array(whole), whole, mesh, MODEL))
    n, k = (8192, 4096 / ways) if made else (8192 / ways, 4096)

    def product(m: float) -> float:
        nbytes, mnk = 2.0 * (m * k + k * n + m * n), (m, k, n) if back else (m, n, k)
        return float(MODEL.compute("matmul", "bfloat16", 2.0 * m * n * k, nbytes, mnk=mnk))

    hop = float(MODEL.collective("permute", mesh, 1, whole / ways))
    slow = slowed(MODEL.machine)
    added = 0.0
    if kind == "reduce_scatter":
        added = float(MODEL.compute("memory", "bfloat16", 0.0, 3 * whole / ways))
    want = simulated(ways, product(rows / ways), added, hop, slow) - product(rows)
    assert got == pytest.approx(max(want, 0.0), rel=1e-9)


@pytest.mark.some(1)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_tables_are_the_items(written: Graph, apart: Graph, mesh: Mesh) -> None:
    """Tables equal the sum of items. No strategy costs more than without decomposition, and some cost less."""
    tables, space = build(apart, mesh, MODEL)
    waited, _ = build(written, mesh, MODEL)
    rng, less = np.random.default_rng(0), 0
    for _ in range(40):
        choice = np.array([rng.integers(len(c)) for c in space.configs])
        strategy = {
            n.name: space.configs[v][k] for v, (n, k) in enumerate(zip(apart.nodes, choice, strict=True))
        }
        moved = collectives(apart, mesh, strategy, MODEL)
        items = node_costs(local_work(apart, mesh, strategy, MODEL), moved)
        cost = cost_of(tables, choice)
        assert cost == pytest.approx(sum(c.total for c in items.values()), rel=1e-9)
        whole = cost_of(waited, choice)
        assert cost <= whole * (1 + 1e-12)
        less += cost < whole * (1 - 1e-6)
    assert less > 0


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_no_product_has_two_collectives_beside_it(apart: Graph, mesh: Mesh) -> None:
    """If the scatter of a product's result may overlap with it, none of its operands can have been gathered."""
    checked = 0
    for e in apart.edges:
        found = made_by(apart, e)
        if not found:
            continue
        node = apart.node[e.src]
        op, write = node.write_of(e.tensor)
        cfg = configs(node, mesh)
        wrote = write_rule(node, op, write).states(cfg, mesh)
        free = sums_apart(found[0], wrote, mesh)
        for a in op.reads:
            if apart.producer[a.tensor].kind == "parameter":
                continue
            read = read_rule(node, op, a).states(cfg, mesh)
            assert not ((read < 0).any(axis=1) & free).any()
            checked += int(free.sum())
    assert checked


def test_which_products_are_taken_apart(apart: Graph, written: Graph) -> None:
    """q, k and v share a copy, and so do gate and up; products without a weight are never decomposed."""
    shared = [len(read_by(apart, e)) for e in apart.edges if apart.node[e.dst].kind == "copy"]
    assert {2, 3} <= set(shared)
    assert not any(read_by(written, e) or made_by(written, e) for e in written.edges)
    for e in apart.edges:
        for p in (*read_by(apart, e), *made_by(apart, e)):
            assert p.rows == 8 * 2048


def test_a_plan_says_who_has_to_take_them_apart() -> None:
    options = {"devices": 8, "mesh": "8", "memory_limit": "24GiB", "remat": "none", "accumulate": 1}
    waited = pase.compile(f"zoo:{LLAMA}", **options)
    plan = pase.compile(f"zoo:{LLAMA}", decompose="products", **options)
    assert plan.bound <= plan.cost <= waited.cost * (1 + 1e-9)
    said = [any("decompose" in r.what for r in p.noted) for p in (plan, waited)]
    assert said == [True, False]
    assert all(plan.cost <= c * (1 + 1e-9) for c in plan.baselines.values())
    name = (
        "megatron_sp"
        if "megatron_sp" in plan.baselines
        else next(k for k in plan.baselines if "megatron" in k)
    )
    assert plan.baselines[name] <= waited.baselines[name]
    node = next(n.name for n in plan.nodes if n.cost.communication > 0)
    assert explain(plan, node)
    with pytest.warns(UserWarning, match="xla_gpu_threshold_for_windowed_einsum_mib"):
        assert plan.jax


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(PaseError, match="'all'"):
        pase.compile("zoo:mlp", devices=2, decompose="all")
    with pytest.raises(PaseError, match="overlap"):
        pase.compile("zoo:mlp", devices=2, decompose="products", overlap="none")
    with pytest.raises(PaseError, match="'cpu_host'"):
        pase.compile("zoo:mlp", devices=2, machine="cpu_host", decompose="products")
