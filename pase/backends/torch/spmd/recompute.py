"""A block of ops whose residuals autograd does not keep: backward recomputes them.

``torch.utils.checkpoint`` recomputes a block once per call of backward. If a pipeline's schedule divides backward,
PyTorch's code calls it once per group of weights. Here, a block is recomputed only once, and the result is kept while
anything of the block is still needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from pase.errors import PaseError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["recomputed"]

T = TypeVar("T")


class _Enough(Exception):
    """Signals that a recomputation has produced everything that backward needs."""


def recomputed(
    block: Callable[[], T], first: AbstractContextManager[object], second: AbstractContextManager[object]
) -> T:
    """Returns the block's result. first, second: the contexts of the first run and of the recomputation.

    block: must not hold anything made from its results, because autograd's graph would then hold itself.
    """
    import torch

    saved = _Saved(block=block, around=second)
    with torch.autograd.graph.saved_tensors_hooks(saved.counted, _Saved.tensor), first:
        return block()


@dataclass(kw_only=True)
class _Saved:
    """The tensors that autograd saves of a block. many: their number. made: their recomputed values."""

    block: Callable[[], object]
    around: AbstractContextManager[object]
    many: int = 0
    made: list[Tensor] = field(default_factory=list)

    def counted(self, x: Tensor) -> tuple[_Saved, int]:
        """Returns a placeholder for a saved tensor, with its number."""
        self.many += 1
        return self, self.many - 1

    @staticmethod
    def tensor(place: tuple[_Saved, int]) -> Tensor:
        saved, number = place
        if not saved.made:
            saved._recompute()
        return saved.made[number]

    def _recompute(self) -> None:
        import torch

        def kept(x: Tensor) -> Tensor:
            self.made.append(x.detach())
            if len(self.made) == self.many:
                raise _Enough
            return x

        hooks = torch.autograd.graph.saved_tensors_hooks(kept, lambda x: x)
        with contextlib.suppress(_Enough), torch.enable_grad(), hooks, self.around:
            self.block()
        if len(self.made) != self.many:
            raise PaseError(
                f"a block saved {self.many} tensors for backward, but {len(self.made)} when it was recomputed",
                fix="report this as a bug in pase.backends",
            )
