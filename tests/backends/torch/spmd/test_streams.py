"""What a GPU's streams get from a rank: messages beside compute, no more of them than memory is for, and no race."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from bench.cases.schedules import link
from bench.cases.torch_ranks import alone_among
from pase.backends.torch.spmd.gathered_again import again_messages
from pase.backends.torch.spmd.gathers import gather_messages
from pase.backends.torch.spmd.messages import gradient_messages
from pase.plan.buckets import holding, problem_of
from pase.schedule.registry import Options, get_policy
from tests.backends.torch.models import case
from tests.backends.torch.spmd.streams import Streams, is_heavy, watched
from tests.backends.torch.spmd.test_gathered_again import under

pytestmark = pytest.mark.torch
RANKS = 4
SMALL = 4000.0
STRATEGIES = {
    "tower": ("data_parallel", "zero2", "fsdp", "again", "ours@2x2", "random1@2x2"),
    "gpt2": ("data_parallel", "zero2", "fsdp", "again", "megatron/megatron_2x2", "ours@2x2", "random1@2x2"),
    "t5": ("again", "ours@2x2", "random1@2x2"),
    "pixels": ("fsdp", "again", "random1@2x2"),
    "layers": ("fsdp", "again"),
    "circle": ("ours@2x2", "random1@2x2"),
}
"""Model -> strategies."""


def run_of(model: str, strategy: str) -> tuple[Any, Any]:
    """A case, and its plan with small messages."""
    if strategy == "again":
        return under(model, bucket_bytes=SMALL)
    c = case(model, RANKS)
    plan = c.case.plan(strategy)
    assert plan is not None
    run: Any = plan.torch
    return c, replace(run, bucket_bytes=SMALL)


def enqueued(c: Any, run: Any, **how: Any) -> tuple[Streams, int]:
    """What the second step of a rank enqueues, and how many ops of its own stream are before the optimizer's."""
    import torch

    with alone_among(RANKS, rank=1):
        step = run.train_step(copy.deepcopy(c.module), torch.optim.AdamW, **how)
        step(*c.batch)
        with watched(step.parallel) as streams:
            step.optimizer.zero_grad()
            step.parallel.backward(*c.batch)
            backward = len(streams.own)
            step.optimizer.step()
    return streams, backward


@pytest.mark.some(8)
@pytest.mark.parametrize(("model", "strategy"), [(m, s) for m, some in STRATEGIES.items() for s in some])
def test_nothing_races(model: str, strategy: str) -> None:
    """No op writes what a message under way reads, reads or writes what it writes, or gets its memory. The optimizer
    begins when all are waited for."""
    streams, backward = enqueued(*run_of(model, strategy))
    assert streams.sent and not streams.races
    assert all(m.waited is not None and m.waited <= backward for m in streams.sent)


