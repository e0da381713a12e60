"""The local work of a node: products over padded tokens take longer."""

from __future__ import annotations

import numpy as np
import pytest

from pase import costmodels, machine
from pase.ir import Graph
from pase.machine import Mesh
from pase.tables.build import array_tile, work_cost
from pase.tables.work import node_work
from tests.tables.graphs import TPU, block, untiled


def priced(graph: Graph, of: machine.Machine) -> dict[str, float]:
    model = costmodels.get("analytic", of)
    cfg = {n.name: np.full((1, 1), -1, dtype=np.int8) for n in graph.nodes}
    mesh = Mesh(names=("a",), sizes=(1,))
    return {
        n.name: float(
            np.ravel(work_cost(node_work(graph, n, cfg[n.name], mesh, "adam", array_tile(model)), model))[0]
        )
        for n in graph.nodes
    }


@pytest.mark.parametrize(("seq", "factor"), [(128, 1.0), (197, 256 / 197)])
def test_queries_are_made_over_padded_tokens(seq: int, factor: float) -> None:
    """A head of 64 puts the tokens along the lanes, so the products that make queries, keys and values work on padded
    tokens. The products of the feed-forward layer have other dims along the lanes."""
    graph = block(seq)
    tiled, dense = priced(graph, TPU), priced(graph, untiled())
    (query,) = (n for n in tiled if n.endswith("attention.wq:dot"))
    assert tiled[query] / dense[query] == pytest.approx(factor, rel=0.02)
    (up,) = (n for n in tiled if n.endswith("ff.w1:dot"))
    assert tiled[up] / dense[up] == pytest.approx(1.0, rel=0.02)
