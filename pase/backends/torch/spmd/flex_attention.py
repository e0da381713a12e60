"""Attention with the user's own score function and mask (``flex_attention``) on one rank.

Both functions are called with positions in the whole tensors. The computation is that of PyTorch without compilation:
all scores are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from pase.backends.torch.spmd.collectives import positions
from pase.backends.torch.spmd.record import whole as recorded_whole
from pase.backends.torch.spmd.rules import RANK_RULES, RankCall
from pase.backends.torch.spmd.values import NotOnParts

if TYPE_CHECKING:
    from torch import Tensor

__all__: list[str] = []


@RANK_RULES.register("flex_attention")
def _flex(call: RankCall) -> Tensor:
    """Each rank has a part of the batch, heads and queries. Sums are at least in float32, as in PyTorch."""
    import torch

    q, k, v = (call.given[name] for name in ("query", "key", "value"))
    (shape, layout), (whole, _) = call.layouts["query"], call.layouts["key"]
    if k.shape[-2] != whole[-2]:
        raise NotOnParts("its keys are split (a ring), which works only for attention without user functions")
    if k.shape[-1] != whole[-1] or q.shape[1] % k.shape[1]:
        raise NotOnParts("attention cannot be computed on such parts of its heads")
    at = [positions(i, shape, layout, call.groups, q.device) for i in range(3)]
    at.append(torch.arange(k.shape[2], device=q.device))
    user = UserScores(*(call.given[name] for name in ("scale", "score", "mask")))
    run = partial(_attended, user=user)
    return recorded_whole(
        run, q, k, v, at, call.given["score_reads"], call.given["mask_reads"], name="flex_attention"
    )


class UserScores(NamedTuple):
    """What a call of flex_attention does to scores: a scale, the user's function of them, and the user's mask."""

    scale: float
    score: Callable[..., Tensor]
    mask: Callable[..., Tensor]


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at: Sequence[Tensor],
    score_reads: Sequence[Tensor],
    mask_reads: Sequence[Tensor],
    *,
    user: UserScores,
) -> Tensor:
    """at: the positions of the batch, heads, queries and keys in the whole tensors."""
    import torch

    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    keys, values = (x.to(wide).repeat_interleave(group, 1) for x in (k, v))
    scores = q.to(wide) @ keys.transpose(-2, -1) * user.scale
    scores = _each(user.score, at, score_reads, scores)
    seen = _each(user.mask, at, mask_reads).expand(scores.shape)
    shares = torch._safe_softmax(
        scores.masked_fill(~seen, -torch.inf), -1
    )  # zeros if the mask hides all keys
    return (shares @ values).to(q.dtype)


def _each(
    function: Callable[..., Tensor], at: Sequence[Tensor], reads: Sequence[Tensor], *scores: Tensor
) -> Tensor:
    """Apply a function to all positions (batch, head, query, key), and to the scores at these positions if given."""
    import torch

    def one(*given: Tensor) -> Tensor:
        made = function(*given, *reads)
        return made[0] if isinstance(made, (tuple, list)) else made

    made = one
    for i in (3, 2, 1, 0):
        made = torch.vmap(made, in_dims=(*(0 for _ in scores), *(0 if i == k else None for k in range(4))))
    return made(*scores, *at)
