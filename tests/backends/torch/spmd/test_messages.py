"""Messages of a bucket plan in PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.cases.torch_ranks import alone_among
from tests.backends.torch.micro_batches import assert_equal_on_ranks
from tests.backends.torch.models import case

pytestmark = pytest.mark.torch
RANKS = 4


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_a_bucket_plan_joins_sums_of_gradients(again: bool) -> None:
    """Three messages instead of one per parameter, as recorded from what PyTorch issues; the results do not change."""

    from pase.backends.audit.torch import planned, sent_by_one_rank
    from pase.compiler.problem.variants import recomputed
    from pase.plan.buckets import holding, problem_of
    from pase.schedule.plan import BucketPlan, Message, Piece

    c = case("tower", RANKS)
    plan = c.case.plan("data_parallel")
    assert plan is not None
    problem = problem_of(plan)
    sums = list(range(len(problem.tensors)))
    assert {t.kind for t in problem.tensors} == {"all_reduce"}
    groups = [sums[:5], sums[5:11], sums[11:]]
    messages = tuple(
        Message(pieces=tuple(Piece(tensor=t, offset=0, nbytes=problem.tensors[t].nbytes) for t in group))
        for group in groups
    )
    run = holding(plan, problem, BucketPlan(policy="by hand", messages=messages)).torch
    if again:
        run = replace(run, blocks=recomputed(c.case.traced, "light"))
    assert run.program.messages and run.leaves
    with alone_among(RANKS, rank=1):
        sent = sent_by_one_rank(run)
    assert sent == planned(run.program) and sum(sent.values()) < sum(planned(plan.torch.program).values())
    large = sorted(n for kind, _, n in sent.elements() if kind == "all_reduce" and n > 8)
    assert len(large) == 3

    assert_equal_on_ranks(c, run)
