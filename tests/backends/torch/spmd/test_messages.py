"""Gradients of parameters are sent in messages while backward goes on."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import pase
from bench.cases.plans import Case
from bench.cases.torch_ranks import alone_among, on_ranks
from pase import machine
from pase.compiler.problem.problem import SplitProblem
from pase.frontends import registry
from tests.backends.torch.micro_batches import assert_equal_on_ranks
from tests.backends.torch.models import case
from tests.backends.torch.steps import BUCKET, whole

pytestmark = pytest.mark.torch
RANKS = 4


def under(
    c: Any, pieces: Sequence[Sequence[tuple[int, float, float]]], strategy: str = "data_parallel"
) -> Any:
    """The plan with a bucket plan made by hand. pieces: of each message, (tensor, where it begins, where it ends), as
    shares of the tensor."""
    from pase.plan.buckets import holding, problem_of
    from pase.schedule.plan import BucketPlan, Message, Piece

    plan = c.case.plan(strategy)
    assert plan is not None
    problem = problem_of(plan)
    messages = []
    for message in pieces:
        made = []
        for t, begin, end in message:
            n = problem.tensors[t].nbytes
            made.append(Piece(tensor=t, offset=int(begin * n), nbytes=int(end * n) - int(begin * n)))
        messages.append(Message(pieces=tuple(made)))
    return holding(plan, problem, BucketPlan(policy="by hand", messages=tuple(messages))).torch


def bytes_of(sent: Counter[tuple[str, tuple[str, ...], int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for (kind, _, nbytes), times in sent.items():
        found[kind] += nbytes * times
    return found


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("how", ["joined", "cut"])
def test_messages_are_the_bucket_plans(how: str, again: bool) -> None:
    """As recorded from what PyTorch issues: tensors are joined and cut. The results do not change."""
    from pase.backends.audit.torch import planned, planned_in_step, sent_by_one_rank
    from pase.compiler.problem.variants import recomputed
    from pase.plan.buckets import problem_of

    c = case("tower", RANKS)
    plan = c.case.plan("data_parallel")
    assert plan is not None
    sums = range(len(problem_of(plan).tensors))
    if how == "joined":
        groups = (sums[:5], sums[5:11], sums[11:])
        run = under(c, [[(t, 0, 1) for t in group] for group in groups])
    else:
        halves = [[(t, 0, 0.5) for t in sums], [(t, 0.5, 1) for t in sums]]
        run = under(c, halves)
    if again:
        run = replace(run, blocks=recomputed(c.case.traced, "light"))
    assert run.program.messages and run.leaves
    with alone_among(RANKS, rank=1):
        sent = sent_by_one_rank(run)
    assert sent == planned_in_step(run)
    assert bytes_of(sent) == bytes_of(planned(run.program)) == bytes_of(planned(plan.torch.program))
    large = [n for kind, _, n in sent.elements() if kind == "all_reduce" and n > 8]
    assert len(large) == (3 if how == "joined" else 2)
    assert_equal_on_ranks(c, run)


@dataclass
class Log:
    """What a rank's process groups did, in order."""

    events: list[str] = field(default_factory=list)

    def watch(self, step: Any) -> None:
        from pase.backends.torch.spmd.messages import GradientSending
        from pase.backends.torch.spmd.process_groups import AxisGroups

        log, sending, groups = self.events, step.walk.sending, step.walk.groups

        def give(number: int, root: object, gradient: Any) -> None:
            log.append(f"given {number}")
            GradientSending.give(sending, number, root, gradient)

        def started(x: Any, axes: Any, *, overwrite: bool) -> Any:
            log.append(f"started {x.numel()}")
            return AxisGroups.started_all_reduce(groups, x, axes, overwrite=overwrite)

        def received(x: Any) -> Any:
            log.append("received")
            return AxisGroups.received(groups, x)

        sending.give = give
        object.__setattr__(groups, "started_all_reduce", started)
        object.__setattr__(groups, "received", received)


def test_messages_start_while_backward_goes_on() -> None:
    """Each starts with the last of its gradients, and nothing is waited for before backward has ended. All ranks send
    the same messages in the same order."""
    c = case("block", RANKS)
    plan = c.case.plan("data_parallel")
    assert plan is not None
    run = replace(plan.torch, bucket_bytes=2000.0)
    assert run.program.ops and run.leaves

    def on_rank(rank: int) -> list[str]:
        log, step = Log(), run.parallelize(copy.deepcopy(c.module))
        log.watch(step)
        step.backward(*c.batch)
        return log.events

    events, *others = on_ranks(RANKS, on_rank)
    assert all(x == events for x in others)
    started = [i for i, e in enumerate(events) if e.startswith("started")]
    given = [i for i, e in enumerate(events) if e.startswith("given")]
    first_wait = events.index("received")
    assert len(started) > 4 and len(given) == len(c.gradients)
    assert all(events[i - 1].startswith("given") for i in started)  # none waits for another
    assert first_wait > max(*started, *given) and sum(i < given[-1] for i in started) == len(started) - 1


