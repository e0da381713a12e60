"""Parameters are gathered in joined messages, one message ahead of their use."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from bench.cases.torch_ranks import alone_among, on_ranks
from pase.backends.torch.spmd.gathers import gather_messages
from tests.backends.torch.micro_batches import assert_equal_on_ranks
from tests.backends.torch.models import case

pytestmark = pytest.mark.torch
RANKS = 4


def under(model: str, strategy: str, bucket_bytes: float) -> Any:
    """A case, and its plan with buckets of this size."""
    c = case(model, RANKS)
    plan = c.case.plan(strategy)
    assert plan is not None
    return c, replace(plan.torch, bucket_bytes=bucket_bytes)


def test_each_message_starts_when_the_one_before_it_arrives() -> None:
    """While its parameters are read, the next message is under way, and no other. All ranks send the same."""
    from pase.backends.torch.spmd.process_groups import AxisGroups

    c, run = under("tower", "fsdp", 4000.0)
    assert run.program.ops and run.leaves

    def on_rank(rank: int) -> list[str]:
        events: list[str] = []
        step = run.parallelize(copy.deepcopy(c.module))
        groups, under_way = step.walk.groups, list[Any]()

        def started(x: Any, axes: Any, into: Any) -> Any:
            under_way.append(AxisGroups.started_all_gather(groups, x, axes, into))
            events.append("started")
            return under_way[-1]

        def received(x: Any) -> Any:
            if any(x is y for y in under_way):
                events.append("received")
                assert x is under_way[events.count("received") - 1]
            return AxisGroups.received(groups, x)

        object.__setattr__(groups, "started_all_gather", started)
        object.__setattr__(groups, "received", received)
        step.backward(*c.batch)
        under_way.clear()
        events.clear()
        step.backward(*c.batch)
        return events

    events, *others = on_ranks(RANKS, on_rank)
    assert all(x == events for x in others)
    many = events.count("started")
    assert many == len(gather_messages(run.program, 4000.0)) > 3
    assert events == ["started", *["started", "received"] * (many - 1), "received"]
    assert_equal_on_ranks(c, run)


@pytest.mark.parametrize("model", ["tower", "gpt2"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_what_is_sent_follows_from_the_program(model: str, again: bool) -> None:
    """Joined, with the same bytes. Recomputed blocks gather their parameters themselves."""
    from pase.backends.audit.torch import planned, planned_in_step, sent_by_one_rank
    from pase.compiler.problem.variants import recomputed

    c, run = under(model, "fsdp", 5000.0)
    if again:
        run = replace(run, blocks=recomputed(c.case.traced, "all"))
    with alone_among(RANKS, rank=1):
        sent = sent_by_one_rank(run)
    one_by_one = planned(run.program)
    assert sent == planned_in_step(run) != one_by_one
    assert sum(n * times for (*_, n), times in sent.items()) == sum(
        n * times for (*_, n), times in one_by_one.items()
    )
    gathers = [sum(k == "all_gather" for k, *_ in counts.elements()) for counts in (sent, one_by_one)]
    assert (gathers[0] < gathers[1]) == (model == "gpt2" or not again)  # all of the tower's are in blocks
