"""Where examples of a batch meet: what must be counted over the whole batch, and what cannot be cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import on_ranks
from pase.frontends.registry import NotInParts
from tests.backends.torch.micro_batches import assert_equal_alone, model
from tests.backends.torch.models import case

pytestmark = pytest.mark.torch


def test_where_examples_meet_is_said() -> None:
    import torch

    module, ids, _ = model()
    for loss in (
        lambda m, i: torch.stack([m(i).mean(), m(i).sum()]).sum(),  # a mean over the batch and a sum
        lambda m, i: m(i).mean().exp(),
        lambda m, i: m(i).max(),
        lambda m, i: m(i).mean() / m(i).square().mean(),
    ):
        with pytest.raises(NotInParts):
            pase.compile(module, ids, loss=loss, devices=2, accumulate=2)


def test_a_buffer_that_follows_the_batch_is_refused_and_a_counter_is_not() -> None:
    import torch

    class Follows(torch.nn.Linear):
        def __init__(self, of_the_batch: bool) -> None:
            super().__init__(8, 8)
            self.of_the_batch = of_the_batch
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0) if self.of_the_batch else 1.0, alpha=0.1)
            return (super().forward(x) + self.mean).square().mean()

    x = torch.randn(16, 8)
    with pytest.raises(NotInParts, match=r"mean|div"):
        pase.compile(Follows(True), (x,), devices=2, accumulate=2)
    assert pase.compile(Follows(False), (x,), devices=2, accumulate=2).accumulate == 2


def test_views_that_take_the_batch_apart_are_said() -> None:
    """An example then meets other examples than in the whole batch: two views of each image, pairs of answers."""
    module, ids, _ = model()

    def halves(m: Any, i: Any) -> Any:
        one, other = m(i).chunk(2)
        return (one - other).square().mean()

    for loss in (
        halves,
        lambda m, i: m(i).view(2, -1).prod(0).mean(),
        lambda m, i: m(i.view(2, -1)).view(2, -1).prod(0).mean(),
        lambda m, i: m(i).reshape(2, i.shape[0] // 2, -1).diff(dim=0).square().mean(),
    ):
        with pytest.raises(NotInParts):
            pase.compile(module, ids, loss=loss, devices=1, accumulate=4)


def test_what_is_sorted_and_not_put_back_is_said() -> None:
    """An order of tokens, or the tokens' ranks in it, meets tokens in the order of the batch, or in another order."""
    module, ids, _ = model()

    def tokens(m: Any, i: Any) -> tuple[Any, Any, Any]:
        key, order = (i.reshape(-1) % 4).sort()
        return m(i).mean(1), key, order

    def met(join: Any) -> Any:
        return lambda m, i: join(*tokens(m, i), i).mean()

    for join in (
        lambda y, key, order, i: y[order] * y,
        lambda y, key, order, i: y[order] * y[i.reshape(-1).argsort()],
        lambda y, key, order, i: y[order][order] * y,
        lambda y, key, order, i: y[order.argsort()] * y[order],
        lambda y, key, order, i: y[key] * y,
        lambda y, key, order, i: y * order,
        lambda y, key, order, i: y[order].view(2, -1).prod(0),
        lambda y, key, order, i: y[order].cumsum(0),
        lambda y, key, order, i: y[order + 1 - 1] * key,
    ):
        with pytest.raises(NotInParts):
            pase.compile(module, ids, loss=met(join), devices=1, accumulate=4)
    for join in (
        lambda y, key, order, i: y[order] * key,
        lambda y, key, order, i: y[order][order.argsort()] * y,
    ):
        assert_equal_alone(module, (ids,), met(join), 4)


def test_constants_that_differ_with_the_batch_are_said() -> None:
    """They depend on the position of an example in the batch, or on the batch size."""
    import torch

    module, ids, _ = model()

    def places(i: Any) -> Any:
        return torch.arange(i.shape[0], dtype=torch.float64)

    def each(m: Any, i: Any) -> Any:
        return m(i).view(i.shape[0], -1).mean(1)

    for loss in (
        lambda m, i: (each(m, i) * places(i)).mean(),
        lambda m, i: (each(m, i) * torch.linspace(0.5, 2, i.shape[0])).mean(),
        lambda m, i: (each(m, i) * torch.arange(16)[: i.shape[0]]).mean(),
        lambda m, i: (each(m, i) * torch.arange(2).repeat(i.shape[0] // 2)).mean(),
        lambda m, i: torch.where(places(i) < 8, each(m, i), 0.0).mean(),
        lambda m, i: (m.table(torch.arange(i.shape[0])) * each(m, i)[:, None]).mean(),
        lambda m, i: m(i).sum() / (places(i).max() + 1),
        # A constant for each position, read by features whose examples lie side by side.
        lambda m, i: (
            m(i).view(*i.shape, -1).mean(2).T.reshape(-1) * torch.arange(4).repeat(i.shape[0])
        ).mean(),
        lambda m, i: m(i)[:, : i.shape[0]].square().mean(),
        lambda m, i: m(i).roll(i.shape[0] // 8, 1)[:, :3].square().mean(),
    ):
        with pytest.raises(NotInParts):
            assert pase.compile(module, ids, loss=loss, devices=1, accumulate=4).torch.sums


def test_constants_that_are_the_same_for_every_example_are_taken() -> None:
    """Their sizes may depend on the batch: masks, positions, weights along other dims, random values."""
    import torch

    module, ids, _ = model()
    shift = torch.linspace(0.5, 2, 4, dtype=torch.float64)

    def each(m: Any, i: Any) -> Any:
        return m(i).view(*i.shape, -1).mean(2)

    for loss in (
        lambda m, i: (each(m, i) * torch.arange(4).expand(i.shape)).mean(),
        lambda m, i: (each(m, i) * torch.ones(i.shape, dtype=torch.float64).cumsum(1)).mean(),
        lambda m, i: (each(m, i) * torch.arange(4)[None].repeat(i.shape[0], 1)).mean(),
        lambda m, i: (each(m, i).view(-1) * torch.arange(4).repeat(i.shape[0])).mean(),
        lambda m, i: (each(m, i) * (1 - torch.zeros_like(i)) * shift).mean(),
        lambda m, i: m(i).sum() / torch.ones_like(i, dtype=torch.float64).sum(),
        lambda m, i: m(i).sum() / torch.ops.aten.scalar_tensor(float(i.shape[0])),
        lambda m, i: torch.where(torch.ones(i.shape[0], 4, 4).tril()[:, 1] > 0, each(m, i), 0.0).mean(),
    ):
        alone = copy.deepcopy(module)
        whole = loss(alone, ids)
        run = pase.compile(module, ids, loss=loss, devices=1, accumulate=4).torch
        assert run.sums

        def on_rank(rank: int, run: Any = run) -> Any:
            return run.parallelize(copy.deepcopy(module)).backward(ids)

        (got,) = on_ranks(1, on_rank)
        torch.testing.assert_close(got, whole.detach(), rtol=1e-12, atol=1e-14)


def test_elements_that_are_taken_in_order_are_not_cut_into_micro_batches() -> None:
    from pase.frontends.common.micro_batches import examples_meet
    from pase.frontends.torch.blocks import batch_inputs

    c = case("masks", 4).case
    assert "cumsum" in str(examples_meet(c.problem.graph, batch_inputs(c.traced), state_of_whole=True))
