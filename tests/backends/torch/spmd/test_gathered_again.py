"""Backward gathers parameters again: the numbers, what is sent and when, and the memory that it saves."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import pase
from bench.cases.plans import Case
from bench.cases.torch_ranks import alone_among, on_processes, on_ranks
from pase import machine
from pase.backends.torch.spmd.gathered_again import again_messages
from pase.backends.torch.spmd.gathers import gather_messages
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.variants import Variant
from pase.errors import Infeasible, PaseError
from pase.frontends import registry
from pase.machine import mesh_from
from tests.backends.torch.models import case
from tests.backends.torch.steps import whole
from tests.backends.torch.test_memory import bounded_by_the_peak

pytestmark = pytest.mark.torch
RANKS = 4
SMALL = 4000.0


def under(model: str, strategy: str = "fsdp", ranks: int = RANKS, bucket_bytes: float = SMALL) -> Any:
    """A case, and its plan that gathers again, with messages of this size in its account, too."""
    c = case(model, ranks)
    small = replace(c.case.problem.machine, bucket_bytes=bucket_bytes)
    problem = replace(c.case.problem, machine=small).varied(c.case.traced, Variant(gathers_again=True))
    plan = Case(traced=c.case.traced, problem=problem).plan(strategy)
    assert plan is not None
    run = replace(plan.torch, gathers_again=True)
    assert run.program.ops and run.leaves and run.bucket_bytes == bucket_bytes
    return c, run


def steps(module: Any, batch: Any, run: Any, many: int = 3, **how: Any) -> list[Any]:
    """On each rank: losses and the parameters afterwards."""
    import torch

    def on_rank(rank: int) -> Any:
        mine = copy.deepcopy(module)
        step = run.train_step(mine, torch.optim.SGD, lr=0.1, **how)
        losses = [step(*batch).detach() for _ in range(many)]
        return losses, {k: whole(t) for k, t in mine.state_dict().items()}

    return on_ranks(RANKS, on_rank)


def alone(module: Any, loss: Any, many: int = 3) -> Any:
    import torch

    mine = copy.deepcopy(module)
    optimizer, losses = torch.optim.SGD(mine.parameters(), lr=0.1), []
    for _ in range(many):
        optimizer.zero_grad()
        made = loss(mine)
        made.backward()
        optimizer.step()
        losses.append(made.detach())
    return losses, mine.state_dict()


@pytest.mark.some(3)
@pytest.mark.parametrize("model", ["tower", "bert", "pixels", "experts", "t5", "lstm", "cells"])
def test_the_step_is_the_same_and_sends_the_plans_list(model: str) -> None:
    """Loss, gradients and state in float64. What backward does not read is gathered once."""
    import torch

    from pase.backends.audit.torch import planned, planned_in_step, sent_by_one_rank

    c, run = under(model)

    def on_rank(rank: int) -> Any:
        module = copy.deepcopy(c.module)
        loss = run.parallelize(module).backward(*c.batch)
        return loss, {k: whole(p.grad) for k, p in module.named_parameters() if p.grad is not None}

    for loss, gradients in on_ranks(RANKS, on_rank):
        torch.testing.assert_close(loss, c.loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients, c.gradients, rtol=1e-12, atol=1e-12)
    with alone_among(RANKS, rank=1):
        sent = sent_by_one_rank(run)
    assert sent == planned_in_step(run)
    kept = replace(run, gathers_again=False)
    more = sum(n * k for (*_, n), k in sent.items()) - sum(
        n * k for (*_, n), k in planned(kept.program).items()
    )
    gathers = sum(n * k for (kind, *_, n), k in planned(kept.program).items() if kind == "all_gather")
    assert 0 < more <= gathers


def test_messages_come_again_in_the_opposite_order_one_ahead() -> None:
    """When one arrives, the one that is needed next starts, and no other."""
    from pase.backends.torch.spmd.process_groups import AxisGroups

    c, run = under("tower")
    forward = gather_messages(run.program, SMALL)
    backward = again_messages(run.program, forward)
    assert len(forward) > len(backward) > 3  # nothing of some messages is needed, a bias for example

    def on_rank(rank: int) -> list[tuple[str, int]]:
        events: list[tuple[str, int]] = []
        step = run.parallelize(copy.deepcopy(c.module))
        groups, under_way = step.walk.groups, list[Any]()

        def started(x: Any, axes: Any, into: Any) -> Any:
            under_way.append(AxisGroups.started_all_gather(groups, x, axes, into))
            events.append(("started", len(under_way) - 1))
            return under_way[-1]

        def received(x: Any) -> Any:
            events.extend(("received", i) for i, y in enumerate(under_way) if x is y)
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
    k, end = len(forward), len(forward) + len(backward)
    again = events[2 * k :]
    assert again[0] == ("started", k)
    ahead = [e for i in range(k, end - 1) for e in (("received", i), ("started", i + 1))]
    assert again[1:] == [*ahead, ("received", end - 1)]


def test_the_timeline_gathers_again_in_backward_one_message_ahead() -> None:
    """Layer by layer from the last: a gather begins when the one before it is needed, and the first after forward."""
    module, x = deep()
    traced = registry.trace(module, (x,))
    small = replace(machine.load("h100x8"), bucket_bytes=10_000.0)
    problem = SplitProblem.of(traced.graph, RANKS, small, "analytic", "sgd")
    plan = Case(traced=traced, problem=problem.varied(traced, Variant(gathers_again=True))).plan("fsdp")
    assert plan is not None
    begins = {e.name: e.start_ns for e in plan.timeline}
    again = {n: t for n, t in begins.items() if n.endswith(".again1")}
    first, *others = range(11, 0, -1)
    assert sorted(again, key=again.__getitem__) == [
        f"all_gather: layers.{i}.weight.all_gather.again1" for i in (first, *others)
    ]
    starts = list(again[n] for n in sorted(again, key=again.__getitem__))
    assert starts[0] >= begins["reduce@forward'"]
    assert all(t >= begins[f"layers.{i + 1}.weight:dot'"] for t, i in zip(starts[1:], others, strict=True))


@pytest.mark.parametrize(
    ("model", "strategy"), [("tower", "fsdp"), ("block", "fsdp"), ("tower", "random1@2x4")]
)
def test_the_account_is_the_tracked_peak(model: str, strategy: str) -> None:
    c, run = under(model, strategy, 8)
    found = run.memory()
    assert found.predicted is not None
    predicted = found.predicted.total - c.case.problem.machine.device.workspace_bytes
    assert predicted == pytest.approx(found.total, rel=0.1)


def test_the_profile_is_no_more_than_the_peak() -> None:
    c = case("tower", 8).case
    problem = c.problem.varied(c.traced, Variant(gathers_again=True))
    bounded_by_the_peak(problem, mesh_from("2x4", 8), "adam")


@cache
def deep() -> Any:
    """Twelve equal layers whose weights are more than their activations: (module, batch)."""
    import torch

    class Deep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(12))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.square().mean()

    torch.manual_seed(0)
    return Deep().double(), torch.randn(128, 64, dtype=torch.float64)


def within(bytes_above_workspace: float | None, **options: Any) -> Any:
    """The plan of ``deep`` on four devices with messages of one layer, within a limit."""
    module, x = deep()
    small = replace(machine.load("h100x8"), bucket_bytes=10_000.0)
    limit = None if bytes_above_workspace is None else bytes_above_workspace + small.device.workspace_bytes
    asked = {"memory_limit": "none" if limit is None else int(limit), "remat": "none", "accumulate": 1}
    given = {"devices": RANKS, "machine": small, "optimizer": "sgd", "mesh": "4", "baselines": False}
    return pase.compile(module, x, **{**given, **asked, **options})


@pytest.mark.release
def test_a_limit_that_only_gathering_again_meets() -> None:
    """The plan is found, priced and run as such, within the limit."""
    import torch

    from pase.backends.audit.torch import planned_in_step, sent_by_one_rank

    module, x = deep()
    free = within(None)
    assert not free.gathers_again
    space = machine.load("h100x8").device.workspace_bytes
    limit = 0.55 * (free.memory.total - space)
    with pytest.raises(Infeasible):
        within(limit, regather="none")
    found = within(limit)
    assert found.gathers_again and found.memory.total - space <= limit
    assert "parameters gathered again for backward" in str(found)
    assert any(c.times == 2 for c in found.collectives if c.kind == "all_gather" and c.phase == "forward")
    (mark,) = found.timeline.marks
    assert (mark.end_ns - mark.start_ns) / 1e9 == pytest.approx(found.cost, rel=0.05)
    run = found.torch
    wanted, state = alone(module, lambda m: m(x))
    for losses, after in steps(module, (x,), run):
        torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(after, state, rtol=1e-12, atol=1e-12)
    with alone_among(RANKS, rank=0):
        assert sent_by_one_rank(run) == planned_in_step(run)
    assert found.memory.total - space == pytest.approx(run.memory().total, rel=0.1)


def test_a_target_that_gathers_again_is_asked_to() -> None:
    """FSDP2, within a limit that it meets in no other way."""
    space = machine.load("h100x8").device.workspace_bytes
    fsdp2 = {"target": "fsdp2", "mesh": "shard=4"}
    free = within(None, **fsdp2)
    limit = 0.7 * (free.memory.total - space)  # gathered again it needs 0.61, otherwise 0.86
    with pytest.raises(Infeasible):
        within(limit, regather="none", **fsdp2)
    found = [within(limit, regather=asked, **fsdp2) for asked in ("auto", "all")]
    assert [plan.gathers_again for plan in (free, *found)] == [False, True, True]


def test_what_does_not_gather_again_refuses() -> None:
    with pytest.raises(PaseError, match="jax frontend") as e:
        pase.compile("zoo:mlp", devices=2, regather="all", baselines=False)
    assert e.value.where == "regather='all'"
    with pytest.raises(PaseError, match="search over stages"):
        within(None, regather="all", pipeline=2)


def test_a_plan_says_so_in_its_file_too_if_it_gathers_anything(tmp_path: Path) -> None:
    c = case("tower", RANKS)
    problem = c.case.problem.varied(c.case.traced, Variant(gathers_again=True))
    for name, again in (("data_parallel", False), ("fsdp", True)):
        plan = Case(traced=c.case.traced, problem=problem).plan(name)
        assert plan is not None and plan.gathers_again == again
        plan.save(tmp_path / "layout.json")
        assert pase.load(tmp_path / "layout.json").gathers_again == again


def test_a_compiled_step_gathers_again() -> None:
    """On two processes."""
    assert max(on_processes(2, differences_of_compiled, "forkserver", seconds=300.0)) < 1e-12


def differences_of_compiled(rank: int) -> float:
    """The largest difference of a rank's gradients."""
    c, run = under("tower", ranks=2)
    mine = copy.deepcopy(c.module)
    run.parallelize(mine, compile="aot_eager").backward(*c.batch)
    gradients = {k: whole(p.grad) for k, p in mine.named_parameters() if p.grad is not None}
    assert gradients.keys() == c.gradients.keys()
    return max(float((g - c.gradients[k]).abs().max()) for k, g in gradients.items())


