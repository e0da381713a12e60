"""Repeated blocks are eliminated once, and folded runs of blocks cost what unfolded ones do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pase.search import (
    cost_of,
    find_best_strategy,
    solve,
    verify,
)
from pase.search.elimination.repeat import fold
from pase.tables.types import CostTables, EdgeTable
from tests.search.answers import answer
from tests.search.random_instances import chain_of_blocks


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 33])
def test_repeated_blocks_are_eliminated_once(layers: int) -> None:
    tables = chain_of_blocks(np.random.default_rng(layers), layers)
    alike = solve(tables)
    unlike = CostTables(  # the same costs, in arrays of which no two are one
        node_costs=tuple(c.copy() for c in tables.node_costs),
        edges=tuple(
            EdgeTable(
                src=e.src,
                dst=e.dst,
                cost=e.cost.copy(),
                src_class=e.src_class.copy(),
                dst_class=e.dst_class.copy(),
            )
            for e in tables.edges
        ),
    )
    assert verify(tables, alike) == verify(unlike, solve(unlike))


def test_folded_runs_of_blocks_cost_what_unfolded_ones_do() -> None:
    """Random blocks in a row between random nodes before and after, with and without forbidden pairs."""
    folds = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        tables = blocks_in_a_row(rng, layers=int(rng.integers(8, 20)))
        want = answer(find_best_strategy, tables)
        if want is None:
            assert answer(solve, tables) is None
            continue
        folded = fold(tables, "numpy")
        if folded is None:
            continue
        folds += 1
        assert len(folded.tables.node_costs) < len(tables.node_costs)
        small = find_best_strategy(folded.tables)
        assert small.cost == want, seed
        assert cost_of(tables, folded.expand(small.choice)) == want, seed
    assert folds > 60


def test_blocks_whose_parameters_stand_first_are_folded_too() -> None:
    """Traced programs list all parameters first, followed by the layers that read them."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        layers, block = int(rng.integers(12, 17)), 4
        chain = chain_of_blocks(rng, layers, block=block)
        own = rng.integers(0, 1000, 3).astype(np.float64)
        matrix = rng.integers(0, 1000, (3, 5)).astype(np.float64)
        few, many = np.arange(3, dtype=np.int32), np.arange(5, dtype=np.int32)
        at = int(rng.integers(block))
        reads = [
            EdgeTable(src=k, dst=layers + k * block + at, cost=matrix, src_class=few, dst_class=many)
            for k in range(layers)
        ]
        moved = [replace(e, src=e.src + layers, dst=e.dst + layers) for e in chain.edges]
        tables = CostTables(node_costs=(own,) * layers + chain.node_costs, edges=(*reads, *moved))
        folded = fold(tables, "numpy")
        assert folded is not None and len(folded.tables.node_costs) < 5 * block, seed
        want = find_best_strategy(tables).cost
        small = find_best_strategy(folded.tables)
        assert small.cost == want == cost_of(tables, folded.expand(small.choice)), seed
        assert sorted(folded.nodes.tolist()) == np.unique(folded.nodes).tolist(), seed


def test_solve_folds_a_long_model() -> None:
    tables = blocks_in_a_row(np.random.default_rng(3), layers=200, forbid=0.0)
    found = solve(tables)
    assert found.method == "elimination, repeated blocks folded"
    assert verify(tables, found) == find_best_strategy(tables).cost
    assert (
        found.work
        < 30 * find_best_strategy(blocks_in_a_row(np.random.default_rng(3), layers=8, forbid=0.0)).work
    )


def blocks_in_a_row(rng: np.random.Generator, layers: int, forbid: float = 0.05) -> CostTables:
    """A prefix, ``layers`` equal blocks that are connected through one node each, and a suffix."""
    block, sizes = int(rng.integers(1, 6)), rng.integers(1, 5, 8)
    speaker = int(rng.integers(block))

    def costs(*shape: int) -> np.ndarray:
        c = rng.integers(0, 100, shape).astype(float)
        c[rng.random(shape) < forbid] = np.inf
        return c

    def edge_parts(a: int, b: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ca, cb = (int(x) for x in rng.integers(1, 4, 2))
        return (
            costs(ca, cb),
            rng.integers(0, ca, sizes[a]).astype(np.int32),
            rng.integers(0, cb, sizes[b]).astype(np.int32),
        )

    node = [costs(int(sizes[j])) for j in range(block)]
    inner = [(i, j, *edge_parts(i, j)) for j in range(block) for i in range(j) if rng.random() < 0.7]
    link = [(j, *edge_parts(speaker, j)) for j in range(block) if j == 0 or rng.random() < 0.5]
    before = int(rng.integers(0, 3))
    nodes = [costs(2) for _ in range(before)]
    edges = []

    def add(src: int, dst: int, cost: np.ndarray, src_class: np.ndarray, dst_class: np.ndarray) -> None:
        edges.append(EdgeTable(src=src, dst=dst, cost=cost, src_class=src_class, dst_class=dst_class))

    for k in range(layers):
        at = before + k * block
        nodes += node
        for i, j, *parts in inner:
            add(at + i, at + j, *parts)
        for j, *parts in link:
            if k:
                add(at - block + speaker, at + j, *parts)
    after = len(nodes)
    nodes += [costs(3)]
    for u in range(before):
        small = np.arange(2, dtype=np.int32)
        own = np.zeros(sizes[0], np.int32)
        add(u, before, costs(2, 1), small, own)
    add(
        after - block + speaker,
        after,
        costs(int(sizes[speaker]), 3),
        np.arange(sizes[speaker], dtype=np.int32),
        np.arange(3, dtype=np.int32),
    )
    return CostTables(node_costs=tuple(nodes), edges=tuple(edges))
