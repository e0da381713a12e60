"""Tasks of a calibration: their work counted by hand, and their keys."""

from __future__ import annotations

import pytest

from pase.calibrate.types import Task


@pytest.mark.parametrize(
    ("task", "work"),
    [
        (Task(op="matmul.nn", extents=(3, 4, 5, 6)), 2 * 3 * 4 * 5 * 6),
        (Task(op="conv.forward", extents=(2, 8, 3, 5, 3)), 2 * 2 * 8 * 8 * 3 * 5 * 3 * 3),
        (Task(op="elementwise", nbytes=4096), 4096),
        (Task(op="all_reduce", nbytes=64, ways=(4,)), 64),
        (Task(op="dispatch"), 1),
    ],
    ids=lambda x: getattr(x, "op", ""),
)
def test_work_is_the_flops_or_the_bytes(task: Task, work: float) -> None:
    assert task.work == work


@pytest.mark.parametrize("side", range(3, 9))
def test_a_window_works_on_each_element_that_it_covers(side: int) -> None:
    """It moves in steps of two. Forward takes one operation for each element and channel, and backward two."""
    places = len(range(0, side - 3 + 1, 2)) ** 2
    assert Task(op="window", extents=(2, side, 5, 3)).work == 3 * 2 * places * 5 * 3 * 3


def test_a_key_names_all_that_is_measured_and_not_when() -> None:
    task = Task(op="all_reduce", nbytes=64, ways=(4, 2), rank=1)
    assert task.key == "all_reduce float32 64B over [4,2]"
    others = [Task(op="all_gather", nbytes=64, ways=(4, 2)), Task(op="all_reduce", nbytes=128, ways=(4, 2))]
    others += [
        Task(op="all_reduce", nbytes=64, ways=(4, 1)),
        Task(op="all_reduce", dtype="bfloat16", nbytes=64, ways=(4, 2)),
    ]
    assert len({t.key for t in (task, *others)}) == 5
    assert Task(op="all_reduce", nbytes=64, ways=(4, 2), rank=7).key == task.key
