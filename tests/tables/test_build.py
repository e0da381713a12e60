"""The cost tables, which price classes in batches, agree with pricing each config and each pair separately."""

from __future__ import annotations

import numpy as np
import pytest

from pase import costmodels, machine
from pase.ir import Graph
from pase.machine import BUCKET_BYTES, Mesh
from pase.tables.build import (
    GRANULE_BYTES,
    build,
    charge_price,
    config_space,
    habits,
    phase_costs,
    work_cost,
)
from pase.tables.charges import Charge, edge_charges, node_charges
from pase.tables.layouts import (
    NOT_SPLIT,
    read_rule,
    state_index,
    write_rule,
)
from pase.tables.work import node_work
from tests.ir.graphs import simple
from tests.tables.graphs import CPU, HERE, MODEL, TPU, block, untiled


@pytest.mark.parametrize("sizes", [(8,), (4, 2), (2, 2, 2)])
def test_tables_are_the_rule(unrolled: Graph, sizes: tuple[int, ...]) -> None:
    mesh = Mesh(names=tuple("abc"[: len(sizes)]), sizes=sizes)
    tables, space = build(unrolled, mesh, MODEL)
    at = {n.name: v for v, n in enumerate(unrolled.nodes)}
    priced = {(e.src, e.dst): e for e in tables.edges}
    rng = np.random.default_rng(0)
    for v in rng.choice(len(unrolled.nodes), 12, replace=False):
        n, cfg = unrolled.nodes[v], space.configs[v]
        want = work_cost(node_work(unrolled, n, cfg, mesh), MODEL)
        want = want + sum(charge_price(c, MODEL, mesh) for c in node_charges(unrolled, n, cfg, mesh))
        np.testing.assert_allclose(tables.node_costs[v], np.broadcast_to(want, len(cfg)), rtol=1e-12)
    edges = [e for e in unrolled.edges if sum((f.src, f.dst) == (e.src, e.dst) for f in unrolled.edges) == 1]
    for i in rng.choice(len(edges), 15, replace=False):
        e = edges[i]
        src, dst = unrolled.node[e.src], unrolled.node[e.dst]
        u, v = at[e.src], at[e.dst]
        ks, kd = (rng.choice(len(space.configs[x]), 9) for x in (u, v))
        have = write_rule(src, *src.write_of(e.tensor)).states(space.configs[u][ks], mesh)
        want_rows = read_rule(dst, e.op, e.access).states(space.configs[v][kd], mesh)
        want = sum(charge_price(c, MODEL, mesh) for c in edge_charges(unrolled, e, have, want_rows, mesh))
        got = priced[u, v].dense()[np.ix_(ks, kd)] if (u, v) in priced else np.zeros((9, 9))
        np.testing.assert_allclose(got, np.broadcast_to(want, (9, 9)), rtol=1e-12, atol=1e-15)


def test_repeated_layers_share_their_arrays(unrolled: Graph) -> None:
    """The search finds repetition with ``is``: six layers share the arrays of one layer and its neighbours."""
    tables, space = build(unrolled, Mesh(names=("a", "b"), sizes=(4, 2)), MODEL)
    blocks = [n.name for n in unrolled.nodes if n.name.startswith("blocks.1.")]
    at = {n.name: v for v, n in enumerate(unrolled.nodes)}
    assert blocks
    for name in blocks:
        one, other = at[name], at[name.replace("blocks.1.", "blocks.2.")]
        assert tables.node_costs[one] is tables.node_costs[other]
        assert space.configs[one] is space.configs[other]
    first, second = (
        {(id(e.cost), id(e.src_class), id(e.dst_class)) for e in tables.edges if e.src in mine}
        for mine in ({at[b.replace("blocks.1.", f"blocks.{i}.")] for b in blocks} for i in (1, 2))
    )
    assert first == second
    distinct = {id(e.cost) for e in tables.edges}
    assert len(distinct) < len(tables.edges) / 3


def test_equal_nodes_may_keep_different_configs(unrolled: Graph) -> None:
    """A proof over meshes drops configs of each node separately. The rest are priced as before."""
    mesh, model = Mesh(names=("a", "b"), sizes=(2, 4)), costmodels.get("analytic", machine.load("h100x8"))
    space = config_space(unrolled, mesh, model)
    some = [cfg[v % 3 :: 3] if len(cfg) > 3 else cfg for v, cfg in enumerate(space)]
    whole, part = (phase_costs(unrolled, cfg, mesh, model, "adam") for cfg in (space, some))
    for v, cfg in enumerate(space):
        kept = slice(v % 3, None, 3) if len(cfg) > 3 else slice(None)
        np.testing.assert_array_equal(part[v].total, whole[v].total[kept])


