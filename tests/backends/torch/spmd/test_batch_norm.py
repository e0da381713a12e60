"""Batch normalization of a batch that is split."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest

import pase
from bench.audit.torch_dispatch import dispatched
from bench.cases.torch_ranks import alone_among, on_ranks
from pase.backends.torch.spmd.batch_norm import SplitNorm
from pase.backends.torch.spmd.process_groups import axis_groups
from pase.machine import Mesh

pytestmark = pytest.mark.torch


def net(affine: bool, first: bool) -> Any:
    """A model with a batch norm, whose input has a gradient unless it is the ``first`` layer."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Identity() if first else nn.Conv2d(4, 4, 3, padding=1, bias=False)
            self.norm, self.b = nn.BatchNorm2d(4, affine=affine), nn.Linear(4, 8)

        def forward(self, x: Any) -> Any:
            return self.b(self.norm(self.a(x)).relu().mean((2, 3))).square().mean()

    torch.manual_seed(0)
    return Net().double()


@pytest.mark.parametrize(("affine", "first"), [(True, False), (False, False), (True, True)])
def test_it_is_one_op_and_equals_the_whole_batch_s(affine: bool, first: bool) -> None:
    """Losses, parameters and running statistics of three steps; it keeps its input and no other value of that size."""
    import torch

    module, x = net(affine, first), 2 + torch.randn(8, 4, 3, 3, dtype=torch.float64)
    run = pase.compile(module, x, devices=4, mesh="4", target="ddp", baselines=False).torch
    code = run.code(rank=0)
    assert code.count("= plan_batch_norm(") == 1 and "rsqrt" not in code and "square(sub" not in code
    running = [code.count(f"torch.{op}(") for op in ("_foreach_mul", "mul", "add")]
    assert running == [1, 0, 2] and "reshape(" not in code
    assert run.program.ops and run.leaves

    def trained(of: Any, step: Any) -> tuple[list[float], dict[str, list[Any]]]:
        losses = [float(step(x)) for _ in range(3)]
        state = {k: getattr(t, "full_tensor", lambda t=t: t)() for k, t in of.state_dict().items()}
        return losses, {k: t.detach().reshape(-1).tolist() for k, t in state.items()}

    def on_rank(rank: int) -> tuple[list[float], dict[str, list[Any]]]:
        mine = copy.deepcopy(module)
        return trained(mine, run.train_step(mine, torch.optim.SGD, lr=0.5))

    eager = copy.deepcopy(module)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.5)

    def alone(x: Any) -> Any:
        optimizer.zero_grad()
        loss = eager(x)
        loss.backward()
        optimizer.step()
        return loss

    losses, state = trained(eager, alone)
    for found, after in on_ranks(4, on_rank):
        assert found == pytest.approx(losses, rel=1e-12)
        assert after.keys() == state.keys()
        for k, values in state.items():
            assert after[k] == pytest.approx(values, rel=1e-11, abs=1e-13), k


def test_its_weights_are_gathered_in_the_message_of_the_others() -> None:
    """The plan's ops read them with dims of size 1 besides."""
    import torch

    module, x = net(affine=True, first=False), torch.randn(8, 4, 3, 3, dtype=torch.float64)
    run = pase.compile(module, x, devices=4, mesh="4", target="fsdp2", baselines=False).torch
    names = {t.src for t in run.program.transfers if t.forward and t.forward[0].kind == "all_gather"}
    assert {n for n in names if n.startswith("norm.")} and len(run.walk(None).gathers) == 1
    code = run.code(rank=0)
    assert code.count(" = plan_gather(") == 1 and "norm_weight.reshape" not in code
    for found in on_ranks(4, lambda rank: run.check(copy.deepcopy(module), x, most_lines=2)):
        found.raise_if_off()


