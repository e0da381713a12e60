"""The norm of gradients on several meshes: PyTorch's own on the whole gradients."""

from __future__ import annotations

from typing import Any

import pytest

from bench.cases.torch_ranks import on_ranks
from pase.backends.torch.clip import clipped

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("kind", [2.0, float("inf"), 1.0])
@pytest.mark.parametrize("most", [0.1, 1e6])
def test_gradients_on_two_meshes_are_clipped_as_one(kind: float, most: float) -> None:
    import torch
    from torch import nn

    torch.manual_seed(0)
    wholes = [
        torch.randn(4, 6, dtype=torch.float64),
        torch.randn(8, dtype=torch.float64),
        torch.randn(4, 2).double(),
        torch.randn(6, 3).double(),
        torch.randn(3).double(),  # one of four ranks has nothing of it
    ]
    alone = [nn.Parameter(torch.zeros_like(g)) for g in wholes]
    for p, g in zip(alone, wholes, strict=True):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(alone, most, kind)

    def on_rank(rank: int) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        laid = [(flat, [Shard(0)]), (square, [Replicate(), Shard(0)]), (flat, [Shard(0)])]
        laid += [(square, [Shard(0), Shard(1)]), (flat, [Shard(0)])]
        mine = []
        for g, (mesh, placements) in zip(wholes, laid, strict=True):
            p = nn.Parameter(distribute_tensor(torch.zeros_like(g), mesh, placements))
            p.grad = distribute_tensor(g.clone(), mesh, placements)
            mine.append(p)
        mine.append(nn.Parameter(torch.zeros(2)))  # it has no gradient
        found = clipped(mine, most, kind, lambda own: own[None])
        return found, [p.grad.full_tensor() for p in mine[:-1]]

    for found, gradients in on_ranks(4, on_rank):
        torch.testing.assert_close(found, norm, rtol=1e-12, atol=0)
        torch.testing.assert_close(gradients, [p.grad for p in alone], rtol=1e-12, atol=1e-15)


def test_other_stages_norms_count() -> None:
    """A rank without gradients of its own, beside another stage whose norm is 3."""
    import torch

    assert float(clipped([], 1.0, 2.0, lambda own: torch.stack([own, own.new_tensor(3.0)]))) == 3.0
