"""Values without a gradient, and regions that an exported graph cannot keep."""

from __future__ import annotations

from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import on_ranks
from pase.errors import PaseError
from pase.frontends import registry
from tests.backends.torch.trained import agrees
from tests.backends.torch.unwatched_models import KINDS, unwatched

pytestmark = pytest.mark.torch


@pytest.mark.some(6)
@pytest.mark.parametrize("kind", KINDS)
def test_values_without_a_gradient_take_none_from_others(kind: str) -> None:
    import torch

    torch.manual_seed(1)
    agrees(unwatched(kind), 2)


def test_autocast_around_a_step_is_refused() -> None:
    import torch

    def loss(module: Any, x: Any) -> Any:
        return module(x).square().mean()

    x, module = torch.randn(16, 16), torch.nn.Linear(16, 8)
    with torch.autocast("cpu"), pytest.raises(PaseError, match=r"Linear is read under torch.autocast"):
        pase.compile(module, x, devices=2, loss=loss)
    plan = pase.compile(module, x, devices=1, loss=loss).torch

    def on_rank(rank: int) -> None:
        with torch.autocast("cpu"), pytest.raises(PaseError, match=r"runs under torch.autocast"):
            plan.parallelize(module)(x)

    on_ranks(1, on_rank)


@pytest.mark.filterwarnings("error:CUDA is not available")
def test_autocast_for_another_device_is_refused() -> None:
    """PyTorch would switch it off on a machine without a GPU, and leave it without effect on one that has one."""
    import torch

    def loss(module: Any, x: Any, device: str) -> Any:
        with torch.autocast(device, torch.bfloat16):
            return module(x).float().square().mean()

    x, module = torch.randn(16, 16), torch.nn.Linear(16, 8)
    with pytest.raises(PaseError, match=r"its torch\.autocast is for 'cuda' and casts nothing") as e:
        pase.compile(module, x, devices=2, loss=lambda m, x: loss(m, x, "cuda"))
    assert "x.device.type" in e.value.fix
    graph = registry.trace(module, x, loss=lambda m, x: loss(m, x, x.device.type)).graph
    assert {
        graph.tensors[op.writes[0].tensor].dtype for n in graph.nodes for op in n.ops if op.kind == "matmul"
    } == {"bfloat16"}


def test_no_gradient_passes_no_grad_and_detach() -> None:
    import torch

    class Stopped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Linear(8, 8) for _ in range(3))
            self.c.requires_grad_(False)

        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                y = self.a(x)
            return self.c(self.b(x) + y).mean() + self.a(x).detach().sum()

    graph = registry.trace(Stopped(), torch.zeros(4, 8)).graph
    made = {a.tensor: op for n in graph.nodes for op in n.ops for a in op.writes}
    by_weight = {
        graph.tensors[r.tensor].path: graph.tensors[op.writes[0].tensor].needs_grad
        for op in made.values()
        if op.kind == "matmul"
        for r in op.reads
        if graph.tensors[r.tensor].role == "parameter" and op.writes
    }
    assert by_weight["b.weight"] and by_weight["c.weight"]
    assert {t.path: t.needs_grad for t in graph.parameters}["c.weight"] is False
    frozen = [op for op in made.values() if op.kind == "matmul" and not op.differentiable]
    assert len(frozen) == 1
