"""Plans that do not cover every byte and every iteration once are refused."""

from __future__ import annotations

import pytest

from bench.cases.schedules import chain
from pase.errors import PaseError
from pase.schedule import (
    BucketPlan,
    Message,
    Piece,
    check_plan,
    whole,
)


@pytest.mark.parametrize(
    ("pieces", "where", "what"),
    [
        ([(0, 0, 4)], "update 0", "0 of the 5 bytes of tensor 'w1'"),
        ([(0, 0, 4), (1, 0, 3)], "update 0", "3 of the 5 bytes of tensor 'w1'"),
        ([(0, 0, 4), (1, 0, 3), (1, 2, 3)], "update 0", "3 bytes at 2"),
        ([(0, 0, 4), (1, 0, 5), (2, 0, 1)], "messages[2]", "tensor 2"),
    ],
)
def test_a_plan_that_does_not_cover_is_refused(
    pieces: list[tuple[int, int, int]], where: str, what: str
) -> None:
    problem = chain([1.0, 1.0], [1.0, 1.0], [4, 5])
    messages = tuple(Message(pieces=(Piece(tensor=t, offset=o, nbytes=n),)) for t, o, n in pieces)
    with pytest.raises(PaseError) as e:
        check_plan(problem, BucketPlan(policy="x", messages=messages))
    assert e.value.where == f"plan 'x', {where}" and what in e.value.what


def test_updates_must_take_every_iteration_once() -> None:
    problem = chain([1.0], [1.0], [4])
    plan = BucketPlan(policy="x", messages=(whole(problem, [0]),), period=2)
    with pytest.raises(PaseError, match="take 1 iterations"):
        check_plan(problem, plan)
