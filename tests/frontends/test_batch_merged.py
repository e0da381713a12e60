"""Micro-batches if the batch is merged with positions: a loss equals that of the whole batch or is refused, in JAX and
in PyTorch. z: 16 examples of 6 positions each, as 96 rows."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pase.compiler.problem.variants import Variant, graph_of
from pase.frontends.registry import NotInParts

Loss = Callable[[Any, Any], Any]
"""Losses, as functions of the framework's functions and z."""

MIXED: dict[str, Loss] = {
    "softmax": lambda f, z: (f.softmax(z, 0) * z).mean(),
    "logsumexp": lambda f, z: f.logsumexp(z, 0).mean(),
    "maximum": lambda f, z: f.amax(z, 0).mean(),
    "centred": lambda f, z: ((z - z.mean(0)) ** 2).mean(),
    "sums so far": lambda f, z: (f.cumsum(z, 0) ** 2).mean(),
    "products so far": lambda f, z: f.cumprod(z, 0).mean(),
    "sorted": lambda f, z: (f.sort(z, 0) * z).mean(),
    "all with all": lambda f, z: ((z @ z.T) ** 2).mean(),
    "attention": lambda f, z: (f.softmax(z @ z.T, -1) @ z).mean(),
    "pairs": lambda f, z: ((z[:, None] - z[None]) ** 2).mean(),
    "recut": lambda f, z: (z.reshape(len(z) // 12, 12, 8).mean(1) ** 2).mean(),
    "recut in other parts": lambda f, z: (z.reshape(len(z) // 8, 8, 8).mean(1) ** 2).mean(),
    "halves": lambda f, z: (z[: len(z) // 2].mean(0) * z[len(z) // 2 :].mean(0)).mean(),
    "first and eighth": lambda f, z: (z[::8] * z[7::8]).mean(),
    "neighbours": lambda f, z: (z[1:] * z[:-1]).mean(),
    "turned": lambda f, z: (z * f.flip(z, (0,))).mean(),
    "rolled": lambda f, z: (z * f.roll(z, 1, 0)).mean(),
    "joined": lambda f, z: (f.softmax(f.concat([z, z], 0), 0) ** 2).mean() * len(z) ** 2,
}
APART: dict[str, Loss] = {
    "softmax of a row": lambda f, z: (f.softmax(z, -1) * z).mean(),
    "sums along a row": lambda f, z: (f.cumsum(z, 1) ** 2).mean(),
    "sorted rows": lambda f, z: (f.sort(z, 1) * z).mean(),
    "all numbers": lambda f, z: (z.reshape(-1) ** 2).mean(),
    "cut again": lambda f, z: (f.cumsum(z.reshape(-1, 6, 8), 1) ** 2).mean(),
    "cut finer": lambda f, z: (f.cumsum(z.reshape(-1, 3, 8), 1) ** 2).mean(),
    "neighbours in an example": lambda f, z: (
        z.reshape(-1, 6, 8)[:, 1:] * z.reshape(-1, 6, 8)[:, :-1]
    ).mean(),
    "attention in an example": lambda f, z: (
        f.softmax(z.reshape(-1, 6, 8) @ z.reshape(-1, 6, 8).swapaxes(1, 2), -1) @ z.reshape(-1, 6, 8)
    ).mean(),
    "halves of a row": lambda f, z: (z[:, :4] * z[:, 4:]).mean(),
}
EVERY = [(name, loss, True) for name, loss in MIXED.items()]
EVERY += [(name, loss, False) for name, loss in APART.items()]


def _softmax(z: Any, axis: int) -> Any:
    e = np.exp(z)
    return e / e.sum(axis, keepdims=True)


NUMPY = SimpleNamespace(
    softmax=_softmax,
    logsumexp=lambda z, axis: np.log(np.exp(z).sum(axis)),
    amax=np.max,
    cumsum=np.cumsum,
    cumprod=np.cumprod,
    sort=np.sort,
    flip=np.flip,
    roll=np.roll,
    concat=np.concatenate,
)


def _in_jax(loss: Loss) -> Any:
    import jax
    import jax.numpy as jnp
    from jax import ShapeDtypeStruct

    from pase.frontends.jax.frontend import trace

    functions = SimpleNamespace(
        softmax=jax.nn.softmax,
        logsumexp=jax.scipy.special.logsumexp,
        amax=jnp.max,
        cumsum=jnp.cumsum,
        cumprod=jnp.cumprod,
        sort=jnp.sort,
        flip=jnp.flip,
        roll=jnp.roll,
        concat=jnp.concatenate,
    )
    shapes = ShapeDtypeStruct((8, 8), "float32"), ShapeDtypeStruct((16, 6, 8), "float32")
    return trace(lambda w, x: loss(functions, jnp.tanh(x @ w).reshape(-1, 8)), *shapes)


def _in_torch(loss: Loss) -> Any:
    import torch

    from pase.frontends.torch.frontend import trace

    functions = SimpleNamespace(
        softmax=torch.softmax,
        logsumexp=torch.logsumexp,
        amax=torch.amax,
        cumsum=torch.cumsum,
        cumprod=torch.cumprod,
        sort=lambda z, axis: torch.sort(z, axis)[0],
        flip=torch.flip,
        roll=torch.roll,
        concat=torch.cat,
    )

    def loss_of(m: Any, x: Any) -> Any:
        return loss(functions, torch.tanh(m(x)).reshape(-1, 8))

    return trace(torch.nn.Linear(8, 8), torch.empty(16, 6, 8), loss=loss_of)


@pytest.mark.parametrize("traced", [_in_jax, pytest.param(_in_torch, marks=pytest.mark.torch)])
@pytest.mark.parametrize(("name", "loss", "mixed"), EVERY, ids=[name for name, _, _ in EVERY])
def test_a_loss_is_the_whole_batchs_or_is_refused(
    traced: Callable[[Loss], Any], name: str, loss: Loss, mixed: bool
) -> None:
    x = np.tanh(np.random.default_rng(1).normal(size=(16, 6, 8)))
    whole, *parts = (float(loss(NUMPY, part.reshape(-1, 8))) for part in (x, *(x[i::4] for i in range(4))))
    assert (np.mean(parts) != pytest.approx(whole, rel=1e-9)) is mixed
    if mixed:
        with pytest.raises(NotInParts, match="would give other numbers"):
            graph_of(traced(loss), Variant(accumulate=4))
    else:
        graph_of(traced(loss), Variant(accumulate=4))
