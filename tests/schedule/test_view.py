"""When tensors are ready and needed, what may share a message, and which link is the fastest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.cases.schedules import chain, link
from pase.errors import PaseError
from pase.schedule import (
    Options,
    evaluate,
    get_policy,
)
from pase.schedule.policies.tictac import parameter_server
from pase.schedule.types import AxisGroup, ComputeBlock, Link, ScheduleProblem, SendTime, Transfer
from pase.schedule.view import can_fuse, need_order, plain_view, ready_order, ready_s


def test_heterogeneous_links_take_their_own_time() -> None:
    slow = Link(
        name="slow",
        curve=SendTime.alpha_beta(alpha_s=0.0, beta_s_per_byte=2.0),
        axes=(AxisGroup(("model",)),),
    )
    fast = replace(link("fast"), axes=(AxisGroup(), AxisGroup(("data",))))
    problem = chain([1.0], [1.0], [3], fast, slow)
    problem = replace(problem, tensors=(replace(problem.tensors[0], axes=AxisGroup(("model",))),))
    plan = get_policy("fifo").make(problem, Options())
    assert plan.messages[0].link == 1
    assert evaluate(problem, plan).iteration_s == 1 + 6 + 1


def test_messages_do_not_wait_for_each_other_in_a_circle() -> None:
    """Two steps of one kind over the same axes, and two parameters whose steps are swapped, fused if possible."""
    net = link("net", alpha_s=1.0, beta=0.0)
    blocks = (
        ComputeBlock(name="f", phase="forward", seconds=1.0),
        ComputeBlock(name="b", phase="backward", seconds=1.0),
    )

    def tensor(name: str, kind: str, follows: tuple[int, ...]) -> Transfer:
        after = None if follows else 1
        return Transfer(name=name, nbytes=8, ready_after=after, needed_before=0, kind=kind, follows=follows)

    for kinds in (("permute", "permute"), ("permute", "all_gather")):
        one, other = kinds
        tensors = (
            tensor("w1", one, ()),
            tensor("w2", other, (0,)),
            tensor("v1", other, ()),
            tensor("v2", one, (2,)),
        )
        p = ScheduleProblem(name="circle", blocks=blocks, tensors=tensors, links=(net,))
        for name in ("ddp", "horovod", "ours", "fifo", "tac"):
            e = evaluate(p, get_policy(name).make(p, Options()))
            assert e.iteration_s >= 2 + 2  # at least two messages, one after the other
        assert evaluate(p, get_policy("ours").make(p, Options())).messages < 4 or one != other


def test_heads_and_tails_of_a_chain() -> None:
    """Three layers: forward 1, 2 and 3 s, backward 4, 5 and 6 s, of which the last layer's comes first."""
    problem = chain([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7, 8, 9])
    view = plain_view(problem)
    assert view.compute == 21.0 and view.nbytes.tolist() == [7, 8, 9]
    # Time 0 is the start of the last layer's backward.
    assert view.ready.tolist() == [15.0, 11.0, 6.0]
    assert view.tail.tolist() == [6.0, 5.0, 3.0]
    assert ready_s(problem).tolist() == [21.0, 17.0, 12.0]
    assert ready_order(problem) == [2, 1, 0] and need_order(problem) == [0, 1, 2]


def test_a_problem_with_gathers_has_no_heads_and_tails() -> None:
    server = parameter_server(chain([1.0], [1.0], [3]), push=link("up"), pull=link("down"))
    with pytest.raises(PaseError, match="not plain gradient synchronisation"):
        plain_view(server)


def test_a_tensor_comes_after_those_that_it_follows() -> None:
    """A pull follows its push, in the order of readiness and in the order of need."""
    server = parameter_server(chain([1.0] * 3, [1.0] * 3, [3, 4, 5]), push=link("up"), pull=link("down"))
    for order in (ready_order(server), need_order(server)):
        place = {t: i for i, t in enumerate(order)}
        assert all(place[f] < place[i] for i, t in enumerate(server.tensors) for f in t.follows)


def test_only_tensors_of_one_group_are_fused() -> None:
    problem = chain([1.0] * 3, [1.0] * 3, [3, 4, 5])
    other = replace(problem, tensors=(*problem.tensors[:2], replace(problem.tensors[2], dtype="bfloat16")))
    assert can_fuse(problem, [0, 1], 2) and can_fuse(other, [0], 1) and not can_fuse(other, [0, 1], 2)
