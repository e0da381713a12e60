"""The results of transfers that a walk keeps for later readers.

A kept value is the same for every reader, whichever op reads it first: an op under ``torch.no_grad``, an op of a
recomputed block, or an op of a loop's iteration. It is therefore computed in the gradient mode of its walk. It belongs
to one body: one micro-batch, one stage, one iteration, and either the first run or a recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KeptTransfers"]


@dataclass(kw_only=True)
class KeptTransfers:
    """Results of transfers, by number.

    watched: whether autograd records the walk that computes them.
    received: the results that were computed before the walk and are valid in all of it.
    """

    watched: bool
    received: dict[int, Tensor] = field(default_factory=dict)
    made: dict[int, Tensor] = field(default_factory=dict)

    def receive(self, sent: Mapping[int, Tensor]) -> None:
        """Add the results of transfers that ran before the walk."""
        self.received.update(sent)
        self.made.update(sent)

    def inner(self) -> KeptTransfers:
        """The initial state for a nested body: only the results from before the walk."""
        return KeptTransfers(watched=self.watched, received=self.received, made=dict(self.received))

    def of(self, number: int, make: Callable[[], Tensor]) -> Tensor:
        """The result of a transfer. ``make`` computes it for all readers if it is not there yet.

        If the first reader ran under ``torch.no_grad`` and computed it there, later readers that are differentiated
        would get a value without history, and their gradients would be lost silently.
        """
        if number not in self.made:
            import torch

            with torch.set_grad_enabled(self.watched):
                self.made[number] = make()
        return self.made[number]
