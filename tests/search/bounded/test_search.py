"""The bounded search against brute force; its result depends on the seed, not on the load of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pase.errors import Infeasible
from pase.search import MemoryProfile, cost_of, solve, verify
from pase.search.bounded import search as bounded
from pase.search.bounded.search import bounded_search
from pase.search.types import Effort
from pase.tables.types import CostTables, EdgeTable
from tests.search.bounded.instances import clique, limited, optimum
from tests.search.random_instances import random_memory, random_tables


@pytest.mark.parametrize("block", range(3))
def test_bounded_search_is_brute_force_under_a_memory_limit(block: int) -> None:
    """Small instances end with a proof, so the cost must be the optimum, and infeasible instances are reported."""
    for seed in range(block * 40, block * 40 + 40):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng)
        memory = random_memory(rng, tables)
        want = optimum(tables, memory)
        if want is None:
            with pytest.raises(Infeasible):
                solve(tables, memory, effort=Effort(time_limit=600))
            continue
        found = solve(tables, memory, effort=Effort(time_limit=600))
        assert verify(tables, found, memory) == want, seed
        assert found.feasible and found.optimal, seed


def test_bounded_search_without_a_limit_is_brute_force() -> None:
    for seed in range(300):
        tables = random_tables(np.random.default_rng(seed))
        want = optimum(tables)
        if want is None:
            with pytest.raises(Infeasible):
                bounded_search(tables, None, Effort(time_limit=600), 0, time.perf_counter())
            continue
        found = bounded_search(tables, None, Effort(time_limit=600), 0, time.perf_counter())
        assert verify(tables, found) == want and found.optimal, seed


def test_same_seed_same_answer() -> None:
    rng = np.random.default_rng(5)
    tables = clique(rng, nodes=7, configs=4)
    held = tuple(rng.integers(0, 20, 4).astype(float) for _ in range(7))
    memory = MemoryProfile.all_live(held, 50.0)
    first, second = (solve(tables, memory, seed=3, effort=Effort(time_limit=600)) for _ in range(2))
    assert first.cost == second.cost
    np.testing.assert_array_equal(first.choice, second.choice)


def test_ctrl_c_gives_the_best_so_far() -> None:
    """A dense graph that is far from finished; the second progress report interrupts the search."""
    tables = clique(np.random.default_rng(0), nodes=24, configs=12)
    calls = []

    def interrupt(phase: str, cost: float, bound: float, seconds: float) -> None:
        calls.append(cost)
        if len(calls) == 2:
            raise KeyboardInterrupt

    found = bounded_search(tables, None, Effort(rounds=60), 0, time.perf_counter(), interrupt)
    verify(tables, found)
    assert found.method == "interrupted" and found.feasible and len(calls) == 2


def test_a_dense_graph_gets_a_bound_and_a_choice() -> None:
    tables = clique(np.random.default_rng(1), nodes=30, configs=12)
    found = solve(tables, effort=Effort(rounds=2))
    cost = verify(tables, found)
    assert 0 < found.bound <= cost
    assert found.gap < 0.9  # with random costs, every local bound is far from the optimum


def late(piece: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, as if on a heavily loaded machine."""

    def slow(*args: Any) -> Any:
        time.sleep(0.1)
        out = piece(*args)
        time.sleep(0.1)
        return out

    return slow


@pytest.mark.parametrize("slow", ["_raise_bound", "_neighbourhoods"])
def test_the_answer_does_not_depend_on_which_thread_is_faster(
    monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    tables, memory = limited(3)
    monkeypatch.setattr(bounded, "_ILP_PAIRS", 0)  # only the threads
    quick = solve(tables, memory, seed=1, effort=Effort(rounds=5))
    monkeypatch.setattr(bounded, slow, late(getattr(bounded, slow)))
    loaded = solve(tables, memory, seed=1, effort=Effort(rounds=5))
    assert quick.choice.tolist() == loaded.choice.tolist()
    assert (quick.cost, quick.bound, quick.method) == (loaded.cost, loaded.bound, loaded.method)
    assert "rounds" in quick.method  # the budget ended the search


def test_forbidden_pairs_are_left_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A three-colourable graph: starts have forbidden pairs, and a single move rarely removes the last one."""
    monkeypatch.setattr(bounded, "_SMALL_ILP", 0)
    monkeypatch.setattr(bounded, "_ILP_PAIRS", 0)  # only the neighbourhoods
    rng = np.random.default_rng(1)
    hidden = rng.integers(0, 3, 120)
    alike, colour = np.where(np.eye(3, dtype=bool), np.inf, 0.0), np.arange(3, dtype=np.int32)
    pairs = [
        (u, v) for v in range(120) for u in range(v) if hidden[u] != hidden[v] and rng.random() < 5 / 120
    ]
    tables = CostTables(
        node_costs=tuple(rng.integers(0, 50, 3).astype(float) for _ in range(120)),
        edges=tuple(
            EdgeTable(src=u, dst=v, cost=alike, src_class=colour, dst_class=colour) for u, v in pairs
        ),
    )
    found = bounded.bounded_search(tables, None, Effort(rounds=6), 0, time.perf_counter())
    assert found.feasible and verify(tables, found) <= cost_of(tables, hidden)