@pytest.mark.parametrize("affine", ["bfloat16", "float32"])
def test_statistics_of_narrow_numbers_are_added_up_in_float32(affine: str) -> None:
    """The result and the gradients are those of float64, but for their rounding."""
    import torch

    narrow, wide = torch.bfloat16, torch.float64
    torch.manual_seed(0)
    x, g = (64 + 2 * torch.randn(8, 4, 3, 3)).to(narrow), torch.randn(8, 4, 3, 3).to(narrow)
    weight, bias = (torch.randn(4).to(getattr(torch, affine)) for _ in range(2))

    def on_rank(rank: int) -> Any:
        mesh = Mesh(names=("d",), sizes=(4,))
        norm = SplitNorm(groups=axis_groups(mesh, [("d",)], "cpu"), axes=("d",), count=8 * 9, eps=1e-5)
        own, w, b = x.chunk(4)[rank].requires_grad_(), weight.clone(), bias.clone()
        made, mean, variance = norm(own, w.requires_grad_(), b.requires_grad_())
        return made.detach(), mean, variance, *torch.autograd.grad(made, (own, w, b), g.chunk(4)[rank])

    made, means, variances, *gradients = (list(some) for some in zip(*on_ranks(4, on_rank), strict=True))
    inputs = [t.detach().to(wide).requires_grad_() for t in (x, weight, bias)]
    whole = torch.nn.functional.batch_norm(inputs[0], None, None, *inputs[1:], training=True)
    of_x, of_weight, of_bias = torch.autograd.grad(whole, inputs, g.to(wide))
    for found, expected in ((torch.cat(made), whole), (torch.cat(gradients[0]), of_x)):
        assert found.dtype == narrow
        torch.testing.assert_close(found.to(wide), expected.detach(), rtol=2**-8, atol=2**-8)
    for found, expected in zip(gradients[1:], (of_weight, of_bias), strict=True):
        assert {t.dtype for t in found} == {weight.dtype}
        torch.testing.assert_close(sum(t.to(wide) for t in found), expected, rtol=2**-6, atol=2**-6)
    centre, spread = x.to(wide).mean((0, 2, 3)), x.to(wide).var((0, 2, 3), unbiased=False)
    for mean, variance in zip(means, variances, strict=True):
        torch.testing.assert_close(mean.to(wide), centre, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(variance.to(wide), spread, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_narrow_step_sends_the_plans_list(mixed: bool) -> None:
    """mixed: the norm's weights and running statistics are float32."""
    import torch

    from pase.backends.audit.torch import planned_in_step, sent_by_one_rank

    module, x = net(affine=True, first=False).to(torch.bfloat16), torch.randn(8, 4, 3, 3).to(torch.bfloat16)
    if mixed:
        module.norm.float()
    run = pase.compile(module, x, devices=4, mesh="4", target="ddp", baselines=False).torch
    assert run.code(rank=0).count("= plan_batch_norm(") == 1
    with alone_among(4, rank=1):
        assert sent_by_one_rank(run) == planned_in_step(run)

    def on_rank(rank: int) -> Any:
        mine = copy.deepcopy(module)
        loss = run.parallelize(mine)(x)
        return loss, mine.norm.running_mean.full_tensor(), mine.norm.running_var.full_tensor()

    eager = copy.deepcopy(module)
    expected = eager(x), eager.norm.running_mean, eager.norm.running_var
    for found in on_ranks(4, on_rank):
        assert all(t.dtype == e.dtype for t, e in zip(found, expected, strict=True))
        torch.testing.assert_close(list(found), list(expected))


def test_it_adds_seven_ops_and_three_messages_to_pytorch_s_own() -> None:
    """Four make the statistics, and three take them away from the gradient. Waits are no kernels."""
    import torch

    x = torch.randn(8, 4, 3, 3, requires_grad=True)
    weight, bias = (torch.randn(4, requires_grad=True) for _ in range(2))
    with alone_among(4, rank=0):
        groups = axis_groups(Mesh(names=("d",), sizes=(4,)), [("d",)], "cpu")
        norm = SplitNorm(groups=groups, axes=("d",), count=4 * 8 * 9, eps=1e-5)
        ours = dispatched(lambda: torch.autograd.grad(norm(x, weight, bias)[0], (x, weight, bias), x))
    norm_of = torch.nn.functional.batch_norm
    made = (None, None, weight, bias, True)
    eager = dispatched(lambda: torch.autograd.grad(norm_of(x, *made), (x, weight, bias), x))
    sent = sum(n for op, n in ours.items() if "c10d" in op and "wait" not in op)
    own = Counter({op: n for op, n in ours.items() if "c10d" not in op and "detach" not in op})
    assert sent == 3
    assert (own - eager).total() == 7, own - eager
