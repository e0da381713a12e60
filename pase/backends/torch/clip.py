"""The norm of gradients that are DTensors on several meshes, or on the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor

__all__ = ["clipped"]


def clipped(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float, joined: Callable[[Tensor], Tensor]
) -> Tensor:
    """Scale gradients so that their norm is at most ``max_norm``, like ``torch.nn.utils.clip_grad_norm_``. Returns the
    norm before scaling, in float64.

    parameters: the parameters of this rank, whose gradients are DTensors.
    joined: maps this rank's norm to the norms of all ranks that hold other gradients.
    """
    import torch
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    alike: dict[object, list[Tensor]] = {}  # one op accepts only DTensors of one mesh
    for p in parameters:
        if p.grad is not None:
            alike.setdefault(_of_dtensor(p.grad).device_mesh, []).append(p)
    grads = ([p.grad for p in of if p.grad is not None] for of in alike.values())
    norms = [get_total_norm(of, norm_type) for of in grads]
    wide = [_of_dtensor(x).full_tensor().double() for x in norms] or [torch.zeros((), dtype=torch.float64)]
    total = torch.linalg.vector_norm(
        joined(torch.linalg.vector_norm(torch.stack(wide), norm_type)), norm_type
    )
    for of in alike.values():
        clip_grads_with_norm_(of, max_norm, total)
    return total


def _of_dtensor(x: Tensor) -> DTensor:
    from torch.distributed.tensor import DTensor

    assert isinstance(x, DTensor)
    return x
