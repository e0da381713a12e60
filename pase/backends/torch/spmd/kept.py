"""What a walk keeps for later readers: the results of transfers.

A kept value means the same to every reader. Whichever op reads it first (one under ``torch.no_grad``, one of a block
that is computed again, one of a loop's turn), it is made in the gradient mode of its walk, and it belongs to one body:
one micro-batch, of one stage, in one turn, the first time or again.
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
    """Results of transfers, by number. watched: whether autograd records the walk that makes them.

    received: those of them that were made before the walk, for all of it.
    """

    watched: bool
    received: dict[int, Tensor] = field(default_factory=dict)
    made: dict[int, Tensor] = field(default_factory=dict)

    def receive(self, sent: Mapping[int, Tensor]) -> None:
        """Put in what transfers have brought before the walk."""
        self.received.update(sent)
        self.made.update(sent)

    def inner(self) -> KeptTransfers:
        """For a body within: what was made before the walk, and nothing else."""
        return KeptTransfers(watched=self.watched, received=self.received, made=dict(self.received))

    def of(self, number: int, make: Callable[[], Tensor]) -> Tensor:
        """The result of a transfer, made for all readers if it is not there yet.

        A reader under ``torch.no_grad`` that comes first would otherwise leave a value without history to readers that
        are differentiated, and their gradients would be lost in silence.
        """
        if number not in self.made:
            import torch

            with torch.set_grad_enabled(self.watched):
                self.made[number] = make()
        return self.made[number]
