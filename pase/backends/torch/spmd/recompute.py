"""A block of which autograd keeps nothing: backward computes it again.

``torch.utils.checkpoint`` does so once for each call of backward. Where a pipeline's schedule divides backward,
PyTorch's code calls it for each group of weights. Here a block is computed again once, and what that makes stays as
long as anything of the block waits.
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
    """All that backward needs is there."""


def recomputed(
    block: Callable[[], T], first: AbstractContextManager[object], second: AbstractContextManager[object]
) -> T:
    """What the block returns. first, second: around it as it runs, and as it runs again.

    block: holds nothing that is made of its results, or autograd's graph would hold itself.
    """
    import torch

    saved = _Saved(block=block, around=second)
    with torch.autograd.graph.saved_tensors_hooks(saved.counted, _Saved.tensor), first:
        return block()


@dataclass(kw_only=True)
class _Saved:
    """What autograd saves of a block. many: how many tensors. made: these tensors, once they are made again."""

    block: Callable[[], object]
    around: AbstractContextManager[object]
    many: int = 0
    made: list[Tensor] = field(default_factory=list)

    def counted(self, x: Tensor) -> tuple[_Saved, int]:
        """Stands for a tensor, by its number."""
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
                f"a block made {self.many} tensors for backward, and {len(self.made)} when it was computed again: "
                f"this is a defect of pase.backends"
            )
