"""Values that depend on no data, on two sizes of batch: by which power of the sizes' ratio they differ.

A mask, a table of positions or a count has one value on the whole batch and another on a micro-batch. ``Constant`` says
how the two compare, and ``derived`` finds it for an op from what is known about its operands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pase.ir.functions import CAST, CONV, COPY, IOTA, MATMUL, MOVE, NEG, REDUCE_MAX, SUM, UNSTACK
from pase.ir.literals import Number
from pase.ir.maps import Walk
from pase.ir.parameters import EqualPart, Iota, Pad, Reshape, Slice
from pase.ir.types import IterationSpace, Op, Tensor, is_floating

__all__ = ["Constant", "OpOnBoth", "derived", "number_power", "of_contents", "periods_along", "power_of"]

_POWERS = (0, 1, -1, 2, -2)
_ROUNDED = 1e-6
"""How much two numbers may differ, relatively, that are equal but for rounding to float32."""

_ALL_OR_ANY = ("reduce_and", "reduce_or", "reduce_min")


@dataclass(frozen=True, kw_only=True)
class Constant:
    """How a value on the whole batch compares with the value on a micro-batch, which is k times smaller.

    power: it is k ** power times larger.
    periods: for each dim, 0 if its size is the same on both and elements are compared index by index; otherwise the
        number of elements after which the dim's elements repeat, so that they are the same for every example.
    uniform: all of its elements are the same number.
    zero: all of its elements are zero.
    """

    power: int
    periods: tuple[int, ...]
    uniform: bool = False
    zero: bool = False


@dataclass(frozen=True, kw_only=True)
class OpOnBoth:
    """An op of the whole batch's graph and the same op of a micro-batch's graph.

    whole_space, space: the iteration dims of the two, which have the same names. tensors: those of the micro-batch.
    k: the ratio of the two sizes of batch. same: whether the graphs give the ops equal parameters and, as far as they
        do not determine the ops, the programs give them equal attributes.
    """

    whole: Op
    op: Op
    whole_space: IterationSpace
    space: IterationSpace
    tensors: Mapping[str, Tensor]
    k: int
    same: bool

    def sizes(self, d: str) -> tuple[int, int]:
        """The sizes of a dim, on the whole batch and on a micro-batch."""
        return int(self.whole_space[d].size), int(self.space[d].size)  # type: ignore[arg-type]

    def differs(self, d: str) -> bool:
        """Whether the dim's size depends on the batch's."""
        whole, part = self.sizes(d)
        return whole != part


def number_power(whole: Sequence[Number | None], part: Sequence[Number | None], k: int) -> int | None:
    """The power of k by which the one number that differs is larger; 0 if none differs, None for anything else.

    >>> number_power((None, 16), (None, 4), 4), number_power((None, 2.0), (None, 2.0), 4), number_power((3,), (2,), 4)
    (1, 0, None)
    """
    if len(whole) != len(part):
        return None
    differ = [(a, b) for a, b in zip(whole, part, strict=True) if not (a is b or a == b)]
    if not differ:
        return 0
    (a, b), *more = differ
    if more or any(isinstance(x, bool) or not isinstance(x, int | float) for x in (a, b)):
        return None
    return next((p for p in _POWERS if p and math.isclose(a, b * float(k) ** p, rel_tol=_ROUNDED)), None)  # type: ignore[arg-type, operator]


def of_contents(whole: object, part: object, k: int) -> Constant | None:
    """How two constants compare whose contents are given: numbers, arrays, functions that return one of these, or a
    name for what is stored elsewhere."""
    whole, part = (x() if callable(x) else x for x in (whole, part))
    if whole is None or part is None:
        return None
    if isinstance(whole, str) or isinstance(part, str):
        return Constant(power=0, periods=()) if whole == part else None
    a, b = _array(whole), _array(part)
    if a.ndim != b.ndim or not a.size or not b.size:
        return None
    periods = tuple(int(n != m) for n, m in zip(a.shape, b.shape, strict=True))
    once = tuple(slice(0, 1) if p else slice(None) for p in periods)
    if not all(np.array_equal(v, np.broadcast_to(v[once], v.shape), equal_nan=_nan(v)) for v in (a, b)):
        return None
    power = _array_power(a[once], b[once], k)
    if power is None:
        return None
    return Constant(
        power=power,
        periods=periods,
        uniform=bool(np.all(b == b.reshape(-1)[0])),
        zero=not np.any(a) and not np.any(b),
    )


def _array(x: object) -> np.ndarray:
    """As an array of one of numpy's own dtypes; narrow floats become wide ones."""
    a = np.asarray(x)
    return a if a.dtype.kind in "biufcUS" else a.astype(np.float64)


