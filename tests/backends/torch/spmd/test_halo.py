"""Rows of neighbouring ranks under a window."""

from __future__ import annotations

import pytest

from bench.cases.torch_ranks import alone_among
from tests.backends.torch.models import case
from tests.backends.torch.steps import assert_unsharded

pytestmark = pytest.mark.torch
RANKS = 4


def test_rows_of_neighbours_are_one_message() -> None:
    """On every rank, including those at an end: exactly the plan's list."""
    from pase.backends.audit.torch import planned_in_step, sent_by_one_rank

    for ranks in (RANKS, 8):
        # A strategy that does not split the maximum, whose message of equal elements the list does not have.
        plan = case("pixels", ranks).case.plan(f"random7@{ranks // 2}x2")
        assert plan is not None
        program = plan.torch.program
        assert any(o.halo for op in program.ops for o in op.operands)
        for rank in range(ranks):
            with alone_among(ranks, rank=rank):
                assert sent_by_one_rank(plan.torch) == planned_in_step(plan.torch)


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "strategy", [f"random{i}@2x2" for i in range(8)] + ["random1@4", "random2@4", "ours@2x2"]
)
def test_average_pools_are_summed_and_divided_apart(strategy: str) -> None:
    """If their sums are resharded in between. Their windows read rows of other ranks where a dim is split, and what is
    sent is the plan's list."""
    from pase.backends.audit.torch import planned_in_step, sent_by_one_rank

    assert_unsharded("averages", strategy)
    plan = case("averages", RANKS).case.plan(strategy)
    assert plan is not None
    for rank in range(RANKS):
        with alone_among(RANKS, rank=rank):
            assert sent_by_one_rank(plan.torch) == planned_in_step(plan.torch)
