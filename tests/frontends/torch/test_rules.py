"""What the graph says that ATen ops compute is what PyTorch computes: values and gradients, run in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from pase.frontends import registry
from tests.local.programs import unsplit

pytestmark = pytest.mark.torch

SHAPE = (3, 4, 8)


def _functions() -> dict[str, Callable[[Any], Any]]:
    import torch
    from torch.nn import functional as F

    t = torch
    return {
        "scaled sums": lambda x: (
            t.add(x, x * x, alpha=0.3) + t.sub(x, x.exp(), alpha=2) + t.add(x, 1.5, alpha=3)
        ),
        "from a number": lambda x: (2.5 - x) + 3 / (4 + x * x) + t.rsub(x, 1.5),
        "powers": lambda x: x**3 + (x * x) ** 1.7 + (1 + x * x) ** -1 + 2.0**x + (1 + x * x) ** -0.5 + x**-2,
        "bounds": lambda x: t.clamp(x, -0.5, 0.7) + t.clamp(x, min=0.1) + F.hardtanh(x) + x.clamp_max(0.2),
        "masks": lambda x: (
            x.masked_fill(x > 0.3, -2.0) + t.where(x < 0, x * 2, 0.5) + t.where(x < 0, 1.0, x * x)
        ),
        "rounding": lambda x: (
            x * (x.round() + x.floor() + x.ceil() + x.trunc() + t.div(x, 0.3, rounding_mode="floor"))
        ),
        "remainders": lambda x: t.remainder(x, 0.3) + t.fmod(x, 0.4) * 2,
        "logarithms": lambda x: t.log10(2 + x * x) + t.log2(2 + x * x) + t.log1p(x * x) + t.expm1(x),
        "constants": lambda x: (
            x * t.full_like(x, 0.25) + x * t.ones(4, 1, dtype=x.dtype) + t.zeros_like(x) * x
        ),
        "relu": lambda x: F.relu(x) + F.relu6(9 * x) + F.leaky_relu(x, 0.2),
        "elu": lambda x: F.elu(x, 0.7) + F.selu(x) + F.celu(x, 2.0),
        "gelu": lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"),
        "gates": lambda x: F.silu(x) + F.mish(x) + F.softplus(x) + F.hardsigmoid(2 * x) + F.hardswish(2 * x),
        "means": lambda x: (
            x * x.mean(1, keepdim=True) + x.var((0, 2), keepdim=True) + x.std(2, keepdim=True, correction=0)
        ),
        "layer norm": lambda x: F.layer_norm(x, (4, 8), eps=0.03),
        "rms norm": lambda x: F.rms_norm(x, (8,)) * F.rms_norm(x, (8,), eps=0.1),
        "group norm": lambda x: F.group_norm(x, 2, eps=0.02),
        "batch norm": lambda x: F.batch_norm(x, None, None, training=True, eps=0.04),
        "inference": lambda x: F.batch_norm(x, x.mean((0, 2)).detach(), x.var((0, 2)).detach(), eps=0.3),
        "softmax": lambda x: x.softmax(1) + x.log_softmax(-1) + x.logsumexp(1, keepdim=True),
        "products": lambda x: t.baddbmm(x, x * 2, t.tanh(x.transpose(1, 2) @ x), beta=0.3, alpha=1.7),
        "addmm": lambda x: t.addmm(x.sum(1), x.sum(2), x.sum(0), beta=2, alpha=0.5),
        "pools": lambda x: F.avg_pool1d(x, 2).sum(-1, keepdim=True) + F.adaptive_avg_pool1d(x, 1),
        "slices": lambda x: x[:, 1:3] * x[:, ::2] + x.unbind(1)[2].unsqueeze(1) + x.flip(1).narrow(1, 0, 2),
        "parts": lambda x: F.glu(x, -1) + t.cat([a * a for a in x.split(2, -1)][1:3], -1),
        "pads": lambda x: F.pad(x, (1, 2, 0, 3), value=0.5).square(),
        "running": lambda x: x.cumsum(1) * x.cumsum(-1) + t.stack([x, x * x]).sum(0) + x.logcumsumexp(1),
        "losses": lambda x: F.mse_loss(x, x * x) + F.l1_loss(x, x * 2) + F.mse_loss(x, -x, reduction="sum"),
        "of probabilities": lambda x: F.cross_entropy(x, x.detach().softmax(1)),
    }


NAMES = [
    *(
        "scaled sums",
        "from a number",
        "powers",
        "bounds",
        "masks",
        "rounding",
        "remainders",
        "logarithms",
        "constants",
    ),
    *(
        "relu",
        "elu",
        "gelu",
        "gates",
        "means",
        "layer norm",
        "rms norm",
        "group norm",
        "batch norm",
        "inference",
    ),
    *(
        "softmax",
        "products",
        "addmm",
        "pools",
        "slices",
        "parts",
        "pads",
        "running",
        "losses",
        "of probabilities",
    ),
]


@cache
def compared() -> tuple[dict[str, tuple[float, np.ndarray]], Any, Any]:
    """(function -> its sum and its gradient by PyTorch, the trace of all functions, their parameters)."""
    import torch

    class Every(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rng = torch.Generator().manual_seed(0)
            self.x = torch.nn.ParameterList(
                torch.randn(SHAPE, generator=rng, dtype=torch.float64) for _ in NAMES
            )

        def forward(self, scale: Any) -> Any:
            return sum(f(x).sum() * w for f, x, w in zip(functions, self.x, weights, strict=True)) * scale

    functions = [_functions()[name] for name in NAMES]
    weights = [0.5 + 0.1 * i for i in range(len(NAMES))]
    module = Every()
    found = {}
    for name, f, x, w in zip(NAMES, functions, module.x, weights, strict=True):
        value = f(x).sum() * w
        (grad,) = torch.autograd.grad(value, x)
        found[name] = (float(value.detach()), grad.numpy())
    traced = registry.trace(module, torch.ones((), dtype=torch.float64))
    return found, traced, {f"x.{i}": x.detach().numpy() for i, x in enumerate(module.x)}


def test_graphs_say_what_ops_compute() -> None:
    found, traced, given = compared()
    value, grads = unsplit(traced.graph, {**given, "scale": np.ones(())}, traced.graph.outputs[0])
    for i, name in enumerate(
        NAMES
    ):  # PyTorch's derivatives of celu, hardsigmoid and hardswish round to float32
        np.testing.assert_allclose(grads[f"x.{i}"], found[name][1], rtol=1e-6, atol=1e-7, err_msg=name)
    assert float(value) == pytest.approx(math.fsum(v for v, _ in found.values()), rel=1e-12)
