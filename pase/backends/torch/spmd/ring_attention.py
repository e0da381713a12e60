"""Attention whose keys are split like its queries, on a rank of a ring (``pase.local.ring``)."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, TypeAlias

from pase.backends.torch.spmd.record import whole
from pase.backends.torch.spmd.values import OpContext
from pase.local.ring import Attended, RingAttention

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd import Function as TorchFunction

__all__ = ["RowAttention", "ring_attention"]

RingContext: TypeAlias = "OpContext[RingAttention[Tensor]]"

_ROWS = 512
"""Number of queries processed together. It limits memory: their scores against all keys of a round exist at once."""


@cache
def _function() -> type[TorchFunction]:
    """The autograd function of ``ring_attention``."""
    import torch

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: RingContext, ring: RingAttention[Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, residuals = ring.forward(q, k, v)
            ctx.besides = ring
            ctx.save_for_backward(*residuals, out)  # ``out`` itself, because other ops may also keep it
            return out

        @staticmethod
        def backward(ctx: RingContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
            q, k, v, sums, out = ctx.saved_tensors
            return None, *ctx.besides.backward(q, k, v, sums, out, gradient)

    return Ring


def ring_attention(ring: RingAttention[Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This rank's part of the attention to all positions.

    q, k, v: its parts, [batch, heads, positions, width].
    """
    made: Tensor = whole(partial(_function().apply, ring), q, k, v, name="ring_attention")
    return made


class RowAttention:
    """Attention on a rank by its definition, some rows of queries at a time, computed at least in float32.

    If there are fewer heads of keys than of queries, they are repeated.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """(the result, the logarithms of the sums of exponentials [batch, heads, positions])."""
        import torch

        wide = torch.promote_types(q.dtype, torch.float32)
        k, v = (_repeated(x, q.shape[-3]).to(wide) for x in (k, v))
        outs, sums = [], []
        for i, rows in enumerate(q.to(wide).split(_ROWS, -2)):
            scores = _scores(rows, k, scale, i * _ROWS, causal)
            sums.append(scores.logsumexp(-1))
            outs.append((scores - sums[-1][..., None]).exp() @ v)
        return torch.cat(outs, -2), torch.cat(sums, -1)

    def backward(
        self, done: Attended[Tensor], gradient: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values, as far as they come from attention to these keys."""
        import torch

        q, k, v, result, sums = done
        wide, heads = torch.promote_types(q.dtype, torch.float32), k.shape[-3]
        k, v = (_repeated(x, q.shape[-3]).to(wide) for x in (k, v))
        dk, dv, dq = torch.zeros_like(k), torch.zeros_like(v), []
        by_query = (x.split(_ROWS, -2) for x in (q, gradient, result, sums[..., None]))
        for i, arrays in enumerate(zip(*by_query, strict=True)):
            rows, g, out, of_rows = (x.to(wide) for x in arrays)
            weights = (_scores(rows, k, scale, i * _ROWS, causal) - of_rows).exp()
            dv = dv + weights.transpose(-1, -2) @ g
            of_scores = weights * (g @ v.transpose(-1, -2) - (g * out).sum(-1, keepdim=True)) * scale
            dq.append(of_scores @ k)
            dk = dk + of_scores.transpose(-1, -2) @ rows
        if heads != k.shape[-3]:
            dk, dv = (x.unflatten(-3, (heads, -1)).sum(-3) for x in (dk, dv))
        return torch.cat(dq, -2), dk, dv


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Keys or values, repeated so that there are as many heads as of queries."""
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], -3)


def _scores(q: Tensor, k: Tensor, scale: float, first: int, causal: bool) -> Tensor:
    """Scores of queries against keys. first: the position of the first query, if the mask is causal. The first key is
    then at position 0."""
    import torch

    scores = q @ k.transpose(-1, -2) * scale
    if not causal:
        return scores
    at = torch.arange(first, first + q.shape[-2], device=q.device)[:, None]
    return scores.masked_fill(torch.arange(k.shape[-2], device=q.device) > at, float("-inf"))
