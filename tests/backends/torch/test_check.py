"""``plan.torch.check`` on 4 ranks: right steps agree, planted faults are found by name, and no state changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

import pase
from bench.cases.plans import Case
from bench.cases.torch_ranks import on_processes, on_ranks
from pase import machine
from pase.backends.torch.buffers import StepBuffers
from pase.backends.torch.plan import ParallelModule
from pase.backends.torch.spmd.process_groups import AxisGroups
from pase.compiler.problem.problem import SplitProblem
from pase.errors import PaseError
from pase.frontends import registry
from pase.frontends.torch.doubts import doubts

pytestmark = pytest.mark.torch
RANKS = 4


def model() -> tuple[Any, Any]:
    """A model with a buffer that the step writes, a frozen and an unused parameter, and a target under no_grad."""
    import torch
    from torch import nn
    from torch.nn.functional import relu

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.norm, self.head = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)
            self.fixed = nn.Parameter(torch.randn(16), requires_grad=False)
            self.unused = nn.Parameter(torch.randn(8))

        def net(self, x: Any) -> Any:
            return self.head(self.norm(relu(self.enc(x * self.fixed))))

        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                target = (self.net(x) / 0.5).softmax(-1)
            return -(target * self.net(x).log_softmax(-1)).sum(-1).mean()

    torch.manual_seed(0)
    return Net(), torch.randn(16, 16)


@pytest.fixture(scope="module")
def given() -> tuple[Any, Any, Case]:
    module, x = model()
    traced = registry.trace(copy.deepcopy(module), x)
    problem = SplitProblem.of(traced.graph, RANKS, machine.load("h100x8"), "analytic", "adam")
    return module, x, Case(traced=traced, problem=problem)


def run_of(case: Case, strategy: str) -> Any:
    plan = case.plan(strategy)
    assert plan is not None
    run = plan.torch
    assert run.program.ops and run.leaves  # computed once here, not once per thread
    return run


def state(step: Any) -> dict[str, Any]:
    import torch

    both = (*step.module.named_parameters(), *step.module.named_buffers())
    held = {path: getattr(x, "_local_tensor", x).detach().clone() for path, x in both}
    return {**held, "random": torch.get_rng_state(), "steps": torch.tensor(step.steps)}


@pytest.mark.parametrize("strategy", ["random1@2x2"])
def test_a_right_step_agrees_and_nothing_is_changed(given: Any, strategy: str) -> None:
    import torch

    module, x, case = given
    run = run_of(case, strategy)

    def on_rank(rank: int) -> Any:
        step = run.parallelize(copy.deepcopy(module))
        step.backward(x)  # so that there are gradients
        before = state(step), {path: p.grad for path, p in step.module.named_parameters()}
        values = {path: g.to_local().clone() for path, g in before[1].items() if g is not None}
        found = step.check(x, most_lines=6)
        torch.testing.assert_close(state(step), before[0], rtol=0, atol=0)
        for path, p in step.module.named_parameters():
            assert p.grad is before[1][path]
            assert path not in values or torch.equal(p.grad.to_local(), values[path])
        return found

    ranks = on_ranks(RANKS, on_rank)
    found = ranks[0]
    assert found.verdict == "agrees", str(found)
    names = ["unused", "enc.weight", "enc.bias", "norm.weight", "norm.bias", "head.weight", "head.bias"]
    assert [p.name for p in found.parameters] == names
    assert found.reference.kind == "the unsharded module" and found.reference.loss_agrees
    assert all(r.parameters == found.parameters and r.loss == found.loss for r in ranks)


ENC = (32, 16)
LOST = {
    "data_parallel": {
        "the sum is dropped": ("all_reduce", lambda right, self, x, *a: x),
        "a mean": ("all_reduce", lambda right, self, x, *a: right(self, x, *a) / 4),
        "one rank's sum is lost": (
            "all_reduce",
            lambda right, self, x, *a: right(self, x, *a) * (self.place != (2,)),
        ),
    },
    "fsdp": {
        "a part is zero": (
            "reduce_scatter",
            lambda right, self, x, *a: right(self, x, *a) * (self.place != (2,)),
        )
    },
}


def planted(strategy: str, fault: str) -> Any:
    """The gradient of enc.weight, recognized by its shape, goes wrong where it is summed over the ranks."""
    kind, how = LOST[strategy][fault]
    right = getattr(AxisGroups, kind)

    def wrong(self: Any, x: Any, *args: Any) -> Any:
        mine = x.numel() == ENC[0] * ENC[1] and x.is_floating_point() and set(x.shape) & {16}
        return how(right, self, x, *args) if mine else right(self, x, *args)

    return patch.object(AxisGroups, kind, wrong)


@pytest.mark.parametrize(("strategy", "fault"), [(s, f) for s, every in LOST.items() for f in every])
def test_a_planted_fault_is_named(given: Any, strategy: str, fault: str) -> None:
    module, x, case = given
    run = run_of(case, strategy)
    with planted(strategy, fault):
        found, *_ = on_ranks(RANKS, lambda rank: run.check(module, x, most_lines=0))
    assert [p.name for p in found.by("off")] == ["enc.weight"], str(found)


def test_statistics_that_are_not_written_are_off(given: Any) -> None:
    module, x, case = given
    run = run_of(case, "data_parallel")
    right = StepBuffers.write_back

    def wrong(self: Any, new: Any) -> None:
        right(self, {path: x for path, x in new.items() if path != "norm.running_var"})

    with patch.object(StepBuffers, "write_back", wrong):
        found, *_ = on_ranks(RANKS, lambda rank: run.check(module, x, most_lines=0))
    assert found.verdict == "off" and not found.by("off"), str(found)
    assert [d.name for d in found.reference.state_off] == ["norm.running_var"]


def test_gradients_of_an_earlier_call_are_off(given: Any) -> None:
    """The step runs with other parameters before it runs with those that are compared."""
    module, x, case = given
    run = run_of(case, "data_parallel")
    right, kept = ParallelModule.backward, {}

    def stale(self: Any, *batch: Any) -> Any:
        loss = right(self, *batch)
        p = dict(self.module.named_parameters())["head.weight"]
        p.grad = kept.setdefault(id(self), p.grad)
        return loss

    with patch.object(ParallelModule, "backward", stale):
        found, *_ = on_ranks(RANKS, lambda rank: run.check(module, x, most_lines=0))
    assert [p.name for p in found.by("off")] == ["head.weight"], str(found)


def test_lines_alone_see_it_and_name_what_may_be_meant(given: Any) -> None:
    """All ranks have the same wrong gradient. Without a reference, the target under no_grad leaves it undecided."""
    module, x, case = given
    run = run_of(case, "data_parallel")
    with planted("data_parallel", "a mean"):
        found, *_ = on_ranks(RANKS, lambda rank: run.check(module, x, against="none", most_lines=20))
    wrong = {p.name: p.why for p in found.by("undecided")}
    assert "a value without a gradient at" in wrong["enc.weight"], str(found)


@pytest.fixture
def few_lines() -> Iterator[None]:
    with patch.dict(ParallelModule.check.__kwdefaults__, most_lines=4):
        yield


def test_a_checked_step_trains_or_names_what_is_off(given: Any, few_lines: None) -> None:
    import torch

    module, x, case = given
    run = run_of(case, "data_parallel")

    def on_rank(rank: int) -> Any:
        step = run.train_step(copy.deepcopy(module), torch.optim.SGD, lr=0.1, check=True)
        return float(step(x)), step.result

    with (
        planted("data_parallel", "a mean"),
        pytest.raises(PaseError, match=r"OFF enc\.weight"),
    ):
        on_ranks(RANKS, on_rank)
    alone = copy.deepcopy(module)
    for loss, result in on_ranks(RANKS, on_rank):
        assert result.verdict == "agrees" and loss == pytest.approx(float(alone(x).detach()), rel=1e-5)


def test_what_is_sharded_already_is_refused(given: Any) -> None:
    module, x, case = given
    run = run_of(case, "data_parallel")

    def on_rank(rank: int) -> None:
        step = run.parallelize(copy.deepcopy(module))
        run.check(step.module, x)

    with pytest.raises(PaseError) as e:
        on_ranks(RANKS, on_rank)
    assert e.value.where.startswith("module.") and "parallelize" in e.value.fix


def layered(devices: int, **settings: Any) -> tuple[Any, Any, Any]:
    """A model of four layers under a plan with two micro-batches: (plan, module, batch)."""
    import torch
    from torch import nn

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return (self.head(x) ** 2).mean()

    torch.manual_seed(0)
    module, x = Layers(), torch.randn(16, 8)
    plan = pase.compile(module, x, devices=devices, accumulate=2, memory_limit="none", **settings)
    return plan.torch, module, x


def test_micro_batches() -> None:
    plan, module, x = layered(RANKS, pipeline="none")
    assert plan.program.ops and plan.leaves and plan.sums
    found, *others = on_ranks(RANKS, lambda rank: plan.check(module, x))
    assert found.verdict == "agrees" and found.devices == RANKS, str(found)
    assert found.reference is not None and len(found.parameters) == 10
    assert all(o.parameters == found.parameters for o in others)


def in_stages(rank: int) -> tuple[str, str, int, tuple[str, ...]]:
    plan, module, x = layered(2, pipeline=2)
    found = plan.check(module, x)
    return found.verdict, found.no_reference, found.devices, tuple(p.name for p in found.parameters)


def test_stages() -> None:
    """The lines alone decide, because no rank has the unsharded module."""
    one, two = on_processes(2, in_stages, "forkserver")
    assert one == two and one[0] == "agrees" and "stages" in one[1] and one[2] == 2
    assert len(one[3]) == 10 and "layers.3.weight" in one[3]


def test_doubts_lie_between_a_parameter_and_the_loss(given: Any) -> None:
    _, _, case = given
    found = doubts(case.traced)
    assert {"enc.weight", "head.bias"} <= set(found) and "unused" not in found
    assert "a value without a gradient at" in found["enc.weight"] and "test_check.py" in found["enc.weight"]
