"""``plan.torch.check`` on 4 ranks: planted faults are found by name, and a checked step trains."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from bench.cases.torch_ranks import on_ranks
from pase.backends.torch.buffers import StepBuffers
from pase.backends.torch.parallel import ParallelModule
from pase.backends.torch.spmd.messages import GradientSending
from pase.errors import PaseError
from tests.backends.torch.checked import run_of

pytestmark = pytest.mark.torch
RANKS = 4
ENC = (32, 16)
LOST = {
    "data_parallel": {
        "the sum is dropped": lambda own, arrived, place: own,
        "a mean": lambda own, arrived, place: arrived / 4,
        "one rank's sum is lost": lambda own, arrived, place: arrived * (place != (2,)),
    },
    "fsdp": {"a part is zero": lambda own, arrived, place: arrived * (place != (2,))},
}
"""Strategy -> fault -> what a rank makes of its own gradient and of the one that has arrived."""


def planted(strategy: str, fault: str) -> Any:
    """The gradient of enc.weight, recognized by its shape, goes wrong where it is summed over the ranks."""
    how, right = LOST[strategy][fault], GradientSending._go_on
    own: dict[Any, Any] = {}

    def wrong(self: Any, g: Any) -> None:
        if g.done:
            if set(own[g].shape) == set(ENC):
                g.array = how(own[g], g.array, self.groups.place)
        else:
            own[g] = g.array
        right(self, g)

    return patch.object(GradientSending, "_go_on", wrong)


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
