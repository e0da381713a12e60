"""Look-ups in a dim that is split: rows of a table, and the log-probability of a label."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import pase
from bench.cases.plans import Case
from bench.cases.torch_ranks import on_ranks
from pase import machine
from pase.compiler.problem.problem import SplitProblem
from pase.errors import PaseError
from pase.frontends import registry

pytestmark = pytest.mark.torch
LABELS = 24


def net(smoothing: float, ignored: bool) -> Any:
    """A table that learns nothing for index 3, and a loss over its classes, of which one has no probability."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    class Net(nn.Module):
        never: Any

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(LABELS, 16, padding_idx=3)
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
            self.head = nn.Linear(16, LABELS, bias=False)
            self.register_buffer("never", torch.arange(LABELS) == LABELS - 1)

        def forward(self, ids: Any, labels: Any) -> Any:
            x = self.table(ids)
            scores = self.head(x + self.down(torch.tanh(self.up(x))))
            if not smoothing:  # which spreads probability over all classes
                scores = scores.masked_fill(self.never, float("-inf"))
            return cross_entropy(
                scores.view(-1, LABELS),
                labels.view(-1),
                label_smoothing=smoothing,
                ignore_index=5 if ignored else -100,
            )

    torch.manual_seed(0)
    return Net().double()


@pytest.mark.parametrize(
    ("smoothing", "ignored", "at_once"), [(0.0, True, 1), (0.0, False, 1), (0.1, False, 0)]
)
def test_each_is_one_op_and_equals_the_whole_model_s(smoothing: float, ignored: bool, at_once: int) -> None:
    """Label smoothing reads the log-probabilities of all classes, so they are made, op by op."""
    import torch

    module = net(smoothing, ignored)
    ids, labels = torch.arange(64).reshape(8, 8) % LABELS, torch.arange(64).reshape(8, 8) * 5 % (LABELS - 1)
    if not ignored:  # the usual number, which is no class
        labels[0, :3] = -100
    traced = registry.trace(module, ids, labels)
    problem = SplitProblem.of(traced.graph, 4, machine.load("h100x8"), "analytic", "adam")
    plan = Case(traced=traced, problem=problem).plan("megatron/megatron_2x2")
    assert plan is not None
    run = plan.torch
    code = run.code(rank=1)
    assert code.count("= plan_rows(") == 1
    assert code.count("= plan_log_probability(") == at_once and ("torch.exp(" in code) == (not at_once)
    assert ("torch.negative(" in code) == (not at_once)
    assert ("torch.where(" in code) == (ignored or not at_once)
    module(ids, labels).backward()

    def on_rank(rank: int) -> tuple[float, dict[str, Any]]:
        mine = copy.deepcopy(module)
        loss = float(run.parallelize(mine).backward(ids, labels))
        return loss, {n: p.grad.full_tensor() for n, p in mine.named_parameters()}

    expected = {n: p.grad for n, p in module.named_parameters()}
    assert float(expected["table.weight"][3].abs().max()) == 0
    module.zero_grad()
    for loss, gradients in on_ranks(4, on_rank):
        assert loss == pytest.approx(module(ids, labels).item(), rel=1e-12)
        torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-13)


def test_gradients_divided_by_frequency_are_refused_where_a_rank_sees_a_part() -> None:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4, scale_grad_by_freq=True)

        def forward(self, ids: Any) -> Any:
            return self.table(ids).square().mean()

    module, ids = Net(), torch.zeros(8, dtype=torch.int64)
    run = pase.compile(module, ids, devices=2, mesh="2", target="ddp", baselines=False).torch
    with pytest.raises(PaseError, match="how often an index occurs"):
        run.code(rank=0)
