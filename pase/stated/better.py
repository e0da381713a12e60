"""Improves a stated strategy under its own price: one change at a time, as long as one helps.

A change doubles or halves one degree (its factor goes to or comes from another degree, so that the number of devices
stays the same), the micro-batch or the stages per rank, or selects another kind of ZeRO, recomputation or sequence
parallelism. A strategy that fits is preferred to any that does not. The answer is never more expensive than the initial
strategy, if that fits. It is not proven to be the cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, get_args

from pase.errors import PaseError
from pase.stated.price import Priced
from pase.stated.strategy import Remat, Strategy

__all__ = ["Better", "better", "changes", "neighbours"]

_DEGREES = ("ranks", "tensor", "context", "pipeline")
_WORDS = {
    "ranks": ("more data parallelism", "less data parallelism"),
    "tensor": ("more tensor parallelism", "less tensor parallelism"),
    "context": ("more context parallelism", "less context parallelism"),
    "expert": ("more expert parallelism", "less expert parallelism"),
    "pipeline": ("more stages", "fewer stages"),
    "chunks": ("more stages on a rank", "fewer stages on a rank"),
    "micro": ("larger micro-batches", "smaller micro-batches"),
}


@dataclass(frozen=True, kw_only=True)
class Better:
    """The cheapest strategy that was met and fits; if none fits, the cheapest. tried: how many were priced."""

    priced: Priced
    tried: int


def neighbours(s: Strategy) -> Iterator[Strategy]:
    """Yield the strategies one change away, on the same devices. Not all of them can be placed on every model."""
    for a, b in permutations(_DEGREES, 2):
        if getattr(s, a) % 2 == 0:
            moved = _with(s, **{a: getattr(s, a) // 2, b: getattr(s, b) * 2})
            yield moved
            if moved.asynchronous and b == "tensor":  # it may now cross links that async does not support
                yield replace(moved, asynchronous=False)
    for name in ("micro", "chunks", "expert"):
        value = getattr(s, name) or 1
        halves = [value // 2] * (value % 2 == 0)
        if name != "chunks" or s.pipeline > 1:
            yield from (_changed(s, {name: k}) for k in [value * 2, *halves])
    yield from (replace(s, remat=r) for r in get_args(Remat) if r != (s.remat or "none"))
    yield from (_with(s, zero=z) for z in (0, 1, 2, 3) if z != s.zero and s.ranks * s.context > 1)
    if s.tensor > 1:
        yield replace(s, sequence=not s.sequence, asynchronous=False)
    if s.context > 1:
        yield replace(s, heads=not s.heads)


def _with(s: Strategy, **degrees: int) -> Strategy:
    """Return the strategy with other degrees. With ZeRO, ranks shard what it shards; without, they are replicas."""
    now = {"ranks": s.ranks, "zero": s.zero} | degrees
    ranks, zero = now.pop("ranks"), now.pop("zero")
    if ranks * now.get("context", s.context) == 1:
        zero = 0
    groups = s.data if zero and ranks % s.data == 0 and s.zero else 1
    data, shard = (ranks, 1) if zero == 0 else (groups, ranks // groups)
    tensor, heads = now.get("tensor", s.tensor), s.heads and now.get("context", s.context) > 1
    chunks = s.chunks if now.get("pipeline", s.pipeline) > 1 else 1
    shared = {"data": data, "shard": shard, "zero": zero, "chunks": chunks, "heads": heads}
    split = {"sequence": s.sequence and tensor > 1, "asynchronous": s.asynchronous and tensor > 1}
    return _changed(s, {**now, **shared, **split})


def _changed(s: Strategy, fields: Mapping[str, Any]) -> Strategy:
    return replace(s, **fields)


def better(start: Priced, price: Callable[[Strategy], Priced]) -> Better:
    """Follow the change that helps most until none does. price: raises PaseError if a strategy cannot be priced."""
    best, seen = start, {start.strategy}
    while True:
        found = best
        for s in neighbours(best.strategy):
            if s in seen or s.ranks % s.expert:
                continue
            seen.add(s)
            try:
                p = price(s)
            except PaseError:
                continue
            if (not p.fits, p.step_s) < (not found.fits, found.step_s):
                found = p
        if found is best:
            return Better(priced=best, tried=len(seen))
        best = found


def changes(a: Strategy, b: Strategy) -> list[str]:
    """Return what the second strategy does differently, in words.

    >>> changes(Strategy(tensor=8, remat="full"), Strategy(tensor=4, data=2, remat="none"))
    ['more data parallelism', 'less tensor parallelism', 'no recomputation']
    """
    out = []
    for name, (more, less) in _WORDS.items():
        x, y = (getattr(s, name) or 1 for s in (a, b))
        if x != y:
            out.append(more if y > x else less)
    if a.zero != b.zero:
        out.append(f"ZeRO {b.zero}" if b.zero else "no ZeRO")
    if (a.remat or "none") != (b.remat or "none"):
        out.append("no recomputation" if b.remat in (None, "none") else f"{b.remat} recomputation")
    if min(a.context, b.context) > 1 and a.heads != b.heads:
        out.append("heads for positions" if b.heads else "keys and values sent")
    if min(a.tensor, b.tensor) > 1:  # these apply only to tensor parallelism
        for name, what in (
            ("sequence", "sequence parallelism"),
            ("asynchronous", "collectives during products"),
        ):
            if getattr(a, name) != getattr(b, name):
                out.append(f"{'with' if getattr(b, name) else 'without'} {what}")
    return out