def _nan(v: np.ndarray) -> bool:
    return v.dtype.kind in "fc"


def _array_power(a: np.ndarray, b: np.ndarray, k: int) -> int | None:
    if a.dtype != b.dtype:
        return None
    if np.array_equal(a, b, equal_nan=_nan(a)):
        return 0
    if a.dtype.kind in "bUS":
        return None
    return next((p for p in _POWERS if p and np.allclose(a, b * float(k) ** p, rtol=_ROUNDED, atol=0)), None)


def derived(both: OpOnBoth, reads: Sequence[Constant]) -> Constant | None:
    """How the results of an op compare whose operands are all constants. None if they may differ in any other way.

    All results of an op compare alike; the dims of the first are given.
    """
    op = both.op
    maps = [
        (a.map, b.map)
        for a, b in zip(both.whole.reads + both.whole.writes, op.reads + op.writes, strict=True)
    ]
    if not both.same or any(a != b or any(w.window for w in a.walks) for a, b in maps):
        return None
    along = periods_along(both, reads)
    if along is None or not _understood(both, reads, along):
        return None
    power = _power(both, reads)
    if power is None:
        return None
    kept = (
        op.function in (MOVE, COPY, CAST, NEG, UNSTACK)
        and len(reads) == 1
        and not isinstance(op.parameters, Pad)
    )
    uniform = bool(reads) and all(r.uniform for r in reads) and (kept or op.kind in ("elementwise", "reduce"))
    periods = [_merged(both, w, along, uniform) for w in op.writes[0].map.walks]
    if None in periods:
        return None
    return Constant(
        power=power,
        periods=tuple(p for p in periods if p is not None),
        uniform=uniform,
        zero=kept and reads[0].zero,
    )


def periods_along(both: OpOnBoth, reads: Sequence[Constant | None]) -> dict[str, int] | None:
    """Iteration dim -> after how many of its elements the operands repeat; 0 if its size is the same on both batches.
    None if the operands differ along a dim in another way. An operand that is None is left out."""
    found: dict[str, int] = {}
    for a, r in zip(both.op.reads, reads, strict=True):
        if r is None:
            continue
        periods = r.periods or (0,) * len(a.map.walks)
        for w, period in zip(a.map.walks, periods, strict=True):
            if not _walked(both, w, period, found):
                return None
    return found


