"""The cost tables, which price classes in batches, agree with pricing each config and each pair separately."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pase import costmodels, machine, zoo
from pase.frontends.jax.frontend import trace
from pase.ir import Graph, named, simplify
from pase.machine import Mesh
from pase.search.check import cost_of
from pase.tables.build import build, charge_cost, config_space, phase_costs, work_cost
from pase.tables.charges import Charge, edge_charges, edge_flows, node_charges
from pase.tables.itemize import collectives, local_work, node_costs
from pase.tables.layouts import configs, read_states, write_states
from pase.tables.work import node_work

MACHINE = machine.load("h100x8")
MODEL = costmodels.get("analytic", MACHINE)


def graph(name: str) -> Graph:
    m = zoo.get(name)
    return named(simplify(trace(m.loss_fn, m.params, m.batch).graph))


@pytest.fixture(scope="module")
def unrolled() -> Graph:
    return graph("gpt2?scan=0&layers=6")


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
        want = want + charge_cost(node_charges(unrolled, n, cfg, mesh), MODEL, mesh)
        np.testing.assert_allclose(tables.node_costs[v], np.broadcast_to(want, len(cfg)), rtol=1e-12)
    edges = [e for e in unrolled.edges if sum((f.src, f.dst) == (e.src, e.dst) for f in unrolled.edges) == 1]
    for i in rng.choice(len(edges), 15, replace=False):
        e = edges[i]
        src, dst, tensor = unrolled.node[e.src], unrolled.node[e.dst], unrolled.tensors[e.tensor]
        u, v = at[e.src], at[e.dst]
        ks, kd = (rng.choice(len(space.configs[x]), 9) for x in (u, v))
        have = write_states(src, *src.write_of(e.tensor), tensor, space.configs[u][ks], mesh)
        want_rows = read_states(dst, e.op, e.access, tensor, space.configs[v][kd], mesh)
        want = charge_cost(edge_charges(unrolled, e, have, want_rows, mesh), MODEL, mesh)
        got = priced[u, v].dense()[np.ix_(ks, kd)] if (u, v) in priced else np.zeros((9, 9))
        np.testing.assert_allclose(got, np.broadcast_to(want, (9, 9)), rtol=1e-12, atol=1e-15)


def drawn(graph: Graph, mesh: Mesh, seed: int) -> dict[str, np.ndarray]:
    """A random strategy in which equal layers sometimes have equal configs: node -> int8 [axes]."""
    rng = np.random.default_rng(seed)
    return {
        n.name: cfg[min(int(rng.geometric(0.4)), len(cfg)) - 1]
        for n in graph.nodes
        for cfg in [configs(n, mesh)]
    }


@pytest.mark.parametrize("seed", range(3))
def test_a_strategys_collectives_are_the_rule(unrolled: Graph, seed: int) -> None:
    """Collectives that are priced once for equal nodes and edges equal those of each node and edge priced separately,
    under its own names. With the local work, they sum to the cost in the tables."""
    mesh = Mesh(names=("a", "b"), sizes=(4, 2))
    strategy = drawn(unrolled, mesh, seed)
    moved = collectives(unrolled, mesh, strategy, MODEL)
    want = []
    for n in unrolled.nodes:
        own: list[tuple[str, Charge]] = []
        for e in unrolled.edges:
            if e.dst == n.name:
                src, tensor = unrolled.node[e.src], unrolled.tensors[e.tensor]
                have = write_states(src, *src.write_of(e.tensor), tensor, strategy[e.src][None], mesh)
                wanted = read_states(n, e.op, e.access, tensor, strategy[n.name][None], mesh)
                own += [(e.src, c) for c in edge_charges(unrolled, e, have, wanted, mesh)]
        own += [(n.name, c) for c in node_charges(unrolled, n, strategy[n.name][None], mesh)]
        for source, c in own:
            if int(np.ravel(c.axes)[0]) and float(np.ravel(c.nbytes)[0]) and float(np.ravel(c.rounds)[0]):
                cost = float(np.ravel(charge_cost([c], MODEL, mesh))[0])
                want.append(
                    (c.kind, c.tensor, c.phase, n.name, source, round(float(np.ravel(c.nbytes)[0])), cost)
                )
    assert [(c.kind, c.tensor, c.phase, c.node, c.source, c.nbytes, c.cost) for c in moved] == want
    tables, space = build(unrolled, mesh, MODEL)
    total = sum(c.total for c in node_costs(local_work(unrolled, mesh, strategy, MODEL), moved).values())
    assert total == pytest.approx(cost_of(tables, space.index(strategy)), rel=1e-12)


def test_sums_of_gradients_in_eight_bits_are_those_of_the_product() -> None:
    """XLA sums the gradient of an fp8 operand in the dtype of the product's result, also through copies of it."""
    low = jnp.float8_e4m3fn

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        a, w = x.astype(low), params["v"].astype(low)
        y = jnp.dot(a, params["u"].astype(low), preferred_element_type=jnp.float32)
        z = jnp.dot(a, w, preferred_element_type=jnp.bfloat16)
        return jnp.mean((y + z + jnp.dot(a, w, preferred_element_type=jnp.float32)) ** 2)

    params = {k: jax.ShapeDtypeStruct((64, 64), "float32") for k in "uv"}
    eight = named(simplify(trace(loss, params, jax.ShapeDtypeStruct((32, 64), "float32")).graph))
    mesh, rng = Mesh(names=("a", "b"), sizes=(2, 2)), np.random.default_rng(0)
    tables, space = build(eight, mesh, MODEL)
    for _ in range(40):
        choice = np.array([rng.integers(len(cfg)) for cfg in space.configs])
        nodes = zip(eight.nodes, space.configs, choice, strict=True)
        strategy = {n.name: cfg[i] for n, cfg, i in nodes}
        work = local_work(eight, mesh, strategy, MODEL, "adam")
        listed = node_costs(work, collectives(eight, mesh, strategy, MODEL))
        np.testing.assert_allclose(cost_of(tables, choice), sum(c.total for c in listed.values()), rtol=1e-12)
    factors = {"copy": set(), "matmul": set()}
    for e in eight.edges:
        for f in edge_flows(eight, e):
            if eight.tensors[e.tensor].itemsize == 1 and f.back:
                factors[e.op.kind].add(f.sum_nbytes // f.nbytes)
    assert factors == {"copy": {4}, "matmul": {2, 4}}


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