def test_tables_price_what_is_padded() -> None:
    graph, mesh = block(197), Mesh(names=("a",), sizes=(8,))
    model = costmodels.get("analytic", TPU)
    tables, space = build(graph, mesh, model)
    dense, _ = build(graph, mesh, costmodels.get("analytic", untiled()))
    pairs = list(zip(tables.node_costs, dense.node_costs, strict=True))
    assert all((a >= b * (1 - 1e-12)).all() for a, b in pairs)
    assert any((a > 1.1 * b).any() for a, b in pairs)
    v = next(i for i, n in enumerate(graph.nodes) if n.name.endswith("attention.wq:dot"))
    n, cfg = graph.nodes[v], space.configs[v]
    want = work_cost(node_work(graph, n, cfg, mesh, "adam", habits(model)), model)
    np.testing.assert_allclose(tables.node_costs[v], np.broadcast_to(want, len(cfg)), rtol=1e-12)


@pytest.mark.parametrize("model", ["mlp", "gpt2"])
def test_every_config_of_a_parameter_costs_what_its_parts_do(model: str) -> None:
    """Independent prices on one axis, which also splits the batch: replicated, stored split, or only its state
    split."""
    graph, mesh = simple(model), Mesh(names=("a",), sizes=(8,))
    tables, space = build(graph, mesh, MODEL)
    at = {n.name: v for v, n in enumerate(graph.nodes)}
    checked = 0

    def seconds(kind: str, nbytes: float) -> float:
        def one(n: float) -> float:
            return float(MODEL.collective(kind, mesh, np.array([1]), np.array([n]))[0])

        sent = max(nbytes, 8 * GRANULE_BYTES)  # each device's shard is padded to whole granules
        return one(nbytes) if sent >= BUCKET_BYTES else one(BUCKET_BYTES) * sent / BUCKET_BYTES

    for e in graph.edges:
        src, dst = graph.node[e.src], graph.node[e.dst]
        rows = [t for t in tables.edges if (t.src, t.dst) == (at[e.src], at[e.dst])]
        if src.kind != "parameter" or dst.kind != "matmul" or len(rows) != 1 or not state_index(src):
            continue
        tensor, op = graph.tensors[e.tensor], e.op
        batch = next(i for i, d in enumerate(dst.space) if d.name == "b")
        j = int(np.flatnonzero(space.configs[at[e.dst]][:, 0] == batch)[0])
        dense, nbytes, times = rows[0].dense()[:, j], float(tensor.nbytes), float(op.times)
        for i, (c,) in enumerate(space.configs[at[e.src]]):
            reduce = "all_reduce" if c == NOT_SPLIT else "reduce_scatter"
            want = times * seconds(reduce, nbytes)
            if c != NOT_SPLIT and c != state_index(src)[0]:
                want += times * (2 if e.access.recompute else 1) * seconds("all_gather", nbytes)
            assert dense[i] == pytest.approx(want, rel=1e-9)
        vector, (s,) = tables.node_costs[at[e.src]], state_index(src)
        whole = float(graph.tensors[src.ops[0].writes[0].tensor].nbytes)
        by = {int(c): float(v) for (c,), v in zip(space.configs[at[e.src]], vector, strict=True)}
        # The update of an eighth, and the casts of the whole parameter.
        casts = by[s] - seconds("all_gather", whole)
        assert casts < by[NOT_SPLIT]
        checked += 1
    assert checked > 1


def test_without_buckets_a_small_collective_pays_its_own_latency() -> None:
    mesh = Mesh(names=("a",), sizes=(8,))
    small = Charge(
        kind="all_reduce",
        axes=np.array([1]),
        nbytes=np.array([4096.0]),
        tensor="w",
        phase="backward",
        times=3.0,
        bucketed=True,
    )
    models = [costmodels.get("analytic", m) for m in (HERE, CPU)]
    shared, alone = (float(charge_price(small, m, mesh)[0]) for m in models)
    assert alone == pytest.approx(3 * float(models[1].collective("all_reduce", mesh, [1], [4096.0])[0]))
    assert shared < alone / 5


def test_no_gradient_waits_for_another_reader() -> None:
    graph, mesh = simple("gpt2"), Mesh(names=("a", "b"), sizes=(2, 2))
    found = {}
    for m in (HERE, CPU):
        _, space = build(graph, mesh, costmodels.get("analytic", m))
        found[m] = sum(
            int(np.isin(c, [i for i, d in enumerate(n.space) if d.kind == "pending"]).any(axis=1).sum())
            for n, c in zip(graph.nodes, space.configs, strict=True)
        )
    assert found[HERE] > 0 == found[CPU]
