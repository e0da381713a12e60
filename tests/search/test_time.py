"""The clock: no piece begins that would end too late; reductions that stop early leave a sound problem."""

from __future__ import annotations

import time

import numpy as np

from pase.commands.solve import _since_start
from pase.errors import Infeasible
from pase.search import brute_force, cost_of, solve, verify
from pase.search.bounded import bounded_search
from pase.search.clock import Deadline
from pase.search.contract import contract

from .instances import random_memory, random_tables


def test_a_piece_begins_where_its_like_would_end_in_time() -> None:
    clock = Deadline(time.perf_counter() + 60.0)
    assert clock.allows("move")
    clock.took("move", 1.0)
    clock.took("move", 0.5)
    assert clock.longest == {"move": 1.0} and clock.allows("move")
    clock.took("bound", 59.0)  # with its margin, more than a minute
    assert not clock.allows("bound") and clock.allows("move")
    assert clock.run("other", lambda a, b: a + b, 2, b=3) == 5
    assert set(clock.longest) == {"move", "bound", "other"}
    assert not Deadline(time.perf_counter() - 1.0).allows("move")


def test_reductions_that_stop_at_once_keep_the_optimum() -> None:
    for seed in range(300):
        tables = random_tables(np.random.default_rng(seed))
        try:
            want = brute_force(tables).cost
        except Infeasible:
            continue
        left = contract(tables, until=0.0)
        sizes = [c.size for c in left.costs]
        full = (
            left.expand(np.array(np.unravel_index(i, sizes), np.int64).reshape(-1))
            for i in range(int(np.prod(sizes)))
        )
        assert min(cost_of(tables, choice) for choice in full) == want, seed


def test_no_time_at_all_still_gives_an_answer() -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng)
        memory = random_memory(rng, tables)
        try:
            want = brute_force(tables, memory).cost
        except Infeasible:
            continue
        found = solve(tables, memory, time_limit=0.0)
        assert found.bound <= want, seed
        if found.feasible:
            assert verify(tables, found, memory) >= want, seed
        loose = bounded_search(tables, None, 0.0, 0, time.perf_counter())
        assert loose.bound <= want + 1e-9


def test_what_the_program_has_done_before_counts() -> None:
    before = time.process_time()
    age = _since_start()
    assert age >= before and age <= _since_start()
