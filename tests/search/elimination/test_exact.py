"""Elimination against brute force, and the numba kernels against their numpy counterparts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import Infeasible
from pase.search import (
    Solution,
    brute_force,
    cost_of,
    dependent_sets,
    find_best_strategy,
    generate_seq,
    solve,
    verify,
)
from pase.search.elimination import eliminate, kernels_numpy
from pase.search.elimination.factors import Pool
from pase.search.elimination.repeat import fold
from pase.search.registry import SEARCHES, SearchOptions
from pase.tables.types import CostTables, EdgeTable
from tests.search.random_instances import chain_of_blocks, random_tables


def answer(f: Callable[[CostTables], Solution], tables: CostTables) -> float | None:
    try:
        s = f(tables)
    except Infeasible:
        return None
    verify(tables, s)
    return s.cost


@pytest.mark.parametrize("block", range(4))
def test_solve_is_brute_force(block: int) -> None:
    for seed in range(block * 2500, block * 2500 + 2500):
        tables = random_tables(np.random.default_rng(seed))
        want = answer(brute_force, tables)
        assert answer(solve, tables) == want, seed


@pytest.mark.parametrize("name", SEARCHES)
def test_every_search_is_brute_force(name: str) -> None:
    for seed in range(500 if name == "paper" else 100):
        tables = random_tables(np.random.default_rng(seed))
        found = answer(lambda t: SEARCHES[name].run(t, None, SearchOptions(time_limit=20.0)), tables)
        assert found == answer(brute_force, tables), seed


@pytest.mark.parametrize("cells", [1, 5, 30])
def test_tables_made_in_parts_are_brute_force(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on the size of the parts in which a table is computed."""
    monkeypatch.setattr(eliminate, "_SIDE", cells)
    monkeypatch.setattr(eliminate, "_PRODUCTS", cells)
    for seed in range(300):
        tables = random_tables(np.random.default_rng(seed))
        want = answer(brute_force, tables)
        assert answer(lambda t: find_best_strategy(t, kernel="numpy"), tables) == want, seed


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_any_order_gives_the_same_cost(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = random_tables(rng)
    order = tuple(int(v) for v in rng.permutation(len(tables.node_costs)))
    assert answer(lambda t: find_best_strategy(t, order), tables) == answer(solve, tables)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_theorem_2_dependent_sets(seed: int) -> None:
    """Theorem 2: D(i) is the set of later nodes adjacent to the component of v_i among the first i nodes."""
    tables = random_tables(np.random.default_rng(seed))
    order = generate_seq(tables)
    near: list[set[int]] = [set() for _ in tables.node_costs]
    for e in tables.edges:
        near[e.src].add(e.dst)
        near[e.dst].add(e.src)
    for i, depend in enumerate(dependent_sets(tables, order)):
        early, component, todo = set(order[:i]), {order[i]}, [order[i]]
        while todo:
            for u in near[todo.pop()] & early - component:
                component.add(u)
                todo.append(u)
        assert depend == set().union(*(near[u] for u in component)) - component - early


def test_numba_is_numpy() -> None:
    from pase.search.elimination import kernels_numba

    rng = np.random.default_rng(0)
    for _ in range(200):
        c, x, p, q = (int(i) for i in rng.integers(1, 12, 4))
        left = rng.integers(0, 99, (c, x, p)).astype(float)
        right = rng.integers(0, 99, (c, x, q)).astype(float)
        left[rng.random(left.shape) < 0.2] = np.inf
        want = kernels_numpy.min_plus(left, right)
        np.testing.assert_array_equal(kernels_numba.min_plus(left, right), want)
        k = int(rng.integers(x, 30))
        segment = np.concatenate([np.arange(x), rng.integers(0, x, k - x)]).astype(np.int32)
        base = rng.integers(0, 9, k).astype(float)
        parts = [
            (rng.integers(0, r, k).astype(np.int32), rng.integers(0, 9, (r, q)).astype(float)) for r in (c, p)
        ]
        for some in (parts[:1], parts):
            np.testing.assert_array_equal(
                kernels_numba.segment_min(base, segment, x, some),
                kernels_numpy.segment_min(base, segment, x, some),
            )
        matrix = rng.integers(0, 2, (k, 3)).astype(float)
        for got, expected in zip(
            kernels_numba.row_classes(matrix), kernels_numpy.row_classes(matrix), strict=True
        ):
            np.testing.assert_array_equal(got, expected)


def test_threads_share_the_rows_of_a_large_product() -> None:
    from pase.search.elimination import kernels_numba

    rng = np.random.default_rng(1)
    left, right = (
        rng.integers(0, 999, (130, 2, 201)).astype(float),
        rng.integers(0, 999, (130, 2, 700)).astype(float),
    )
    np.testing.assert_array_equal(kernels_numba.min_plus(left, right, 3), kernels_numpy.min_plus(left, right))
    base, segment = rng.integers(0, 99, 130).astype(float), rng.integers(0, 40, 130).astype(np.int32)
    segment[:40] = np.arange(40)
    tables = [rng.integers(0, 999, (130, 20_007)).astype(float) for _ in range(2)]
    parts = [(rng.permutation(130).astype(np.int32), t) for t in tables]
    for some in (parts[:1], parts):
        np.testing.assert_array_equal(
            kernels_numba.segment_min(base, segment, 40, some, 3),
            kernels_numpy.segment_min(base, segment, 40, some),
        )


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


def test_no_finite_config_names_the_node() -> None:
    tables = CostTables(node_costs=(np.zeros(2), np.full(3, np.inf)), edges=(), names=("a", "b"))
    with pytest.raises(Infeasible) as e:
        solve(tables)
    assert e.value.where == "node b"


def test_self_loop_is_refused() -> None:
    cls = np.zeros(1, np.int32)
    edge = EdgeTable(src=0, dst=0, cost=np.zeros((1, 1)), src_class=cls, dst_class=cls)
    with pytest.raises(ValueError, match="itself"):
        CostTables(node_costs=(np.zeros(1),), edges=(edge,))


def test_empty_graph_costs_nothing() -> None:
    assert solve(CostTables(node_costs=(), edges=())).cost == 0.0


def test_orders_and_kernels_of_other_names_are_refused() -> None:
    tables = CostTables(node_costs=(np.zeros(2),), edges=())
    with pytest.raises(ValueError, match="order"):
        find_best_strategy(tables, (0, 0))
    with pytest.raises(ValueError, match="'fortran'"):
        solve(tables, kernel="fortran")  # type: ignore[arg-type]


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


def test_the_documentation_runs() -> None:
    text = (Path(__file__).parents[3] / "docs" / "explanation" / "search.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["found"].cost == 3.0 and names["found"].optimal
    assert names["found"].choice.tolist() == [1, 1]


@pytest.mark.parametrize("spread", [1, 1000])
def test_partitions_are_numbered_by_first_config(spread: int) -> None:
    """Equal partitions are one view, whatever the numbers of their classes are, sparse or not."""
    rng, pool = np.random.default_rng(spread), Pool()
    cls = rng.integers(0, 9, 40).astype(np.int64)
    number = {c: i for i, c in enumerate(dict.fromkeys(cls.tolist()))}
    view = pool.view(cls * spread)
    assert view.cls.tolist() == [number[c] for c in cls.tolist()] and view.cls.dtype == np.int32
    assert view.rep.tolist() == [cls.tolist().index(c) for c in number] and view.n == len(number)
    assert pool.view(rng.permutation(9)[cls]) is view
