"""Leaves out checks of PyTorch that read values, which do not exist in a trace, and do not affect a step's result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import CodeType, FunctionType, SimpleNamespace
from typing import TYPE_CHECKING

from pase.pytree import Tree

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["checks_left_out", "gaussian_nll_unchecked"]


_LOSS: ContextVar[CodeType] = ContextVar("pase_gaussian_nll_loss")
"""The code of PyTorch's gaussian_nll_loss."""


@contextlib.contextmanager
def checks_left_out() -> Iterator[None]:
    """Within, these do not check values: ``torch.distributions`` by default, ``gaussian_nll_loss``, ``torch.cov`` and
    ``torch.corrcoef``.

    A check that the user asks for (``validate_args=True``) is still refused.
    """
    import torch
    from torch.distributions import Distribution

    validated, loss = Distribution._validate_args, torch.nn.functional.gaussian_nll_loss
    code = loss.__code__
    token = _LOSS.set(code)
    names: dict[str, Callable[..., Tensor]] = {"cov": _cov, "corrcoef": _corrcoef}
    originals = {name: getattr(torch, name) for name in names}
    Distribution.set_default_validate_args(False)
    loss.__code__ = _stand_in.__code__  # programs hold references to the loss itself
    for name, ours in names.items():
        setattr(torch, name, _written_out(originals[name], ours))
        setattr(torch.Tensor, name, _written_out(getattr(torch.Tensor, name), ours))
    try:
        yield
    finally:
        Distribution.set_default_validate_args(validated)
        loss.__code__ = code
        _LOSS.reset(token)
        for name, original in originals.items():
            setattr(torch, name, original)
            delattr(torch.Tensor, name)  # the parent class's method becomes visible again


def _stand_in(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool, eps: float, reduction: str
) -> Tensor:
    from pase.frontends.torch.export import unchecked

    return unchecked.gaussian_nll_unchecked(input, target, var, full, eps, reduction)


def gaussian_nll_unchecked(*args: Tensor | float | str) -> Tensor:
    """PyTorch's gaussian_nll_loss without its check that no variance is negative.

    PyTorch runs the loss through ``__torch_function__`` while it is traced, and then does not record that its clamp is
    under ``no_grad``. So it is called directly.
    """
    import torch

    unread = SimpleNamespace(**{**vars(torch), "any": lambda negative: False})
    known = {**vars(torch.nn.functional), "torch": unread, "has_torch_function_variadic": lambda *_: False}
    return FunctionType(_LOSS.get(), known)(*args)


def _written_out(original: Callable[..., Tensor], ours: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``ours`` for real tensors of variables and observations. ``original`` refuses whatever else it is given."""

    def call(input: Tensor, **named: Tree) -> Tensor:
        if input.is_complex() or input.ndim > 2 or input.numel() == 0:
            return original(input, **named)
        return ours(input, **named)

    return call


def _cov(
    x: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """``torch.cov``. PyTorch also checks that no weight is negative and that their sum is not zero."""
    x = x.reshape(1, -1) if x.ndim < 2 else x
    if fweights is None and aweights is None:
        x = x - x.sum(1, keepdim=True) / x.shape[1]
        return (x @ x.T / max(x.shape[1] - correction, 0)).squeeze()
    weights = aweights if fweights is None else fweights if aweights is None else fweights * aweights
    assert weights is not None
    total = weights.sum()
    of_weights = 1 if aweights is None else (weights * aweights).sum() / total
    x = x - (x * weights).sum(1, keepdim=True) / total
    return (x @ (x * weights).T / (total - correction * of_weights).clamp(min=0)).squeeze()


def _corrcoef(x: Tensor) -> Tensor:
    """``torch.corrcoef``."""
    c = _cov(x)
    if c.ndim == 0:
        return c / c
    deviation = c.diagonal().sqrt()
    return (c / deviation[:, None] / deviation).clamp(-1, 1)
