"""A language model with losses that are not means over the batch, and comparisons with the whole batch's step."""

from __future__ import annotations

import copy
from typing import Any

import pase
from bench.cases.torch_ranks import on_ranks

RANKS = 4


def model() -> tuple[Any, Any, Any]:
    """A small language model, and labels some of which are ignored: their number differs between micro-batches, and one
    micro-batch has none that counts."""
    import torch
    from torch import nn

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.up, self.head = nn.Embedding(24, 16), nn.Linear(16, 16), nn.Linear(16, 24)

        def forward(self, ids: Any) -> Any:
            return self.head(torch.tanh(self.up(self.table(ids)))).view(-1, 24)

    torch.manual_seed(0)
    labels = torch.randint(24, (16, 4))
    labels[torch.rand(16, 4) < 0.3] = -100
    labels[::4] = -100  # all of the first micro-batch
    return Words().double(), torch.randint(24, (16, 4)), labels


def losses() -> dict[str, Any]:
    import torch
    from torch.nn.functional import cross_entropy, one_hot, softmax

    weight = torch.linspace(0.5, 2, 24, dtype=torch.float64)

    def entropy(m: Any, i: Any, y: Any, **kw: Any) -> Any:
        return cross_entropy(m(i), y.view(-1), **kw)

    def dice(m: Any, i: Any) -> Any:
        """Of each example's own sums."""
        q, o = m(i).softmax(-1).view(*i.shape, 24), one_hot(i, 24).double()
        return 1 - ((2 * (q * o).sum(1) + 1) / ((q + o).sum(1) + 1)).mean()

    return {
        "counted": entropy,
        "summed": lambda m, i, y: entropy(m, i, y, reduction="sum"),
        "weighted": lambda m, i, y: entropy(m, i, y, weight=weight),
        "smoothed": lambda m, i, y: entropy(m, i, y, label_smoothing=0.1),
        "both": lambda m, i, y: entropy(m, i, y, label_smoothing=0.1, weight=weight),
        "by hand": lambda m, i, y: entropy(m, i, y, reduction="sum") / (y != -100).sum().clamp(min=1),
        "by the batch's size": lambda m, i, y: entropy(m, i, y, reduction="sum") / i.shape[0],
        "each early": lambda m, i, y: (entropy(m, i, y, reduction="none") / i.numel()).sum(),
        "masked": lambda m, i, y: (
            m(i).square().mean(1) * ((y != -100).double() / (y != -100).sum()).view(-1)
        ).sum(),
        "two": lambda m, i, y: entropy(m, i, y) + entropy(m, i, i.where(i > 5, -100)),
        "decayed": lambda m, i, y: m(i).square().mean() + m.up.weight.square().sum(),
        "counted and a mean": lambda m, i, y: 0.7 * entropy(m, i, y) + 0.3 * dice(m, i),
        "counted and decayed": lambda m, i, y: entropy(m, i, y) + m.up.weight.square().sum() - 1,
        "summed and a mean": lambda m, i, y: dice(m, i) - entropy(m, i, y, reduction="sum"),
        "soft": lambda m, i, y: cross_entropy(m(i), softmax(one_hot(i, 24).double(), -1).view(-1, 24)),
    }


def assert_equal_alone(module: Any, batch: tuple[Any, ...], loss: Any, accumulate: int, **kw: Any) -> None:
    """A step on one rank gives the loss and all gradients of the step without micro-batches."""
    import torch

    alone = copy.deepcopy(module)
    whole = alone(*batch) if loss is None else loss(alone, *batch)
    whole.backward()
    run = pase.compile(module, *batch, loss=loss, devices=1, accumulate=accumulate, memory_limit="none").torch
    assert run.leaves and run.sums.outputs

    def on_rank(rank: int) -> Any:
        mine = copy.deepcopy(module)
        made = run.parallelize(mine, **kw).backward(*batch)
        return made, {k: p.grad.full_tensor() for k, p in mine.named_parameters()}

    ((got, gradients),) = on_ranks(1, on_rank)
    torch.testing.assert_close(got, whole.detach(), rtol=1e-12, atol=1e-14)
    wanted = {k: p.grad for k, p in alone.named_parameters()}
    torch.testing.assert_close(gradients, wanted, rtol=1e-11, atol=1e-13)


def assert_equal_on_ranks(c: Any, run: Any) -> None:
    """A step by each rank gives the loss and all gradients of the unsharded step."""
    import torch

    def on_rank(rank: int) -> Any:
        mine = copy.deepcopy(c.module)
        loss = run.parallelize(mine).backward(*c.batch)
        return loss, {k: p.grad.full_tensor() for k, p in mine.named_parameters()}

    for loss, gradients in on_ranks(RANKS, on_rank):
        torch.testing.assert_close(loss, c.loss, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradients, c.gradients, rtol=1e-12, atol=1e-14)
