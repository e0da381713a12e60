"""The norm of gradients that are DTensors on several meshes, or on the stages of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
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
    from torch.nn.utils import clip_grads_with_norm_

    alike: dict[DeviceMesh, list[Tensor]] = {}  # one op accepts only DTensors of one mesh
    parts: dict[tuple[DeviceMesh, tuple[int, ...]], list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            g = _of_dtensor(p.grad)
            split = tuple(i for i, how in enumerate(g.placements) if not how.is_replicate())
            alike.setdefault(g.device_mesh, []).append(p)
            parts.setdefault((g.device_mesh, split), []).append(g.to_local())
    norms = [_norm(of, norm_type, mesh, split) for (mesh, split), of in parts.items()]
    total = joined(
        torch.linalg.vector_norm(torch.stack(norms or [torch.zeros((), dtype=torch.float64)]), norm_type)
    )
    total = torch.linalg.vector_norm(total, norm_type)
    for of in alike.values():
        clip_grads_with_norm_(of, max_norm, total)
    return total


def _norm(parts: list[Tensor], kind: float, mesh: DeviceMesh, split: tuple[int, ...]) -> Tensor:
    """The norm, in float64, of tensors that are split over these dims of the mesh. parts: this rank's."""
    import torch
    from torch.distributed import ReduceOp, all_reduce

    filled = [x for x in parts if x.numel()]
    norms = torch._foreach_norm(filled, kind) if filled else [torch.zeros((), device=parts[0].device)]
    norm = torch.linalg.vector_norm(torch.stack([x.double() for x in norms]), kind)
    if not split:
        return norm
    most = math.isinf(kind)
    norm = norm if most else norm**kind
    for i in split:
        all_reduce(norm, ReduceOp.MAX if most else ReduceOp.SUM, mesh.get_group(i))
    return norm if most else norm ** (1 / kind)


def _of_dtensor(x: Tensor) -> DTensor:
    from torch.distributed.tensor import DTensor

    assert isinstance(x, DTensor)
    return x
