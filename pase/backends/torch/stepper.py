"""A train step in PyTorch, which can check its gradients at the first call."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pase.backends.torch.local_update import on_local_parts
from pase.plan.gradient_check import GradientCheck
from pase.pytree import Tree

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from pase.backends.torch.parallel import ParallelModule
    from pase.backends.torch.pipeline.run import PipelinedModule

__all__ = ["TorchStep", "checked"]


def checked(parallel: ParallelModule | PipelinedModule, batch: tuple[Tree, ...]) -> GradientCheck:
    """Check a step on its first batch. Raises PaseError if a gradient is off."""
    found = parallel.check(*batch)
    found.raise_if_off()
    return found


@dataclass(kw_only=True)
class TorchStep:
    """A train step on this rank: ``step(*batch) -> loss``.

    check: whether the first call checks the gradients.
    result: the result of the check; None before it.
    """

    parallel: ParallelModule | PipelinedModule
    optimizer: Optimizer
    check: bool = False
    result: GradientCheck | None = None

    @property
    def module(self) -> Module:
        """The user's module, with this rank's part of the parameters."""
        return self.parallel.module

    def evaluating(self) -> AbstractContextManager[Module]:
        """See ``evaluating`` of ``parallelize``'s step."""
        return self.parallel.evaluating()

    def __call__(self, *batch: Tree) -> Tensor:
        """Run one update. Returns the loss before it, which is the same on every rank. batch: see ``parallelize`` of
        the plan."""
        if self.check and self.result is None:
            self.result = checked(self.parallel, batch)
        self.optimizer.zero_grad()
        loss = self.parallel.backward(*batch)
        with on_local_parts(self.optimizer):
            self.optimizer.step()
        return loss