def _walked(both: OpOnBoth, walk: Walk, period: int, found: dict[str, int]) -> bool:
    """Adds the periods of the dims that walk a tensor dim with this period. Returns False if they have none."""
    differ = [d for d in walk.dims if both.differs(d)]
    if not period:
        found.update(dict.fromkeys(walk.dims, 0))
        return not differ
    if not differ:
        return False
    for d in reversed(walk.dims):
        whole, part = both.sizes(d)
        if whole == part:
            if period % part and part % period:
                return False
            found[d], period = 0, max(period // part, 1)
        else:
            if period > 1 and d != walk.dims[0] and (whole % period or part % period):
                return False
            found[d], period = math.lcm(found.get(d, 1), period), 1
    return period == 1


def _merged(both: OpOnBoth, walk: Walk, along: Mapping[str, int], uniform: bool) -> int | None:
    """The period of a tensor dim that is written by these dims; None if it has none."""
    if not any(both.differs(d) for d in walk.dims):
        return 0
    if uniform:
        return 1
    period, whole_inner, inner = 1, 1, 1
    for d in reversed(walk.dims):
        whole, part = both.sizes(d)
        repeats = along.get(d, 1)  # a new dim repeats its only element
        if whole == part and d not in along:
            repeats = 1
        elif whole == part:
            repeats = part
        if repeats > 1:
            if whole_inner != inner:
                return None
            period = repeats * inner
        whole_inner, inner = whole_inner * whole, inner * part
    return period


def _understood(both: OpOnBoth, reads: Sequence[Constant], along: Mapping[str, int]) -> bool:
    """Whether the op does the same to every example: no dim whose size differs is walked in order, cut or joined."""
    op = both.op
    read = {d for a in op.reads for d in a.map.dims}
    written = {d for a in op.writes for d in a.map.dims}
    lost = [d for d in op.dims if d in read - written and both.differs(d)]
    if op.literals is None:  # it may depend on positions, as one_hot does
        return not any(map(both.differs, op.dims))
    if op.kind == "generate":
        at = op.parameters
        if not (op.function is IOTA and isinstance(at, Iota)):
            return not any(map(both.differs, op.dims))
        return not any(map(both.differs, op.writes[0].map.walks[at.axis].dims))
    if any(r for d in lost if (r := along.get(d, 1)) > 1 and any(s % r for s in both.sizes(d))):
        return False
    if op.kind in ("matmul", "conv") or op.function in (SUM, REDUCE_MAX) or op.function.name in _ALL_OR_ANY:
        return len(op.reads) < 3 or not any(map(both.differs, op.dims))
    ordered = [d for d in op.dims if both.differs(d) and both.space[d].kind != "parallel"]
    if op.kind == "view" and len(reads) == 1 and reads[0].uniform:
        return not ordered or op.parameters is None or isinstance(op.parameters, Slice | EqualPart | Reshape)
    return not lost and not ordered


def _power(both: OpOnBoth, reads: Sequence[Constant]) -> int | None:
    op, k = both.op, both.k
    more = 0
    if op.kind in ("matmul", "conv") or op.function is SUM:
        written = {d for a in op.writes for d in a.map.dims}
        sums = [both.sizes(d) for d in op.dims if d not in written]
        whole, part = (math.prod(s[i] for s in sums) for i in range(2))
        found = next((p for p in _POWERS if p >= 0 and whole == part * k**p), None)
        if found is None:
            return None
        more = found
    by = number_power(both.whole.numbers or (), op.numbers or (), k)
    power = power_of(op, [r.power for r in reads], by)
    if power and op.function is CAST and not is_floating(both.tensors[op.writes[0].tensor].dtype):
        a, b = (both.tensors[t.tensor].dtype for t in (op.reads[0], op.writes[0]))
        power = power if a == b or not is_floating(a) else None  # rounding
    return None if power is None else power + more


def power_of(op: Op, reads: Iterable[int | None], by: int | None) -> int | None:
    """The power of an op's result, from those of its operands and of the number that it contains."""
    powers = list(reads)
    if by is None or None in powers:
        return None
    told = [p for p in powers if p is not None]
    if not by and not any(told):
        return 0
    if op.function in (MATMUL, CONV) or op.function.name == "mul":
        return by + sum(told)
    if op.function.name == "div":
        literal_first = op.numbers is not None and op.numbers[0] is not None
        return (by if literal_first else told.pop(0)) - sum(told) - (0 if literal_first else by)
    return told[0] if not by and len(told) == 1 and _homogeneous(op) else None


def _homogeneous(op: Op) -> bool:
    """Whether the op's result is multiplied by a positive number if its only operand is."""
    function = op.function
    plain = function in (NEG, CAST, COPY, SUM, REDUCE_MAX, UNSTACK) or function.name == "reduce_min"
    return plain or (function is MOVE and not isinstance(op.parameters, Pad))
