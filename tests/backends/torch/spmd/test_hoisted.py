"""Gathers before the first micro-batch: gradients are added locally, and summed once after the last one."""

from __future__ import annotations

from typing import Any

import pytest

from pase.backends.torch.spmd.hoisted import StepParameters
from pase.backends.torch.spmd.messages import GradientSending

pytestmark = pytest.mark.torch


def nothing_sent() -> GradientSending:
    nothing: Any = None
    return GradientSending(program=nothing, groups=nothing, bucket_bytes=0.0)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_gradients_of_all_micro_batches_pass_the_gather_once(dtype: str) -> None:
    """The gather is doubling, in another dtype. Its derivative is counted."""
    import torch

    passed: list[torch.Tensor] = []
    stored = torch.arange(3.0, dtype=torch.float64).requires_grad_()
    gathered = (2 * stored).to(getattr(torch, dtype))
    gathered.register_hook(passed.append)  # type: ignore[no-untyped-call]
    summed = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    frozen = torch.ones(2)
    step = StepParameters(
        leaves={"w": stored, "f": frozen},
        values={},
        received={0: gathered, 1: frozen},
        sums={0: summed},
        given={0: gathered.detach(), 1: frozen},
        sending=nothing_sent(),
    )
    assert [x is y for x, y in zip(step.trained, (stored, summed), strict=True)] == [True, True]
    for scale in (1.0, 10.0, 100.0):
        (scale * summed).sum().backward()
    assert stored.grad is None
    step.reduce_gradients()
    assert len(passed) == 1 and stored.grad is not None
    torch.testing.assert_close(stored.grad, torch.full((3,), 222.0, dtype=torch.float64), rtol=1e-2, atol=0)


def test_without_gradients_nothing_is_summed() -> None:
    import torch

    w = torch.ones(3, requires_grad=True)
    unread = torch.zeros(3, requires_grad=True)
    StepParameters(
        leaves={"w": w},
        values={},
        received={0: 2 * w},
        sums={0: unread},
        given={},
        sending=nothing_sent(),
    ).reduce_gradients()
    assert w.grad is None
