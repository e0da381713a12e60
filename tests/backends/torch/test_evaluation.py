"""Evaluation of a module between the steps of a plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import on_ranks
from pase.errors import PaseError

pytestmark = pytest.mark.torch


def net() -> Any:
    """A tied table, a dropout and a batch norm, with logits as its result."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.drop, self.norm = nn.Embedding(8, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.table.weight
            self.frozen = nn.Identity().eval()

        def forward(self, ids: Any) -> Any:
            return self.head(self.frozen(self.drop(self.norm(self.table(ids)))))

    torch.manual_seed(0)
    return Net().double()


def loss(module: Any, ids: Any) -> Any:
    from torch.nn.functional import cross_entropy

    return cross_entropy(module(ids), ids)


@pytest.mark.parametrize("target", ["ddp", "fsdp2"])
def test_logits_are_the_whole_module_s_and_training_goes_on(target: Any) -> None:
    import torch

    module, ids = net(), torch.arange(8)
    run = pase.compile(module, ids, loss=loss, devices=4, mesh="4", target=target, baselines=False).torch

    def on_rank(rank: int) -> tuple[Any, Any, list[float]]:
        mine = copy.deepcopy(module)
        step = run.train_step(mine, torch.optim.SGD, lr=0.5)
        losses = [float(step(ids))]
        own = [(n, p) for n, p in mine.named_parameters(remove_duplicate=False)]
        with step.evaluating() as whole:
            logits = whole(ids[:3])
            assert not logits.requires_grad and not whole.training
        assert all(mine.get_parameter(n) is p for n, p in own)
        assert [m.training for m in mine.modules()] == [m.training for m in module.modules()]
        alone = copy.deepcopy(module).eval()
        alone.load_state_dict(
            {k: getattr(x, "full_tensor", lambda x=x: x)().detach() for k, x in mine.state_dict().items()}
        )
        with torch.no_grad():
            expected = alone(ids[:3])
        losses.append(float(step(ids)))
        return logits, expected, losses

    for logits, expected, losses in on_ranks(4, on_rank):
        torch.testing.assert_close(logits, expected, rtol=0, atol=0)
        assert losses[1] < losses[0]


@pytest.mark.parametrize("how", ["in place", "by assignment"])
def test_a_forward_that_writes_is_refused(how: str) -> None:
    import torch

    module, ids = net(), torch.arange(8)
    run = pase.compile(module, ids, loss=loss, devices=2, mesh="2", target="ddp", baselines=False).torch

    def on_rank(rank: int) -> None:
        step = run.parallelize(copy.deepcopy(module))
        kept = step.module.norm.running_mean
        with pytest.raises(PaseError) as e, step.evaluating() as whole:
            if how == "in place":
                whole.norm.running_mean.add_(1)
            else:
                whole.norm.running_mean = torch.ones(4)
        assert "'norm.running_mean'" in e.value.what and e.value.fix
        assert step.module.norm.running_mean is kept

    on_ranks(2, on_rank)


def test_a_rank_of_a_pipeline_has_no_whole_module() -> None:
    from torch import nn

    from pase.backends.torch.pipeline.run import PipelinedModule

    nothing: Any = None
    with pytest.raises(PaseError) as e:
        PipelinedModule(plan=nothing, module=nn.Identity(), links=nothing, stages={}).evaluating()
    assert e.value.where == "step.evaluating()" and e.value.fix is not None and "checkpoint" in e.value.fix
