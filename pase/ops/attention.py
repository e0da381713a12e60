"""Attention as one loop nest: two products with a softmax between them. The array of scores is not kept."""

from __future__ import annotations

from collections.abc import Sequence

from pase.errors import PaseError
from pase.ir import AccessMap, DimKind, Size, Tensor, Walk
from pase.ir.functions import ATTENTION, CAUSAL_ATTENTION
from pase.ir.sizes import is_one, quotient
from pase.ops.builder import Computes, GraphBuilder, Read, Write

__all__ = ["attention"]


def attention(
    b: GraphBuilder,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extra: Sequence[Tensor] = (),
    *,
    causal: bool = False,
    order: Sequence[int] = (0, 1, 2, 3),
    extra_flops: float = 0.0,
) -> Tensor:
    """softmax(q kᵀ) v for queries [b, q, heads, d], keys [b, s, kv heads, d] and values [b, s, kv heads, e].

    Query heads that share a key-value head are adjacent. The result has the layout of q. The nest also writes the
    logarithm of each query's sum, [b, q, heads] in float32, because backward needs it.

    extra: a bias or a mask that broadcasts to [b, heads, q, s].
    order: the positions of these four dims in q, k, v and the result.
    extra_flops: FLOPs per point of the scores, for a soft cap or similar.

    Batch, heads and queries may be split. Keys may not, because a softmax is not a sum of its parts. Widths may not
    either.
    """
    batch, position, head, width = order
    group = quotient(q.shape[head], k.shape[head])
    if group is None or k.shape[position] != v.shape[position] or k.shape[head] != v.shape[head]:
        raise PaseError(
            f"queries {q.shape}, keys {k.shape} and values {v.shape} do not fit each other",
            where=f"attention at {b.source}",
        )
    dims: dict[str, tuple[Size, DimKind]] = {}

    def dim(name: str, size: Size, kind: DimKind = "parallel") -> tuple[str, ...]:
        if is_one(size):
            return ()
        dims[name] = (size, kind)
        return (name,)

    rows, queries = dim("b", q.shape[batch]), dim("q", q.shape[position])
    kv_heads, groups = dim("h", k.shape[head]), dim("g", group)
    keys = dim("s", k.shape[position], "replicated")
    inner, outer = dim("d", q.shape[width], "replicated"), dim("e", v.shape[width], "replicated")

    def placed(*walks: tuple[str, ...]) -> AccessMap:
        out = [Walk()] * 4
        for at, names in zip(order, walks, strict=True):
            out[at] = Walk(names)
        return AccessMap(tuple(out))

    heads = kv_heads + groups
    reads = [
        Read(q, placed(rows, queries, heads, inner)),
        Read(k, placed(rows, keys, kv_heads, inner)),
        Read(v, placed(rows, keys, kv_heads, outer)),
    ]
    for t in extra:
        walks = [
            () if is_one(s) else names for s, names in zip(t.shape, (rows, heads, queries, keys), strict=True)
        ]
        reads.append(Read(t, AccessMap.of(*walks)))
    shape = tuple(v.shape[width] if i == width else s for i, s in enumerate(q.shape))
    result, sums = placed(rows, queries, heads, outer), AccessMap.of(rows, queries, heads)
    each = (q.shape[batch], q.shape[position], q.shape[head])
    # A multiply-add counts as two FLOPs: one multiply-add per d in the scores, one per e in the result.
    flops = 2.0 * float(q.shape[width] + v.shape[width]) + extra_flops  # type: ignore[arg-type, operator]
    over = [d for d in dims if d not in ("d", "e")]
    return b.nest(
        "attention",
        "attention",
        reads,
        [Write(shape, q.dtype, result), Write(each, "float32", sums)],
        dims,
        Computes(function=CAUSAL_ATTENTION if causal else ATTENTION),
        flops=flops,
        over=over,
    )[0]
