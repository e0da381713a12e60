"""The parameters of a step, in the layouts in which a rank's walks read them.

What a plan sends once a step (``LocalProgram.hoisted``) is gathered before the first micro-batch, and stays. The
gradients of all micro-batches are then added where they are made, and summed over the ranks behind the last one: by the
derivative of the gathers, whose moves are the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pase.backends.torch.spmd.collectives import there_and_back

if TYPE_CHECKING:
    from torch import Tensor

    from pase.backends.torch.spmd.interpreter import Body, RankWalk
    from pase.backends.torch.spmd.values import RankValue

__all__ = ["StepParameters"]


@dataclass(frozen=True, kw_only=True)
class StepParameters:
    """leaves: tensor -> what gets its gradient, in the layout in which that is kept. values: parameters, and their
    views and casts where these are made once, as the walks read them.

    received: number of a transfer that runs once -> what it brought. sums: number -> the sum of its gradients, for
    those that have one, in the dtype of the stored parameter. given: number -> what a walk reads.
    """

    leaves: Mapping[str, Tensor]
    values: Mapping[str, RankValue]
    received: Mapping[int, Tensor]
    sums: Mapping[int, Tensor]
    given: Mapping[int, Tensor]

    @staticmethod
    def of(leaves: Mapping[str, Tensor], body: Body, walk: RankWalk) -> StepParameters:
        """Send what is sent once. body: has the parameters, made from the leaves."""
        received = walk.arrivals(body)
        sums, given = {}, {}
        for n, x in received.items():
            given[n] = x
            if x.requires_grad:
                given[n], sums[n] = _apart(x, leaves[walk.stored(n)])
        return StepParameters(
            leaves=leaves, values=dict(body.values), received=received, sums=sums, given=given
        )

    def into(self, body: Body) -> None:
        """Give them to a micro-batch."""
        body.values.update(self.values)
        body.kept.receive(self.given)

    @property
    def trained(self) -> Iterator[Tensor]:
        """The leaves of autograd to which a micro-batch's backward adds."""
        yield from (x for x in (*self.leaves.values(), *self.sums.values()) if x.requires_grad)

    def reduce_gradients(self) -> None:
        """Sum over the ranks what is summed once, and add it to the leaves' gradients."""
        import torch

        ends = [(self.received[n], x.grad) for n, x in self.sums.items() if x.grad is not None]
        if ends:
            torch.autograd.backward([x for x, _ in ends], [g.to(x.dtype) for x, g in ends])


def _apart(x: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """(a tensor with x's numbers, which is no part of x's graph; a leaf of the stored dtype that gets its gradient)."""
    import torch

    if x.dtype == stored.dtype:
        leaf = x.detach().requires_grad_()
        return leaf, leaf
    nothing = torch.zeros((), dtype=stored.dtype, device=x.device).expand(x.shape)
    leaf = nothing.detach().requires_grad_()
    return there_and_back(x.detach(), leaf, lambda y: y, lambda g: g.to(stored.dtype)), leaf
