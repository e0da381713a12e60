"""Padding of tiled memory, against arrays laid out in every order of dims, and its effect on prices."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase import costmodels, machine, zoo
from pase.frontends.jax.frontend import trace
from pase.ir import Graph, named, simplify
from pase.machine import Mesh
from pase.tables.build import array_tile, build, work_cost
from pase.tables.tiles import padding
from pase.tables.work import node_work

TPU = machine.load("tpu_v5e")
TILE = (8, 128)


def laid_out(shape: tuple[int, ...], tile: tuple[int, int]) -> int:
    """Elements that the array occupies in the smallest order of dims, found by trying every order."""
    best = math.inf
    for order in itertools.permutations(shape):
        *outer, rows, lanes = order
        step = tile[0]
        while step // 2 >= rows:
            step //= 2
        whole = math.ceil(rows / step) * step * math.ceil(lanes / tile[1]) * tile[1]
        best = min(best, math.prod(outer) * whole)
    return int(best)


@given(shape=st.lists(st.integers(1, 300), min_size=2, max_size=4))
def test_padding_is_that_of_the_best_order(shape: list[int]) -> None:
    got = padding([np.array([float(s)]) for s in shape], TILE)
    assert got[0] * math.prod(shape) == pytest.approx(laid_out(tuple(shape), TILE), rel=1e-9)


def test_an_array_of_one_dim_lies_densely() -> None:
    assert padding([np.array([197.0])], TILE).tolist() == [1.0]


def block(seq: int) -> Graph:
    m = zoo.get(f"bert_base?seq={seq}&layers=2&batch=32")
    return named(simplify(trace(m.loss_fn, m.params, m.batch).graph))


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


def untiled() -> machine.Machine:
    return dataclasses.replace(TPU, device=dataclasses.replace(TPU.device, memory_tile=()))


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
    want = work_cost(node_work(graph, n, cfg, mesh, "adam", TILE), model)
    np.testing.assert_allclose(tables.node_costs[v], np.broadcast_to(want, len(cfg)), rtol=1e-12)
