"""An op that gives a value the derivative of another one, infinite or not."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from pase.frontends.torch.values import TorchOperand

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PASSED", "passed_op"]

_LIBRARY = "pase"
PASSED = f"{_LIBRARY}::passed"
"""The op's name in a graph."""


@cache
def _library() -> TorchOperand:
    import torch

    library = torch.library.Library(_LIBRARY, "DEF")
    library.define("passed(Tensor value, Tensor gradient) -> Tensor")
    library.impl("passed", lambda value, gradient: value.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake(PASSED, lambda value, gradient: torch.empty_like(value), lib=library)

    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, g

    def mapped(info: Any, dims: tuple[int | None, ...], *given: Tensor) -> tuple[Tensor, int]:
        every = [
            x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0)
            for x, d in zip(given, dims, strict=True)
        ]
        return passed_op()(*every), 0

    torch.library.register_autograd(PASSED, backward, lib=library)
    torch.library.register_vmap(PASSED, mapped, lib=library)
    return library


def passed_op() -> TorchOperand:
    """The op: ``value``, whose derivative is that of ``gradient``, of the same shape and dtype. ``value`` gets none.

    The usual ``value.detach() + (gradient - gradient.detach())`` is not a number where ``gradient`` is infinite.
    """
    import torch

    _library()
    return torch.ops.pase.passed.default
