"""Budgets of work: the result depends on the seed, not on the machine's load, and what was learnt is kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pase.errors import Infeasible
from pase.search import MemoryProfile, Solution, cost_of, solve, verify
from pase.search.bounded import search as bounded
from pase.search.bounded.contract import contract, restrict
from pase.search.bounded.ilp import IlpJob
from pase.search.bounded.kernels_flat import trws_pass
from pase.search.bounded.residual import Residual
from pase.tables.types import CostTables, EdgeTable
from tests.search.bounded.test_search import clique
from tests.search.random_instances import random_tables


def late(piece: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, as if on a heavily loaded machine."""

    def slow(*args: Any) -> Any:
        time.sleep(0.1)
        out = piece(*args)
        time.sleep(0.1)
        return out

    return slow


def limited(seed: int, nodes: int = 16, configs: int = 8) -> tuple[CostTables, MemoryProfile]:
    """A dense graph under a limit. With 16 nodes it is too large for an integer program at once."""
    rng = np.random.default_rng(seed)
    tables = clique(rng, nodes=nodes, configs=configs)
    held = tuple(rng.integers(0, 20, configs).astype(float) for _ in range(nodes))
    return tables, MemoryProfile.all_live(held, nodes * 7.0)


@pytest.mark.parametrize("slow", ["_raise_bound", "_neighbourhoods"])
def test_the_answer_does_not_depend_on_which_thread_is_faster(
    monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    tables, memory = limited(3)
    monkeypatch.setattr(bounded, "_ILP_PAIRS", 0)  # only the threads
    quick = solve(tables, memory, rounds=5, seed=1)
    monkeypatch.setattr(bounded, slow, late(getattr(bounded, slow)))
    loaded = solve(tables, memory, rounds=5, seed=1)
    assert quick.choice.tolist() == loaded.choice.tolist()
    assert (quick.cost, quick.bound, quick.method) == (loaded.cost, loaded.bound, loaded.method)
    assert "rounds" in quick.method  # the budget ended the search


def test_an_integer_program_is_read_in_its_turn_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables, memory = limited(5, nodes=8, configs=5)
    monkeypatch.setattr(bounded, "_SMALL_ILP", 0)  # run in a separate process, whatever its size

    def search(beginning_s: float) -> tuple[Solution, list[int]]:
        turns: list[int] = []
        begin = IlpJob.__init__

        def begun(job: IlpJob, problem: dict[str, np.ndarray], due: int) -> None:
            turns.append(due)
            time.sleep(beginning_s)
            begin(job, problem, due)

        with monkeypatch.context() as patch:
            patch.setattr(IlpJob, "__init__", begun)
            return bounded.bounded_search(tables, memory, None, 1, time.perf_counter(), rounds=6), turns

    (first, due), (second, due_again) = search(0.0), search(0.5)
    assert due == due_again and due[0] >= 3
    assert first.choice.tolist() == second.choice.tolist()
    assert (first.cost, first.bound, first.method) == (second.cost, second.bound, second.method)


def test_turns_go_on_beside_an_integer_program_if_a_clock_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, memory = limited(5)
    monkeypatch.setattr(bounded, "_SMALL_ILP", 0)
    monkeypatch.setattr(bounded, "_PAIRS_A_ROUND", 10**9)  # due at once
    waited: list[float] = []
    turns = 0

    def never(job: IlpJob, seconds: float) -> None:
        waited.append(seconds)

    def turn(phase: str, cost: float, bound: float, seconds: float) -> None:
        nonlocal turns
        turns += 1

    monkeypatch.setattr(IlpJob, "wait", never)
    bounded.bounded_search(tables, memory, 2.0, 1, time.perf_counter(), turn)
    assert waited and not any(waited) and turns > len(waited)


def test_a_smaller_problem_keeps_the_bound_of_the_one_it_came_from() -> None:
    """Messages are kept: after configs were dropped, the first sweep proves at least as much as the last one before."""
    checked = 0
    for seed in range(200):
        tables = random_tables(np.random.default_rng(seed))
        try:
            left = contract(tables, until=0.0)
        except Infeasible:
            continue
        old = Residual(left, None)
        if not old.flat.head.size:
            continue
        reduced, before = np.zeros(old.flat.cost.size), -np.inf
        for sweep in range(6):
            before = trws_pass(
                old.flat.graph, old.flat.cost, old.message, old.choice, reduced, sweep % 2 == 0, True
            )
        keep = [np.ones(c.size, bool) for c in left.costs]
        wide = int(np.argmax([c.size for c in left.costs]))
        if keep[wide].size < 2:
            continue
        keep[wide][int(left.costs[wide].argmax())] = False
        constant = left.constant
        try:
            new = Residual(restrict(left, keep, until=0.0), None)
        except Infeasible:
            continue
        new.inherit(old)
        choice, least = np.zeros(new.flat.n, np.int64), np.zeros(new.flat.cost.size)
        after = trws_pass(new.flat.graph, new.flat.cost, new.message, choice, least, True, True)
        assert after + new.left.constant >= before + constant - 1e-6 * max(1.0, abs(before)), seed
        checked += 1
    assert checked > 60


def test_a_choice_that_lost_configs_finds_the_nearest_that_is_left() -> None:
    """If every config still exists, the choice is the same. Otherwise the node that lost its config suits the
    others."""
    tables = clique(np.random.default_rng(7), nodes=6, configs=5)
    left = contract(tables, until=0.0)
    full = np.array([3, 1, 4, 1, 0, 2])
    assert left.expand(left.nearest(full)).tolist() == full.tolist()
    keep = [np.ones(5, bool) for _ in range(6)]
    keep[2][4] = False
    less = restrict(left, keep, until=0.0)
    got = less.expand(less.nearest(full))
    others = [np.where(np.arange(6) == 2, k, full) for k in range(4)]
    assert cost_of(tables, got) == min(cost_of(tables, o) for o in others)


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
    found = bounded.bounded_search(tables, None, None, 0, time.perf_counter(), rounds=6)
    assert found.feasible and verify(tables, found) <= cost_of(tables, hidden)


def test_with_a_time_limit_an_ended_integer_program_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a time limit, nothing waits for the integer program: it is polled with a timeout of zero."""
    wait, answers = IlpJob.wait, []

    def ended(job: IlpJob, seconds: float) -> Any:
        job.process.wait(60)
        answers.append(wait(job, seconds))
        return answers[-1]

    monkeypatch.setattr(IlpJob, "wait", ended)
    tables, memory = limited(3)
    assert solve(tables, memory, time_limit=8.0, seed=1).feasible
    assert answers and None not in answers
