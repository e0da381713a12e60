"""A gradient of this rank's part becomes the gradient of a parameter."""

from __future__ import annotations

import pytest

from bench.cases.torch_ranks import alone_among
from pase.backends.torch.gradients import LocalGradients, added

pytestmark = pytest.mark.torch


def test_leaves_share_memory_with_parameters_and_give_them_gradients() -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    with alone_among(2, rank=0):
        mesh = init_device_mesh("cpu", (2,))
        p = torch.nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False))
        of = LocalGradients()
        for times in (1, 2):
            with of.collected({"p": p}) as leaves:
                (2 * leaves["p"]).sum().backward()
            assert (p.grad.placements, p.grad.shape) == ((Shard(0),), (6,))
            torch.testing.assert_close(p.grad.to_local(), torch.full((3,), 2.0 * times))
        with torch.no_grad():
            p.mul_(5)
        with of.collected({"p": p}) as again:
            assert again["p"] is leaves["p"]
            torch.testing.assert_close(again["p"].detach(), torch.full((3,), 5.0))
        added(p, torch.ones(3))
        torch.testing.assert_close(p.grad.to_local(), torch.full((3,), 5.0))
