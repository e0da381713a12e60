"""Finds attention masks that are the causal one, so that attention can run with ``is_causal`` and without a mask.

Libraries build the mask when a model is exported, although their eager code passes ``is_causal``. PyTorch's fastest
attention kernels take no mask, and a causal one skips half of the work.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pase.backends.torch.spmd.constants import Constants, NodeIndex
from pase.backends.torch.spmd.values import NotOnParts
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import arguments, op_name

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ATTENTION", "causal_masks", "is_causal"]

ATTENTION = "scaled_dot_product_attention"
_MOST_ELEMENTS = 1 << 28
"""Masks with more elements are not computed to be compared."""


def causal_masks(nodes: Iterable[FxNode], index: NodeIndex) -> frozenset[FxNode]:
    """The nodes among the operands of attention that are the causal mask.

    Only masks that follow from the program alone are found: none that depends on data, on a buffer, or on an iteration.
    """
    import torch

    found = set[FxNode]()
    constants = Constants(index=index, buffers={}, device=torch.device("cpu"), seed_at=lambda path: 0)
    for mask in {m for n in nodes if op_name(n) == ATTENTION for m in [_mask_of(n)] if m is not None}:
        if index.decided(mask) or mask.meta["val"].numel() > _MOST_ELEMENTS:
            continue
        try:
            value = constants.of(mask)
        except (
            NotOnParts,
            RuntimeError,
            NotImplementedError,
        ):  # it needs a buffer, or an op that the CPU lacks
            continue
        if type(value) is torch.Tensor and is_causal(value):
            found.add(mask)
    return frozenset(found)


def _mask_of(n: FxNode) -> FxNode | None:
    mask = arguments(n.target, n.args, n.kwargs).get("attn_mask")
    return mask if hasattr(mask, "meta") else None


def is_causal(mask: Tensor) -> bool:
    """Whether attention with this mask, [..., queries, keys], is causal attention.

    A Boolean mask is true, and an added one is zero, up to the diagonal. Behind it, a Boolean mask is false, and an
    added one is at most the least number of its dtype.
    """
    import torch

    if mask.dim() < 2 or mask.shape[-1] != mask.shape[-2] or mask.is_meta:
        return False
    if mask.dtype == torch.bool:
        seen = mask
    elif mask.is_floating_point():
        seen = mask == 0
        if bool((mask[~seen] > torch.finfo(mask.dtype).min).any()):
            return False
    else:
        return False
    wanted = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    return bool((seen == wanted).all())