@pytest.mark.release
def test_inductor_gathers_again() -> None:
    """Three steps on two processes, compiled: the numbers, and each gather of the plan's list in the compiled code."""
    from pase.backends.audit.torch import planned_in_step

    _, run = under("tower", ranks=2)
    wanted = Counter({n: k for (kind, *_, n), k in planned_in_step(run).items() if kind == "all_gather"})
    for worst, gathered in on_processes(2, compiled_steps, "forkserver", seconds=500.0):
        assert worst < 1e-12 and Counter(gathered) == wanted


def compiled_steps(rank: int) -> tuple[float, list[int]]:
    """The largest difference of losses and parameters, and the bytes of each gather in the compiled code."""
    import torch
    from torch._inductor.utils import run_and_get_code

    c, run = under("tower", ranks=2)
    mine = copy.deepcopy(c.module)
    step = run.train_step(mine, torch.optim.SGD, lr=0.1, compile=True)
    first, (code,) = run_and_get_code(step, *c.batch)
    losses = [first, step(*c.batch), step(*c.batch)]
    wanted, state = alone(c.module, lambda m: m(*c.batch))
    pairs = [*zip(losses, wanted, strict=True), *((whole(t), state[k]) for k, t in mine.state_dict().items())]
    gathered = re.findall(r"assert_size_stride\(\w+, \(([\d, ]+)\), .*all_gather_into_tensor", code)
    sizes = [math.prod(int(n) for n in s.split(",") if n.strip()) * 8 for s in gathered]
    return max(float((a - b).detach().abs().max()) for a, b in pairs), sizes


def test_what_is_kept_goes_through_the_users_hooks() -> None:
    """PyTorch calls the innermost hooks of saved tensors alone."""
    import torch

    c, run = under("tower")

    def on_rank(rank: int) -> Any:
        step, packed = run.parallelize(copy.deepcopy(c.module)), list[int]()

        def pack(x: Any) -> Any:
            packed.append(x.nbytes)
            return x.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = step(*c.batch)
        loss.backward()
        return loss.detach(), len(packed)

    for loss, many in on_ranks(RANKS, on_rank):
        torch.testing.assert_close(loss, c.loss, rtol=1e-12, atol=1e-12)
        assert many > 5
