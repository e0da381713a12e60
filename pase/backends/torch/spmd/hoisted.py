"""The parameters of a step, in the layouts in which a rank's walks read them.

A hoisted transfer (``LocalProgram.hoisted``) gathers its parameter before the first micro-batch, and the result stays
in memory. The gradients of all micro-batches are then added locally. After the last micro-batch, the derivative of the
gathers sums them over the ranks, with the reshard steps that the plan has for it, in joined messages
(``messages.GradientSending``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pase.backends.torch.spmd.collectives import there_and_back

if TYPE_CHECKING:
    from torch import Tensor

    from pase.backends.torch.spmd.interpreter import Body, RankWalk
    from pase.backends.torch.spmd.messages import GradientSending
    from pase.backends.torch.spmd.values import RankValue

__all__ = ["StepParameters"]


@dataclass(frozen=True, kw_only=True)
class StepParameters:
    """Parameters as the walks of a step read them.

    leaves: tensor -> the autograd leaf that gets its gradient, in the layout in which the gradient is kept.
    values: the parameters, and those of their views and casts that are computed once per step.
    received: number of a hoisted transfer -> its result.
    sums: number -> the sum of its gradients, in the dtype of the stored parameter, for transfers that have gradients.
    given: number -> the tensor that a walk reads.
    sending: sends the gradients of the transfers.
    """

    leaves: Mapping[str, Tensor]
    values: Mapping[str, RankValue]
    received: Mapping[int, Tensor]
    sums: Mapping[int, Tensor]
    given: Mapping[int, Tensor]
    sending: GradientSending

    @staticmethod
    def of(leaves: Mapping[str, Tensor], body: Body, walk: RankWalk) -> StepParameters:
        """Run the hoisted transfers. body: holds the parameters, made from the leaves."""
        with walk.sending.announcing():
            received = walk.arrivals(body)
        sums, given = {}, {}
        for n, x in received.items():
            given[n] = x
            if x.requires_grad:
                given[n], sums[n] = _apart(x, leaves[walk.stored(n)])
        return StepParameters(
            leaves=leaves,
            values=dict(body.values),
            received=received,
            sums=sums,
            given=given,
            sending=walk.sending,
        )

    def into(self, body: Body) -> None:
        """Put them into the body of a micro-batch."""
        body.values.update(self.values)
        body.kept.receive(self.given)

    @property
    def trained(self) -> Iterator[Tensor]:
        """The autograd leaves to which a micro-batch's backward adds gradients."""
        yield from (x for x in (*self.leaves.values(), *self.sums.values()) if x.requires_grad)

    def reduce_gradients(self) -> None:
        """Sum the gradients of hoisted transfers over the ranks, and add the sums to the leaves' gradients."""
        import torch

        ends = [(self.received[n], x.grad) for n, x in self.sums.items() if x.grad is not None]
        if ends:
            torch.autograd.backward([x for x, _ in ends], [g.to(x.dtype) for x, g in ends])
        self.sending.finish()


def _apart(x: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """(a tensor with x's values that is detached from x's graph, the leaf of the stored dtype that gets its
    gradient)."""
    import torch

    if x.dtype == stored.dtype:
        leaf = x.detach().requires_grad_()
        return leaf, leaf
    nothing = torch.zeros((), dtype=stored.dtype, device=x.device).expand(x.shape)
    leaf = nothing.detach().requires_grad_()
    return there_and_back(x.detach(), leaf, lambda y: y, lambda g: g.to(stored.dtype)), leaf