def in_graph(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """How a step runs the graph that torch.compile gets, in the graph's order."""
    import torch

    monkeypatch.setattr(torch, "compile", lambda graph, **how: graph)
    return {"compile": True}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("strategy", ["fsdp", "again"])
def test_parameters_are_gathered_one_message_ahead(
    strategy: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the readers of one message compute, the next is under way, and no other."""
    c, run = run_of("tower", strategy)
    streams, backward = enqueued(c, run, **in_graph(monkeypatch) if compiled else {})
    ahead = [m for m in streams.sent if m.kind == "all_gather" and m.beside]
    forward = len(gather_messages(run.program, SMALL))
    back = len(again_messages(run.program, gather_messages(run.program, SMALL))) if run.gathers_again else 0
    # Of those that come again, nothing computes while the first does, and so it is no message ahead.
    assert len(ahead) == forward + max(0, back - 1) > 6
    # The first product reads what the first two messages bring.
    assert all(streams.heavy(m) for m in ahead[2:]) and not streams.races
    assert all(before.waited == after.issued for before, after in pairwise(ahead[:forward]))
    # It is enqueued just before the own stream waits for the one before, so that the link does not stop.
    assert streams.most["all_gather"] == max(m.nbytes + n.nbytes for m, n in pairwise(ahead[:forward]))
    assert all(m.waited is not None and m.waited < backward for m in ahead)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("strategy", ["data_parallel", "fsdp", "again"])
def test_gradients_are_sent_beside_backward(
    strategy: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of summed gradients is waited for at the end. One that is scattered is waited for before the next one,
    so that only one is held, which is as large as the whole gradients."""
    c, run = run_of("tower", strategy)
    streams, backward = enqueued(c, run, **in_graph(monkeypatch) if compiled else {})
    kind = "all_reduce" if strategy == "data_parallel" else "reduce_scatter"
    sent = [m for m in streams.sent if m.kind == kind and m.beside]
    # All but the last, with which backward ends.
    assert len(sent) == len(gradient_messages(run.program, SMALL)) - 1 > 4
    assert all(streams.heavy(m) for m in sent) and not streams.races
    products = [i for i, name in enumerate(streams.own[:backward]) if is_heavy(name)]
    if kind == "all_reduce":
        assert all(m.waited is not None and m.waited > products[-1] for m in sent)
        return
    assert streams.most[kind] == max(m.nbytes for m in sent)
    for m, after in pairwise(sent):  # what is in between joins the gradients of the next one
        assert m.waited is not None and m.waited <= after.issued
        assert not any(map(is_heavy, streams.own[m.waited : after.issued]))
    assert sent[-1].waited is not None and sent[-1].waited > products[-1]


@pytest.mark.parametrize("policy", ["ours", "tac"])
def test_bucket_plans_are_sent_as_they_say(policy: str) -> None:
    """In their order, on links that are busy for most of the step. TicTac's order is that in which forward needs the
    parameters, so it begins when backward has ended."""
    c = case("gpt2", RANKS)
    plan = c.case.plan("data_parallel")
    assert plan is not None
    problem = problem_of(plan)
    nbytes = sum(t.nbytes for t in problem.tensors)
    busy = link("busy", alpha_s=1e-9, beta=0.6 * problem.compute_s / nbytes)
    problem = problem_of(plan, links=(busy,))
    made = get_policy(policy).make(problem, Options())
    streams, backward = enqueued(c, holding(plan, problem, made).torch)
    sent = [m for m in streams.sent if m.kind == "all_reduce" and m.beside]
    wanted = [sum(p.nbytes for p in m.pieces) for m in made.messages]
    assert len(wanted) - 1 <= len(sent) <= len(wanted)  # nothing may be beside the last
    for m, nbytes in zip(sent, wanted, strict=False):  # whole elements are sent
        assert abs(m.nbytes - nbytes) < 8
    assert len(sent) > 5 and not streams.races
    assert [streams.heavy(m) > 0 for m in sent[:2]] == [policy == "ours"] * 2
    products = [i for i, name in enumerate(streams.own[:backward]) if is_heavy(name)]
    assert all(m.waited is not None and products[-1] < m.waited <= backward for m in sent)


def test_the_model_sees_what_a_gpu_would_do_wrong() -> None:
    """A result that is read, written or freed too early, what is sent and written too early, and two streams."""
    import torch

    sent = torch.ops._c10d_functional
    with alone_among(RANKS, rank=0):
        one, other = (torch.distributed.new_group([0, 1, 2, 3]).group_name for _ in range(2))
        found: list[int] = []
        faults: dict[str, Any] = {
            "waited": lambda x, y: sent.wait_tensor(y).add_(1),
            "view": lambda x, y: y[:1].view(-1),
            "sent is read": lambda x, y: x + 1,
            "read": lambda x, y: y[:1] + 1,
            "written": lambda x, y: y.zero_(),
            "sent is written": lambda x, y: x[:1].mul_(2),
            "some are written": lambda x, y: torch._foreach_zero_([torch.zeros(1), x]),
            "another stream": lambda x, y: sent.wait_tensor(sent.all_reduce_(y, "sum", other)),
            "the same stream": lambda x, y: sent.wait_tensor(sent.all_reduce_(y, "sum", one)),
        }
        for fault in faults.values():
            x = torch.zeros(4, 2)
            with watched() as streams:
                y = sent.all_gather_into_tensor(x, RANKS, one)
                fault(x, y)
                sent.wait_tensor(y)
                x.add_(y[:4])
            assert not streams.under_way
            found.append(len(streams.races))
        assert found == [0, 0, 0, 1, 1, 1, 1, 1, 0]


def test_the_model_sees_memory_that_is_freed_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that arrive again are freed while their message is under way."""
    from pase.backends.torch.spmd.freed import FreedParameters

    started = FreedParameters._start

    def start(self: FreedParameters, brought: Any) -> None:
        begun = brought.started
        started(self, brought)
        if not begun and brought.early:
            nbytes = brought.arrays[0].untyped_storage().nbytes()
            self._resize(brought.arrays[0], 0)
            self._resize(brought.arrays[0], nbytes)

    monkeypatch.setattr(FreedParameters, "_start", start)
    streams, _ = enqueued(*run_of("tower", "again"))
    assert any("memory" in race for race in streams.races)
