"""Ops that work along a whole dim (slices, sorts, running sums), in numpy, from their parameters.

A rule is applied to each device's part, because no split cuts a dim that such an op works along. It must therefore
accept parts of any size along the other dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pase.ir import Op
from pase.ir.parameters import Concatenate, Cumulative, EqualPart, Pad, Reshape, Slice, Sort, Take
from pase.local.types import Extents

__all__ = ["OpRule", "rule_of"]


@dataclass(frozen=True, kw_only=True)
class OpRule:
    """What an op computes from whole dims.

    made: the result, from the operands. pulled: the operands' gradients, from the operands and the result's gradient.
    Both must accept parts of any size along the dims that the op does not work along.
    """

    made: Callable[[Sequence[np.ndarray]], np.ndarray]
    pulled: Callable[[Sequence[np.ndarray], np.ndarray], Sequence[np.ndarray]]


def rule_of(op: Op, whole: Extents, result: Extents) -> OpRule | None:
    """The rule of an op that has parameters; None if it has none, or if the loop nest says all that it computes.

    whole, result: the unsharded shapes of its first operand and of its result.
    """
    if op.literals is None or len(op.writes) != 1:
        return None
    match op.parameters:
        case Slice(start=start, step=step):
            picks = tuple(
                slice(None) if (a, by, n) == (0, 1, size) else _slice(a, by, n)
                for a, by, n, size in zip(start, step, result, whole, strict=True)
            )
            return _linear(lambda x: x[picks], lambda x, g: _put(x, picks, g))
        case EqualPart(axis=axis, index=index, count=count):

            def part(x: np.ndarray) -> tuple[slice, ...]:
                size = x.shape[axis] // count
                return (*[slice(None)] * axis, slice(index * size, (index + 1) * size))

            return _linear(lambda x: x[part(x)], lambda x, g: _put(x, part(x), g))
        case Take(axis=axis, index=places):
            return _take(axis, list(places))
        case Reshape():
            return _linear(lambda x: x.reshape(result), lambda x, g: g.reshape(x.shape))
        case Pad():
            return _padding(op.parameters, whole, result)
        case Concatenate(axis=axis):
            return OpRule(
                made=lambda xs: np.concatenate(xs, axis),
                pulled=lambda xs, g: np.split(g, np.cumsum([x.shape[axis] for x in xs])[:-1], axis),
            )
        case Cumulative():
            return _cumulative(op.function.name, op.parameters)
        case Sort(axis=axis, descending=descending) if op.function.name in ("sort", "argsort"):
            return _sort(axis, descending, places=op.function.name == "argsort")
    return None


def _linear(
    made: Callable[[np.ndarray], np.ndarray], pulled: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> OpRule:
    """The rule of a linear function of one array. pulled: its transpose, from the operand and the gradient."""
    return OpRule(made=lambda xs: made(xs[0]), pulled=lambda xs, g: [pulled(xs[0], g)])


def _take(axis: int, places: list[int]) -> OpRule:
    """Element i of the result is element ``places[i]``. An element that is taken more than once has several
    gradients."""

    def put(x: np.ndarray, g: np.ndarray) -> np.ndarray:
        out = np.zeros(x.shape, g.dtype)
        np.add.at(np.moveaxis(out, axis, 0), places, np.moveaxis(g, axis, 0))
        return out

    return _linear(lambda x: np.take(x, places, axis), put)


def _slice(start: int, step: int, count: int) -> slice:
    stop = start + count * step
    return slice(start, None if stop < 0 else stop, step)


def _put(x: np.ndarray, at: tuple[slice, ...], g: np.ndarray) -> np.ndarray:
    out = np.zeros(x.shape, g.dtype)
    out[at] = g
    return out


def _padding(pad: Pad, whole: Extents, result: Extents) -> OpRule:
    """Element i of a dim becomes element ``before + i * (1 + interior)``, if the result has it."""
    changed = [
        i
        for i, (b, k, n, m) in enumerate(zip(pad.before, pad.interior, whole, result, strict=True))
        if (b, k) != (0, 0) or n != m
    ]

    def places(x: np.ndarray) -> tuple[tuple[slice, ...], tuple[slice, ...], list[int]]:
        """The elements that are taken, where they are put, and the shape of the result."""
        taken, put, shape = [slice(None)] * x.ndim, [slice(None)] * x.ndim, list(x.shape)
        for i in changed:
            step, shape[i] = 1 + pad.interior[i], result[i]
            first = max(0, -(pad.before[i] // step))
            last = min(x.shape[i], (result[i] - 1 - pad.before[i]) // step + 1)
            taken[i] = slice(first, last)
            put[i] = _slice(pad.before[i] + first * step, step, last - first)
        return tuple(taken), tuple(put), shape

    def made(x: np.ndarray) -> np.ndarray:
        taken, put, shape = places(x)
        out = np.full(shape, pad.value, np.result_type(x, np.asarray(pad.value)))
        out[put] = x[taken]
        return out

    def pulled(x: np.ndarray, g: np.ndarray) -> np.ndarray:
        taken, put, _ = places(x)
        return _put(x, taken, g[put])

    return _linear(made, pulled)


_RUNNING: dict[str, Callable[..., np.ndarray]] = {
    "cumsum": np.cumsum,
    "cumprod": np.cumprod,
    "cummax": np.maximum.accumulate,
    "cummin": np.minimum.accumulate,
    "cumlogsumexp": np.logaddexp.accumulate,
}


def _cumulative(name: str, p: Cumulative) -> OpRule | None:
    if name not in _RUNNING or (p.exclusive and name != "cumsum"):
        return None

    def running(x: np.ndarray, f: Callable[..., np.ndarray], reverse: bool) -> np.ndarray:
        x = np.flip(x, p.axis) if reverse else x
        out = f(x, axis=p.axis)
        return np.flip(out, p.axis) if reverse else out

    def made(x: np.ndarray) -> np.ndarray:
        return running(x, _RUNNING[name], p.reverse) - (x if p.exclusive else 0)

    def pulled(x: np.ndarray, g: np.ndarray) -> np.ndarray:
        def summed(g: np.ndarray) -> np.ndarray:
            return running(g, np.cumsum, not p.reverse)

        if name == "cumsum":
            return summed(g) - (g if p.exclusive else 0)
        y = made(x)
        if name == "cumprod":
            return summed(g * y) / x
        if name == "cumlogsumexp":
            return np.exp(x) * summed(g * np.exp(-y))
        # The gradient of a running maximum goes to the element that set it: the first that attains it.
        along = np.flip(x, p.axis) if p.reverse else x
        best = running(x, _RUNNING[name], p.reverse)
        best = np.flip(best, p.axis) if p.reverse else best
        new = np.ones(along.shape, bool)
        rest = (slice(None),) * p.axis
        new[(*rest, slice(1, None))] = along[(*rest, slice(1, None))] == best[(*rest, slice(1, None))]
        new[(*rest, slice(1, None))] &= best[(*rest, slice(1, None))] != best[(*rest, slice(None, -1))]
        index = np.arange(along.shape[p.axis]).reshape([-1 if i == p.axis else 1 for i in range(x.ndim)])
        source = np.maximum.accumulate(np.where(new, index, 0), axis=p.axis)
        out = np.zeros(x.shape)
        np.add.at(out, _along(source, p.axis), np.flip(g, p.axis) if p.reverse else g)
        return np.flip(out, p.axis) if p.reverse else out

    return _linear(made, pulled)


def _along(index: np.ndarray, axis: int) -> tuple[np.ndarray, ...]:
    """The positions of all elements, with these along an axis."""
    every: list[np.ndarray] = list(np.indices(index.shape, sparse=True))
    every[axis] = index
    return tuple(np.broadcast_arrays(*every))


def _sort(axis: int, descending: bool, places: bool) -> OpRule:
    def order(x: np.ndarray) -> np.ndarray:
        if not descending:
            return np.argsort(x, axis=axis, kind="stable")
        last = x.shape[axis] - 1  # from the end, so that equal elements keep their order
        return np.flip(last - np.argsort(np.flip(x, axis), axis=axis, kind="stable"), axis)

    def pulled(x: np.ndarray, g: np.ndarray) -> np.ndarray:
        out = np.zeros(x.shape)
        np.put_along_axis(out, order(x), g, axis)
        return out

    return _linear(lambda x: order(x) if places else np.take_along_axis(x, order(x), axis), pulled)