def test_a_link_sends_its_messages_in_the_plans_order() -> None:
    """Even if backward makes the gradients of a later one first."""
    c = case("tower", RANKS)
    plan = c.case.plan("data_parallel")
    assert plan is not None
    count = len(problem_tensors(plan))
    run = under(c, [[(t, 0, 1)] for t in reversed(range(count))])
    forward = under(c, [[(t, 0, 1)] for t in range(count)])
    orders = []
    for of in (run, forward):
        assert of.program.messages and of.leaves

        def on_rank(rank: int, of: Any = of) -> list[str]:
            log, step = Log(), of.parallelize(copy.deepcopy(c.module))
            log.watch(step)
            step.backward(*c.batch)
            return [e for e in log.events if e.startswith("started")]

        every = on_ranks(RANKS, on_rank)
        assert all(x == every[0] for x in every)
        orders.append(every[0])
    assert orders[0] == orders[1][::-1]
    assert_equal_on_ranks(c, run)
    assert_equal_on_ranks(c, forward)


def problem_tensors(plan: Any) -> Any:
    from pase.plan.buckets import problem_of

    return problem_of(plan).tensors


def mixed() -> tuple[Any, Any]:
    """Tied weights, a parameter that nothing reads, a frozen one, one read twice, and parameters of two dtypes."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm = nn.Embedding(24, 16), nn.LayerNorm(16).double()
            self.up, self.down = nn.Linear(16, 32).double(), nn.Linear(32, 16).double()
            self.fine = nn.Linear(16, 16)
            self.unused = nn.Linear(16, 16)
            self.frozen = nn.Parameter(torch.randn(16, dtype=torch.float64), requires_grad=False)
            self.log = nn.Parameter(torch.randn(16, dtype=torch.float64))
            self.scale = nn.Parameter(torch.randn(16, dtype=torch.float64))

        def forward(self, ids: Any, labels: Any) -> Any:
            x = self.table(ids).double()
            x = x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale
            x = x * torch.exp(self.log) + torch.exp(self.log).mean()
            x = self.fine((x + self.frozen).float())
            x = x + torch.tanh(self.norm(x.double()) @ self.up.weight.t() @ self.down.weight.t()).float()
            logits = (x * self.scale.float()) @ self.table.weight.t()
            return cross_entropy(logits.view(-1, 24), labels.view(-1))

    torch.manual_seed(0)
    return Mixed(), (torch.randint(24, (16, 8)), torch.randint(24, (16, 8)))


def trained(step: Any, module: Any, batch: Any, between: Any) -> tuple[list[Any], dict[str, Any]]:
    """Losses and parameters of three updates, in which a second step adds to the gradients of the first."""
    import torch

    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses += [step(*batch).detach(), step(*(x.flip(0) for x in batch)).detach()]
        between(module)
        optimizer.step()
    return losses, {k: whole(p) for k, p in module.named_parameters()}


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    [
        ("data_parallel", 1),
        ("zero2", 1),
        ("fsdp", 1),
        ("hsdp", 1),
        ("random1@2x2", 1),
        ("random2@2x2", 1),
        ("data_parallel", 2),
        ("data_parallel", 4),
    ],
)
def test_training_is_the_unsharded_modules(strategy: str, accumulate: int) -> None:
    """Over three updates with gradients that are added to others, hooks, and clipping."""
    import torch

    module, batch = mixed()
    alone = copy.deepcopy(module)
    seen: list[Any] = []
    alone.fine.weight.register_hook(lambda g: 2 * g)
    alone.norm.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))

    def eager(*b: Any) -> Any:
        loss = alone(*b)
        loss.backward()
        return loss

    norms: list[Any] = []
    wanted = trained(
        eager,
        alone,
        batch,
        lambda m: norms.append(torch.nn.utils.clip_grad_norm_([p for p in m.parameters()], 0.5)),
    )
    ranks = 16 if strategy == "hsdp" else RANKS  # it needs two levels of links
    if accumulate > 1:
        plan = pase.compile(
            module, *batch, devices=RANKS, mesh="4", accumulate=accumulate, memory_limit="none"
        )
    else:
        traced = registry.trace(copy.deepcopy(module), *batch)
        problem = SplitProblem.of(traced.graph, ranks, machine.load("h100x8"), "analytic", "adam")
        found = Case(traced=traced, problem=problem).plan(strategy)
        assert found is not None
        plan = found
    run = replace(plan.torch, bucket_bytes=BUCKET)
    assert run.program.ops and run.leaves

    def on_rank(rank: int) -> Any:
        mine, came, own = copy.deepcopy(module), [], []
        step = run.parallelize(mine)
        mine.fine.weight.register_hook(lambda g: 2 * g)
        mine.norm.weight.register_post_accumulate_grad_hook(lambda p: came.append(whole(p.grad)))
        made = trained(step.backward, mine, batch, lambda m: own.append(step.clip_grad_norm_(0.5)))
        return made, came, own

    for made, came, own in on_ranks(ranks, on_rank):
        torch.testing.assert_close(made, wanted, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(came, seen, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close([x.float() for x in own], [x.float() for x in norms], rtol=1e-4, atol=0)


@pytest.mark.some(1)
@pytest.mark.parametrize("strategy", ["data_parallel", "zero2", "fsdp"])
def test_gradients_of_two_dtypes_are_checked(strategy: str) -> None:
    module, batch = mixed()
    traced = registry.trace(copy.deepcopy(module), *batch)
    problem = SplitProblem.of(traced.graph, RANKS, machine.load("h100x8"), "analytic", "adam")
    plan = Case(traced=traced, problem=problem).plan(strategy)
    assert plan is not None
    run = replace(plan.torch, bucket_bytes=BUCKET)
    assert run.program.ops and run.leaves
    for found in on_ranks(RANKS, lambda rank: run.check(copy.deepcopy(module), *batch, most_lines=2)):
        found.raise_if_off()


def test_buckets_are_of_about_the_given_size_and_in_the_order_of_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pase.backends.torch.spmd import messages
    from pase.backends.torch.spmd.messages import gradient_messages

    c = case("gpt2", RANKS)
    plan = c.case.plan("data_parallel")
    assert plan is not None
    program = plan.torch.program
    buckets = gradient_messages(program, 5000.0)
    sizes = [sum(x.nbytes for x in b.chunks) for b in buckets]
    largest = max(x.nbytes for b in buckets for x in b.chunks)
    assert len(buckets) > 3 and all(5000 <= n < 5000 + largest for n in sizes[:-1])
    place = {id(op): i for i, op in enumerate(program.ops)}
    begins = [min(place[id(op)] for op in program.users(x.transfer)) for b in buckets for x in b.chunks]
    assert begins == sorted(begins, reverse=True)
    numbers = [x.transfer for b in buckets for x in b.chunks]
    assert len(set(numbers)) == len(numbers)
    monkeypatch.setattr(
        messages, "FIRST_BUCKET_BYTES", 2000.0
    )  # a small one first, so that sending starts early
    first, rest = gradient_messages(program, 1e9)
    assert 2000 <= sum(x.nbytes for x in first.chunks) < 2000 + largest
    assert sum(x.nbytes for b in (first, rest) for x in b.chunks) == sum(sizes)


@pytest.mark.parametrize(("machines", "runs"), [(5000.0, 5000.0), (0.0, machine.BUCKET_BYTES)])
def test_the_machine_file_has_the_size_of_a_bucket(machines: float, runs: float, tmp_path: Any) -> None:
    """Also after the plan was saved. 0 is what XLA's compiler for CPUs does, and not PyTorch."""
    import torch

    on = replace(machine.load("h100x8"), bucket_bytes=machines)
    module, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Flatten(0)), torch.empty(8, 8)
    plan = pase.compile(
        module, x, devices=RANKS, machine=on, loss=lambda m, x: m(x).sum(), target="ddp", baselines=False
    )
    plan.save(tmp_path / "layout.json")
    assert pase.load(tmp_path / "layout.json").bucket_bytes == runs
    assert plan.torch.bucket_bytes == plan.torch.walk(None).bucket_bytes == runs


def test_a_plan_for_an_xla_cpu_is_priced_as_pytorch_sends() -> None:
    """In buckets: a gradient alone would pay its own latency."""
    import torch

    on = replace(machine.load("h100x8"), bucket_bytes=0.0, sums_readers=False)
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)), torch.nn.Flatten(0))
    module, x = module.double(), torch.empty(64, 64, dtype=torch.float64)

    def cost(on: Any) -> float:
        return pase.compile(
            module, x, devices=RANKS, machine=on, loss=lambda m, x: m(x).sum(), target="ddp", baselines=False
        ).cost

    assert cost(on) == cost(machine.load("h100x8"))


def test_a_message_waits_for_what_is_on_its_way_in_another() -> None:
    """Gradients that are summed twice: of those in the second message of this strategy, one is still under way in a
    first one when the others are there. All are sent at once."""
    from pase.backends.audit.torch import planned_in_step, sent_by_one_rank

    plan = case("gpt2", RANKS).case.plan("random1@2x2")
    assert plan is not None
    with alone_among(RANKS, rank=1):
        assert sent_by_one_rank(plan.torch) == planned_in_step(plan.torch)
