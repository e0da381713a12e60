"""The stages of a plan: what they recompute, their schedule, and what unequal devices do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pase.ir.blocks import Block
from pase.pipeline.registry import schedule
from pase.plan.pipeline import ReplicaPlan, runs, unequal
from tests.plan.plans import pipeline, stage

BLOCKS = (Block(prefix="", start=0, stop=3), Block(prefix="", start=3, stop=6))


def test_each_strategy_says_what_its_stages_recompute() -> None:
    own = pipeline(recompute=((BLOCKS[0],), ()))
    assert own.recomputed_blocks(0, BLOCKS) == BLOCKS[:1] and own.recomputed_blocks(1, BLOCKS) == ()
    # Older layouts have only the stages' own marks, and the blocks of the whole plan.
    older = pipeline(stages=(stage(0, recomputes=True), stage(1, strategy=1)))
    assert older.recomputed_blocks(0, BLOCKS) == BLOCKS and older.recomputed_blocks(1, BLOCKS) == ()


def test_its_actions_are_those_of_its_schedule() -> None:
    p = pipeline()
    assert p.actions() == schedule("1f1b", 2, 2, 1)
    assert replace(p, schedule="interleaved", chunks=2).actions().stages == 4


def test_equal_devices_need_no_remark() -> None:
    assert unequal(pipeline(), 1.0) == []


@pytest.mark.parametrize(
    ("equal_s", "says"),
    [(None, "do not fit"), (1.0, "are as good"), (1.25, "would take 25.0% longer")],
)
def test_equal_numbers_of_blocks_are_compared(equal_s: float | None, says: str) -> None:
    p = pipeline(groups=("fast", "slow"), equal_s=equal_s)
    assert unequal(p, 1.0) == ["groups fast slow by rank", f"equal  numbers of blocks {says}"]


def test_replicas_state_their_shares() -> None:
    one = ReplicaPlan(
        group="fast", micro_batches=1, step_s=0.5, mesh={"x": 2, "y": 4}, pipeline=pipeline(degree=1)
    )
    two = replace(one, group="slow", micro_batches=3, step_s=0.25, pipeline=pipeline())
    p = pipeline(groups=("fast", "slow"), replicas=(one, two), equal_s=0.6, sum_s=0.002)
    assert unequal(p, 0.5) == [
        "share  fast: 1 micro-batch, 500 ms, 1 rank of 2×4",
        "share  slow: 3 micro-batches, 250 ms, 2 ranks of 2×4",
        "equal  shares of the micro-batches would take 20.0% longer",
        "sum    of gradients between the groups: 2 ms of the step",
    ]


def test_runs_are_counted() -> None:
    assert runs(()) == "" and runs(("a", "a", "b", "a")) == "a×2 b a"
