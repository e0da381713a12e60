"""Items of a strategy: priced once for equal nodes, they equal those of each node priced alone."""

from __future__ import annotations

import numpy as np
import pytest

from pase.ir import Graph
from pase.machine import Mesh
from pase.search.check import cost_of
from pase.tables.build import build, charge_price
from pase.tables.charges import Charge, edge_charges, node_charges
from pase.tables.itemize import collectives, local_work, node_costs
from pase.tables.layouts import configs, read_rule, write_rule
from tests.tables.graphs import MODEL


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
                src = unrolled.node[e.src]
                have = write_rule(src, *src.write_of(e.tensor)).states(strategy[e.src][None], mesh)
                wanted = read_rule(n, e.op, e.access).states(strategy[n.name][None], mesh)
                own += [(e.src, c) for c in edge_charges(unrolled, e, have, wanted, mesh)]
        own += [(n.name, c) for c in node_charges(unrolled, n, strategy[n.name][None], mesh)]
        for source, c in own:
            if int(np.ravel(c.axes)[0]) and float(np.ravel(c.nbytes)[0]) and float(np.ravel(c.rounds)[0]):
                cost = float(np.ravel(charge_price(c, MODEL, mesh))[0])
                want.append(
                    (c.kind, c.tensor, c.phase, n.name, source, round(float(np.ravel(c.nbytes)[0])), cost)
                )
    assert [(c.kind, c.tensor, c.phase, c.node, c.source, c.nbytes, c.cost) for c in moved] == want
    tables, space = build(unrolled, mesh, MODEL)
    total = sum(c.total for c in node_costs(local_work(unrolled, mesh, strategy, MODEL), moved).values())
    assert total == pytest.approx(cost_of(tables, space.index(strategy)), rel=1e-12)
