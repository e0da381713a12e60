"""Facts of a graph: equal nodes and edges of repeated layers have equal numbers, and only these."""

from __future__ import annotations

import numpy as np

from pase.ir import Graph
from pase.machine import Mesh
from pase.tables.build import build
from pase.tables.charges import edge_flows
from pase.tables.facts import facts
from pase.tables.layouts import configs
from tests.ir.graphs import simple
from tests.tables.graphs import MODEL


def test_repeated_layers_have_equal_numbers(unrolled: Graph) -> None:
    known = facts(unrolled)
    at = {n.name: v for v, n in enumerate(unrolled.nodes)}
    layers = [[at[n] for n in at if n.startswith(f"blocks.{i}.")] for i in (1, 2)]
    assert layers[0]
    for one, other in zip(*layers, strict=True):
        assert known.space[one] == known.space[other] and known.cost[one] == known.cost[other]
    edges = [
        {
            (mine.index(e.src), mine.index(e.dst), e.write, e.read, e.flows)
            for e in known.edges
            if {e.src, e.dst} <= {*mine}
        }
        for mine in layers
    ]
    assert edges[0] == edges[1] != set()


def test_equal_numbers_mean_equal_configs_and_equal_prices() -> None:
    graph, mesh = simple("gpt2"), Mesh(names=("a", "b"), sizes=(2, 2))
    known = facts(graph)
    tables, _ = build(graph, mesh, MODEL)
    spaces: dict[int, np.ndarray] = {}
    costs: dict[int, np.ndarray] = {}
    for v, n in enumerate(graph.nodes):
        own = configs(n, mesh)
        np.testing.assert_array_equal(spaces.setdefault(known.space[v], own), own)
        priced = tables.node_costs[v]
        np.testing.assert_allclose(costs.setdefault(known.cost[v], priced), priced, rtol=1e-12)
    assert 1 < len(costs) < len(graph.nodes)
    for e, of in zip(graph.edges, known.edges, strict=True):
        assert (graph.nodes[of.src].name, graph.nodes[of.dst].name) == (e.src, e.dst)
        assert known.flows[of.flows] == edge_flows(graph, e)
