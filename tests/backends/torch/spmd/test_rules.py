"""Ops that do something else on a part than on the whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import alone_among, on_ranks
from tests.backends.torch.models import case
from tests.backends.torch.steps import RANKS, assert_unsharded

pytestmark = pytest.mark.torch


def test_what_is_random_is_one_draw() -> None:
    """A dropout's mask does not depend on how the model is split, nor on the ranks' own random states."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.drop, self.b = nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 16)

        def forward(self, x: Any) -> Any:
            return self.b(self.drop(self.a(x))).square().mean()

    torch.manual_seed(0)
    module, x = Net(), torch.randn(8, 16)

    def losses(mesh: str, ranks: int) -> list[float]:
        run = pase.compile(module, x, devices=ranks, mesh=mesh).torch
        assert run.program.ops and run.leaves

        def on_rank(rank: int) -> list[float]:
            step = run.parallelize(copy.deepcopy(module))
            step.seed = 7
            return [float(step(x)) for _ in range(2)]

        first, *others = on_ranks(ranks, on_rank)
        assert all(o == first for o in others)
        return first

    alone = losses("1", 1)
    assert alone[0] != alone[1]
    assert losses("2x2", 4) == pytest.approx(alone, rel=1e-5)


def test_a_partial_update_of_infinities_is_no_nan() -> None:
    """All ranks but the first add their updates to zeros, whatever the operand has."""
    import torch
    from torch import nn

    class Net(nn.Module):
        never: Any

        def __init__(self) -> None:
            super().__init__()
            self.table, self.up = nn.Parameter(torch.randn(8, 16)), nn.Linear(16, 16)
            self.register_buffer("never", torch.arange(8) == 0)

        def forward(self, x: Any, ids: Any) -> Any:
            scores = self.table.masked_fill(self.never[:, None], float("-inf"))
            return scores.index_add(0, ids, self.up(x)).exp().sum()

    torch.manual_seed(0)
    module, ids = Net().double(), torch.arange(16) % 7 + 1
    x = 0.1 * torch.randn(16, 16, dtype=torch.float64)
    run = pase.compile(module, x, ids, devices=2, mesh="2", target="ddp", baselines=False).torch
    assert "masked_fill" in run.code(rank=1)
    module(x, ids).backward()
    expected = {n: p.grad for n, p in module.named_parameters()}
    module.zero_grad()

    def on_rank(rank: int) -> tuple[float, dict[str, Any]]:
        mine = copy.deepcopy(module)
        loss = float(run.parallelize(mine).backward(x, ids))
        return loss, {n: p.grad.full_tensor() for n, p in mine.named_parameters()}

    for loss, gradients in on_ranks(2, on_rank):
        assert loss == pytest.approx(module(x, ids).item(), rel=1e-12)
        torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", ["amax", "amin", "logsumexp"])
def test_an_infinite_extreme_along_a_split_dim_is_no_nan(name: str) -> None:
    """A column without any finite score has the value and the gradient that it has on one rank. Two elements attain
    the extreme of another, one on each rank."""
    import torch
    from torch import nn

    class Net(nn.Module):
        never: Any

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 6)
            self.register_buffer("never", torch.arange(6) == 3)

        def forward(self, x: Any) -> Any:
            scores = self.up(x).masked_fill(self.never, float("-inf"))
            if name == "amin":
                return (-scores).amin(0).neg().exp().sum()
            return getattr(scores, name)(0).exp().sum()

    torch.manual_seed(0)
    module, x = Net().double(), torch.randn(2, 4, dtype=torch.float64).repeat(2, 1)
    run = pase.compile(module, x, devices=2, mesh="2", target="ddp", baselines=False).torch
    module(x).backward()
    expected = {n: p.grad for n, p in module.named_parameters()}
    module.zero_grad()

    def on_rank(rank: int) -> tuple[float, dict[str, Any]]:
        mine = copy.deepcopy(module)
        loss = float(run.parallelize(mine).backward(x))
        return loss, {n: p.grad.full_tensor() for n, p in mine.named_parameters()}

    for loss, gradients in on_ranks(2, on_rank):
        assert loss == pytest.approx(module(x).item(), rel=1e-12)
        torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "strategy", [f"random{i}@2x2" for i in range(6)] + ["random0@4", "random2@4", "ours@2x2"]
)
def test_one_tensor_is_read_as_queries_and_as_keys(strategy: str) -> None:
    """In two layouts, if positions of queries are split. What is sent is the plan's list."""
    from pase.backends.audit.torch import planned_in_step, sent_by_one_rank

    assert_unsharded("selves", strategy)
    plan = case("selves", RANKS).case.plan(strategy)
    assert plan is not None
    with alone_among(RANKS, rank=1):
        assert sent_by_one_rank(plan.torch) == planned_in_step(plan.torch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_heads_are_repeated_only_for_kernels_that_do_not_share_them(
    dtype: str, asked: bool, masked: bool
) -> None:
    import torch

    from pase.backends.torch.spmd.process_groups import AxisGroups
    from pase.backends.torch.spmd.rules import RankCall, evaluate
    from pase.machine import Mesh
    from pase.tables.axis_layout import AxisLayout

    seen: dict[str, Any] = {}

    def attention(query: Any, key: Any, value: Any, **given: Any) -> Any:
        seen.update(given, heads=(key.shape[1], value.shape[1]))
        return query

    mesh = Mesh(names=("x",), sizes=(1,))
    x = {n: torch.ones(1, heads, 4, 8) for n, heads in (("query", 6), ("key", 2), ("value", 2))}
    given = x | {"attn_mask": torch.ones(4, 4) if masked else None, "enable_gqa": asked}
    for device in ("cpu", "meta"):  # no kernel is called: meta stands for a GPU
        call = RankCall(
            target=attention,
            ops=[],
            given={
                k: v.to(device, getattr(torch, dtype)) if isinstance(v, torch.Tensor) else v
                for k, v in given.items()
            },
            layouts={n: (tuple(t.shape), AxisLayout([None])) for n, t in x.items()},
            outs=[],
            groups=AxisGroups(mesh=mesh, devices=None, place=(0,)),  # type: ignore[arg-type]
            seed=0,
            whole=[],
        )
        evaluate("scaled_dot_product_attention", call)
        shares = asked or device == "cpu" or (dtype == "bfloat16" and not masked)
        assert (seen["enable_gqa"], seen["heads"]) == ((True, (2, 2)) if shares else (False, (6, 6)))
