"""Finds attention masks that are the causal one, or hide nothing, so that attention can run without a mask.

Libraries build such masks when a model is exported, although their eager code passes ``is_causal``, or no mask.
PyTorch's fastest attention kernels take no mask, and a causal one skips half of the work. The others keep a Boolean
mask as numbers for backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from pase.backends.torch.spmd.constants import Constants, NodeIndex
from pase.backends.torch.spmd.values import NotOnParts
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import arguments, op_name

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ATTENTION", "MaskForm", "known_masks", "mask_form"]

MaskForm = Literal["causal", "whole"]
"""``whole``: each query sees all keys."""

ATTENTION = "scaled_dot_product_attention"
_MOST_ELEMENTS = 1 << 28
"""Masks with more elements are not computed to be compared."""


def known_masks(nodes: Iterable[FxNode], index: NodeIndex) -> Mapping[FxNode, MaskForm]:
    """The nodes among the operands of attention that are masks of a known form.

    Only masks that follow from the program alone are found: none that depends on data, on a buffer, or on an iteration.
    """
    import torch

    found = dict[FxNode, MaskForm]()
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
        form = mask_form(value) if type(value) is torch.Tensor else None
        if form is not None:
            found[mask] = form
    return found


def _mask_of(n: FxNode) -> FxNode | None:
    mask = arguments(n.target, n.args, n.kwargs).get("attn_mask")
    return mask if hasattr(mask, "meta") else None


def mask_form(mask: Tensor) -> MaskForm | None:
    """The form of a mask, [..., queries, keys]; None if it is another.

    A Boolean mask is true, and an added one is zero, where a query sees a key. Elsewhere, a Boolean mask is false, and
    an added one is at most the least number of its dtype.
    """
    import torch

    if mask.dim() < 2 or mask.is_meta:
        return None
    if mask.dtype == torch.bool:
        seen = mask
    elif mask.is_floating_point():
        seen = mask == 0
        if bool((mask[~seen] > torch.finfo(mask.dtype).min).any()):
            return None
    else:
        return None
    if bool(seen.all()):
        return "whole"
    triangle = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    return "causal" if mask.shape[-1] == mask.shape[-2] and bool((seen == triangle).all()) else None
