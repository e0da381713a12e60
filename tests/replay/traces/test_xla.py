"""Traces of compiled XLA programs: collectives under any name, and the steps of programs that run in turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pase.replay.traces.xla import Executions, describe
from pase.replay.types import COLLECTIVE, OPERATIONS, Event, from_events
from tests.replay.traces.compiled import facts_of_step


def test_a_collective_is_one_whatever_jax_calls_it() -> None:
    """In a manual lowering, XLA's all-gather may be named all_gather.9, and must not count as compute."""
    facts = replace(facts_of_step(1), kinds={"all_gather.9": "all_gather"}, nbytes={"all_gather.9": 64})
    event: dict[str, Any] = {"rank": 0, "lane": "XLA ops", "device": True, "kind": "kernel", "duration_ns": 5}
    t = describe(
        from_events([Event(name=n, start_ns=k, **event) for k, n in enumerate(("dot", "all_gather.9"))]),
        facts,
    )
    assert t["kind"].tolist()[1] == COLLECTIVE and t["kind"].tolist()[0] != COLLECTIVE
    assert OPERATIONS[int(t["operation"][1])] == "all_gather" and t["nbytes"][1] == 64 and t["group"][1] >= 0


GRAD, UPDATE, PRINT = ("jit_grad(1)", 30, "abc"), ("jit_update(2)", 20, "ab"), ("jit_print(3)", 1, "a")


def executed(steps: int, *programs: tuple[str, int, str], recorded: bool = True) -> list[tuple[int, int]]:
    """Returns (start, end) of the steps that are found if these programs (name, length of an op, ops) run in turns.

    recorded: whether the profiler records which execution an op is of.
    """
    found, at = Executions(), 0
    for k in range(steps):
        for place, (module, length, ops) in enumerate(programs):
            for op in ops:
                run = f"{k}.{place}" if recorded else ""
                found.add(0, module, run, at, at + length, "stream 7", op)
                at += length + 1
    return [(mark.start_ns, mark.end_ns) for _, mark in found.marks(0)]


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    "programs",
    [
        (GRAD, UPDATE),
        (GRAD, GRAD, GRAD, UPDATE),  # gradients are accumulated
        (
            ("jit_forward(4)", 20, "ab"),
            GRAD,
            ("jit_forward(4)", 20, "ab"),
            GRAD,
            UPDATE,
        ),  # a stage of a pipeline
    ],
)
def test_a_step_is_one_repetition_of_the_programs(
    programs: tuple[tuple[str, int, str], ...], recorded: bool
) -> None:
    steps = executed(5, *programs, recorded=recorded)
    length = sum((n + 1) * len(ops) for _, n, ops in programs)
    assert [start for start, _ in steps] == [k * length for k in range(5)]
    assert all(length - n <= 1 for n in (end - start for start, end in steps))


def test_a_short_program_between_steps_divides_none() -> None:
    """A loss is printed after every third step."""
    whole = ("jit_step(1)", 90, "abc")
    assert len(executed(4, whole, whole, whole, PRINT)) == 12


def test_programs_of_one_name_and_no_number_are_told_apart_by_their_ops() -> None:
    """In trace.json, all stages of a pipeline may be jit_run."""
    forward, backward = ("jit_run", 20, "ab"), ("jit_run", 20, "bcd")
    assert len(executed(4, forward, forward, backward, backward)) == 4
