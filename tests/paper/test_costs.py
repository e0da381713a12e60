"""The formulas of the paper, computed independently."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.ir import AccessMap
from pase.paper import PROTOTYPE, LayerFlow, build
from pase.paper.costs import flow_cost
from tests.baselines.helpers import graph_of
from tests.paper.table2 import full, product_dims

R = 5000.0


def transfer(shape, a, b, times=1.0):
    nothing = AccessMap(())
    flow = LayerFlow(src="u", dst="v", shape=shape, written=nothing, read=nothing, times=times)
    return flow_cost(flow, np.array([a]), np.array([b]), PROTOTYPE)[0, 0] / R


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ((4, 1), (4, 1), 0),  # the same split
        ((1, 1), (4, 1), 2 * 16),  # sliced locally, but charged all the same (notes: fault 8)
        ((4, 1), (1, 1), 2 * (64 - 16)),  # gathered: the missing words, both ways
        ((4, 1), (1, 4), 2 * (16 - 4)),  # all-to-all: a quarter of the block is already there
        ((4, 1), (2, 2), 2 * (16 - 8)),
        ((2, 1), (4, 1), 2 * 16),  # more parts than at the writer: nothing counts as being there already
    ],
)
def test_edges_by_hand(a, b, words):
    assert transfer((8, 8), a, b) == words
    assert transfer((8, 8), a, b, times=3) == 3 * words


@given(st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 4))
def test_edges_cost_nothing_where_nothing_changes_and_never_less(splits):
    a, b = splits[:2], splits[2:]
    assert transfer((64, 64), a, a) == 0
    assert transfer((64, 64), a, b) >= 0


def test_products_by_hand():
    """A layer of b = 256, k = 1024, n = 4096 in every split over 8 devices: the three all-reduces of the notes."""
    tables, space = build(graph_of("mlp"), 8)
    v = next(i for i, n in enumerate(space.layers.nodes) if n in full(space.layers))
    node = space.layers.nodes[v]
    b, (out,), (into,) = product_dims(node)
    index = {d.name: i for i, d in enumerate(node.space)}
    assert len(space.configs[v]) == 20  # ways to place at most three factors of two on three dims
    for counts, cost in zip(space.configs[v], tables.node_costs[v], strict=True):
        pm, pn, pk = (int(counts[index[d]]) for d in (b, out, into))
        m, n, k = 256 / pm, 4096 / pn, 1024 / pk

        def all_reduce(words, ways):
            return R * 2 * (ways - 1) / ways * words

        want = 3 * m * n * k + all_reduce(m * n, pk) + all_reduce(m * k, pn) + all_reduce(n * k, pm)
        assert cost == pytest.approx(want, rel=1e-12)
