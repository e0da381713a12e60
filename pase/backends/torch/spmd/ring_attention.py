"""Attention whose keys are split like its queries: keys and values travel around the ring of ranks that share the
positions.

In each round, a rank attends to the keys that it has just received, and merges the results by their sums of
exponentials (Liu et al. 2023, arXiv 2310.01889). In backward, the gradients of keys and values travel with them and
reach their own rank at the end. Under a causal mask, positions are redistributed first, so that all ranks have the same
work: of 2n chunks, rank i of n gets chunks i and 2n-1-i (Llama 3, section 3.3.2). Tensors in this order are called
*dealt*. Results are put back into the original order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Protocol

from pase.backends.torch.spmd.process_groups import AxisGroups
from pase.backends.torch.spmd.record import whole

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd import Function as TorchFunction

__all__ = ["RankRing"]

_ROWS = 512
"""Number of queries processed together. It limits memory: their scores against all keys of a round exist at once."""


class RingResiduals(Protocol):
    """The autograd context of a call, with the residuals for its backward."""

    ring: RankRing
    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


@cache
def _function() -> type[TorchFunction]:
    """The autograd function of ``RankRing``."""
    import torch

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: RingResiduals, ring: RankRing, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            deals = ring.deals(k)
            q, k, v = ring.dealt([q, k, v]) if deals else (q, k, v)
            out, sums = ring.forward(q, k, v)
            (out,) = ring.undealt([out]) if deals else (out,)
            ctx.ring = ring
            ctx.save_for_backward(q, k, v, out, sums)  # ``out`` itself, because other ops may also keep it
            return out

        @staticmethod
        def backward(ctx: RingResiduals, gradient: Tensor) -> tuple[Tensor | None, ...]:
            ring = ctx.ring
            q, k, v, out, sums = ctx.saved_tensors
            if not ring.deals(k):
                return None, *ring.backward(q, k, v, out, sums, gradient)
            out, gradient = ring.dealt([out, gradient])
            return None, *ring.undealt(ring.backward(q, k, v, out, sums, gradient))

    return Ring


@dataclass(frozen=True, kw_only=True)
class RankRing:
    """Ring attention on one rank.

    axes: the mesh axes that split the positions, major to minor.
    scale: the factor of the scores.

    Queries, keys and values are this rank's parts, [batch, heads, positions, width]. If there are fewer heads of keys
    than of queries, they are repeated.
    """

    groups: AxisGroups
    axes: tuple[str, ...]
    causal: bool
    scale: float

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """This rank's part of the attention to all positions."""
        made: Tensor = whole(partial(_function().apply, self), q, k, v, name="ring_attention")
        return made

    @property
    def ranks(self) -> int:
        return self.groups.ways(self.axes)

    @property
    def rank(self) -> int:
        return self.groups.number(self.axes)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(the result, the logarithms of the sums of exponentials [batch, heads, positions])."""
        import torch

        wide = torch.promote_types(q.dtype, torch.float32)
        out, sums = _attended(q, k, v, self.scale, causal=self.causal)
        for round_index in range(1, self.ranks):
            k, v = self._next([k, v])
            queries, keys = self._attending(round_index, k)
            if queries is None:
                continue
            new_out, new_sums = _attended(q[..., queries, :], k[..., keys, :], v[..., keys, :], self.scale)
            merged_sums = torch.logaddexp(sums[..., queries], new_sums)
            rescaled = out[..., queries, :] * (sums[..., queries] - merged_sums).exp()[..., None]
            out[..., queries, :] = rescaled + new_out * (new_sums - merged_sums).exp()[..., None]
            sums[..., queries] = merged_sums
        assert out.dtype == wide
        return out.to(q.dtype), sums

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values.

        gradient: of the result. The other arguments are the operands and the results of ``forward``.
        """
        import torch

        wide = torch.promote_types(q.dtype, torch.float32)
        by_query = (q, sums, gradient, (gradient.to(wide) * out.to(wide)).sum(-1))
        dq, dk, dv = _gradients(*by_query, k, v, self.scale, causal=self.causal)
        for round_index in range(1, self.ranks):
            k, v, dk, dv = self._next([k, v, dk, dv])
            queries, keys = self._attending(round_index, k)
            if queries is None:
                continue
            attending = (
                q[..., queries, :],
                sums[..., queries],
                gradient[..., queries, :],
                by_query[3][..., queries],
            )
            gradients = _gradients(*attending, k[..., keys, :], v[..., keys, :], self.scale)
            for total, index, part in zip((dq, dk, dv), (queries, keys, keys), gradients, strict=True):
                total[..., index, :] += part
        dk, dv = self._next([dk, dv])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _attending(self, round_index: int, k: Tensor) -> tuple[slice | None, slice]:
        """The queries that attend to any of this round's keys, and the keys that they attend to.

        None for the queries if no query attends to any. In round r, the keys are those of rank ``rank - r``, modulo the
        number of ranks.
        """
        everything = slice(None)
        if not self.causal:
            return everything, everything
        half = k.shape[-2] // 2
        # If positions are dealt, rank i has chunks i and 2n-1-i. Of a lower rank's keys, the first chunk is before all
        # queries and the second chunk is after them. A higher rank's keys are between the two chunks of queries.
        if round_index <= self.rank:  # the keys come from a lower rank
            return everything, slice(half) if self.deals(k) else everything
        return (slice(half, None) if self.deals(k) else None), everything

    def _next(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send each rank's tensors to the next rank, in one message."""
        n = self.ranks
        return self._sent(parts, [(i, (i + 1) % n) for i in range(n)])

    def _sent(self, parts: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Send tensors from rank to rank in one message, and return what this rank receives. pairs: (from, to)."""
        import torch

        message = torch.cat([p.contiguous().view(torch.uint8).reshape(-1) for p in parts])
        received = self.groups.permute(message, self.axes, pairs).split(
            [p.numel() * p.element_size() for p in parts]
        )
        return [c.view(p.dtype).reshape(p.shape) for c, p in zip(received, parts, strict=True)]

    # Redistribution of positions under a causal mask

    def deals(self, x: Tensor) -> bool:
        """Whether positions are redistributed, which needs two equal chunks per rank."""
        return self.causal and x.shape[-2] % 2 == 0

    def _chunk_owners(self, odd: int) -> list[tuple[int, int]]:
        """Where each rank sends its even chunk (odd = 0) or its odd chunk (odd = 1): (from, to)."""
        chunks = [2 * i + odd for i in range(self.ranks)]
        return [(i, min(c, 2 * self.ranks - 1 - c)) for i, c in enumerate(chunks)]

    def dealt(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Exchange chunks 2i and 2i + 1 of rank i for chunks i and 2n - 1 - i."""
        halves = [p.chunk(2, -2) for p in parts]
        even, odd = (self._sent([h[i] for h in halves], self._chunk_owners(i)) for i in range(2))
        return [self._ordered(a, b) for a, b in zip(even, odd, strict=True)]

    def undealt(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of ``dealt``."""
        import torch

        halves = [self._ordered(*p.chunk(2, -2)).chunk(2, -2) for p in parts]
        even, odd = (
            self._sent([h[i] for h in halves], [(b, a) for a, b in self._chunk_owners(i)]) for i in range(2)
        )
        return [torch.cat([a, b], -2) for a, b in zip(even, odd, strict=True)]

    def _ordered(self, one: Tensor, other: Tensor) -> Tensor:
        """Concatenate (one, other) on even ranks and (other, one) on odd ranks.

        This converts between (even chunk, odd chunk) and the order of positions, (chunk i, chunk 2n-1-i): on an odd
        rank i, the even chunk is the later one.
        """
        import torch

        return torch.cat([one, other] if self.rank % 2 == 0 else [other, one], -2)


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


def _attended(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:
    """(the result, the logarithms of the sums of exponentials), both at least in float32."""
    import torch

    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (_repeated(x, q.shape[-3]).to(wide) for x in (k, v))
    outs, sums = [], []
    for i, rows in enumerate(q.to(wide).split(_ROWS, -2)):
        scores = _scores(rows, k, scale, i * _ROWS, causal)
        sums.append(scores.logsumexp(-1))
        outs.append((scores - sums[-1][..., None]).exp() @ v)
    return torch.cat(outs, -2), torch.cat(sums, -1)


def _gradients(
    q: Tensor,
    sums: Tensor,
    gradient: Tensor,
    delta: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, as far as they come from attention to these keys, at least in float32.

    sums: logarithms of the sums of exponentials over the keys of all ranks. delta: per query, Σ gradient · result.
    """
    import torch

    wide, heads = torch.promote_types(q.dtype, torch.float32), k.shape[-3]
    k, v = (_repeated(x, q.shape[-3]).to(wide) for x in (k, v))
    dk, dv, dq = torch.zeros_like(k), torch.zeros_like(v), []
    by_rows = (x.to(wide).split(_ROWS, -2) for x in (q, gradient))
    for i, (rows, g, s, a) in enumerate(
        zip(*by_rows, sums.split(_ROWS, -1), delta.to(wide).split(_ROWS, -1), strict=True)
    ):
        weights = (_scores(rows, k, scale, i * _ROWS, causal) - s[..., None]).exp()
        dv = dv + weights.transpose(-1, -2) @ g
        of_scores = weights * (g @ v.transpose(-1, -2) - a[..., None]) * scale
        dq.append(of_scores @ k)
        dk = dk + of_scores.transpose(-1, -2) @ rows
    if heads != k.shape[-3]:
        dk, dv = (x.unflatten(-3, (heads, -1)).sum(-3) for x in (dk, dv))
    return torch.cat(dq, -2), dk, dv
