"""Which modules are checked, and against what."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import on_processes, on_ranks
from pase.errors import PaseError
from tests.backends.torch.checked import run_of

pytestmark = pytest.mark.torch
RANKS = 4


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
