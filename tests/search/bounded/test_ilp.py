"""The integer program of a residual problem: it is read in its turn, however long it takes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from pase.search import Solution, solve
from pase.search.bounded import search as bounded
from pase.search.bounded.ilp import IlpJob
from pase.search.types import Effort
from tests.search.bounded.instances import limited


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
            return bounded.bounded_search(tables, memory, Effort(rounds=6), 1, time.perf_counter()), turns

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
    bounded.bounded_search(tables, memory, Effort(time_limit=2.0), 1, time.perf_counter(), turn)
    assert waited and not any(waited) and turns > len(waited)


def test_with_a_time_limit_an_ended_integer_program_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a time limit, nothing waits for the integer program: it is polled with a timeout of zero."""
    wait, answers = IlpJob.wait, []

    def ended(job: IlpJob, seconds: float) -> Any:
        job.process.wait(60)
        answers.append(wait(job, seconds))
        return answers[-1]

    monkeypatch.setattr(IlpJob, "wait", ended)
    tables, memory = limited(3)
    assert solve(tables, memory, seed=1, effort=Effort(time_limit=3.0)).feasible
    assert answers and None not in answers
