"""Gradients of a rank's parts of parameters, and the parameters that get them.

A parameter is a DTensor, and ``to_local`` of it is an op for autograd, with a backward of its own. A step that runs
forward and backward together does without: autograd sees this rank's part as a leaf, and the parameter gets a DTensor
around the leaf's gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor

__all__ = ["LocalGradients", "added", "distributed_like"]


@dataclass
class LocalGradients:
    """The leaves of parameters, which share memory with them. They are kept from step to step.

    leaves: tensor -> (this rank's part of the parameter, the leaf).
    """

    leaves: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @contextlib.contextmanager
    def collected(self, stored: Mapping[str, DTensor]) -> Iterator[Mapping[str, Tensor]]:
        """The leaves: tensor -> leaf. At the end, the parameters' ``grad`` has their gradients, added to what it had.

        A parameter that has hooks on its gradient gets it from autograd, which calls them, once for all micro-batches.
        """
        import torch

        read: dict[str, Tensor] = {}
        before: dict[str, Tensor | None] = {}
        for t, p in stored.items():
            if not p.requires_grad:
                read[t] = p.to_local()
                continue
            local = p._local_tensor  # ``to_local`` makes a new view of it at each call
            if t not in self.leaves or self.leaves[t][0] is not local:
                self.leaves[t] = local, local.detach().requires_grad_()
            read[t] = self.leaves[t][1]
            hooked = bool(p._backward_hooks or p._post_accumulate_grad_hooks)
            before[t] = None if p.grad is None or hooked else p.grad._local_tensor  # type: ignore[attr-defined]
            read[t].grad = before[t]
        try:
            yield read
            for t, had in before.items():
                made, p = read[t].grad, stored[t]
                if made is None or made is had:
                    continue
                if p._backward_hooks or p._post_accumulate_grad_hooks:
                    torch.autograd.backward([p], [distributed_like(p, made)])
                else:
                    p.grad = distributed_like(p, made)
        finally:
            for t in before:
                read[t].grad = None


def distributed_like(parameter: DTensor, local: Tensor) -> DTensor:
    """A DTensor of this rank's part, with the layout of a parameter. Autograd does not see how it was made."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, parameter._spec, requires_grad=False)


def added(parameter: DTensor, gradient: Tensor) -> None:
    """Add this rank's part of a gradient to a parameter's ``grad``.

    The first gradient is copied: autograd may pass one tensor to both operands of a sum, and a broadcast tensor has one
    number in many places.
    """
    import torch

    if parameter.grad is not None:
        parameter.grad.to_local().add_(gradient)  # type: ignore[attr-defined]
        return
    parameter.grad = distributed_like(parameter, gradient.clone(memory_format=torch.contiguous_format))
