"""Computes small values that a graph determines without data: shapes, axes, counters.

A frontend maps its ops to these functions. What a function cannot compute, or would make too large, is left to the op's
own rule, which also reports wrong operands.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from pase.ir.functions import FUNCTIONS

__all__ = [
    "ELEMENTWISE",
    "MOST_KNOWN",
    "FoldedArrays",
    "Unfit",
    "arange",
    "elementwise",
    "expand",
    "folded",
    "reduced",
    "repeated",
    "small",
]

MOST_KNOWN = 4096
"""The most elements of a value that is computed while lowering: shapes, axes and paddings, but not weights."""

FoldedArrays: TypeAlias = "np.ndarray | list[np.ndarray] | None"
"""A result, or a list of several results; None if the value is not computed."""
ArrayFold = Callable[..., FoldedArrays]


class Unfit(Exception):
    """The value is too large, or the op's own rule has to handle it."""


def folded(rule: ArrayFold, *args: object) -> list[np.ndarray] | None:
    """The results of a rule for small values. None if they are left to the op's own rule."""
    try:
        with np.errstate(all="ignore"):
            out = rule(*args)
    except (Unfit, ValueError, TypeError, IndexError, OverflowError, ZeroDivisionError, MemoryError):
        return None
    if out is None:
        return None
    made = [np.asarray(a) for a in (out if isinstance(out, list) else [out])]
    return made if all(a.size <= MOST_KNOWN for a in made) else None


def small(*extents: int) -> None:
    """Raises Unfit if a shape is not valid or has too many elements."""
    if any(e < 0 for e in extents) or math.prod(extents) > MOST_KNOWN:
        raise Unfit


def _of_several(f: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda *xs: functools.reduce(f, xs)


def _divides(f: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    """A function that has no value for an integer divided by zero."""

    def out(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if b.dtype.kind in "iu" and (b == 0).any():
            raise Unfit
        return f(a, b)

    return out


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Quotients of integers are rounded towards zero."""
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)) if a.dtype.kind in "iu" else a / b


ELEMENTWISE: dict[str, Callable[..., np.ndarray]] = {
    **{n: getattr(np, n) for n in ("abs", "sign", "square", "floor", "ceil", "round", "sqrt", "reciprocal")},
    **{n: getattr(np, n) for n in ("exp", "log", "sin", "cos", "tanh")},
    **{"neg": np.negative, "sub": np.subtract, "pow": np.power, "rsqrt": lambda a: 1 / np.sqrt(a)},
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal},
    **{"gt": np.greater, "ge": np.greater_equal, "is_nan": np.isnan, "is_inf": np.isinf},
    **{"add": _of_several(np.add), "mul": _of_several(np.multiply)},
    **{"max": _of_several(np.maximum), "min": _of_several(np.minimum)},
    **{"all_of": np.logical_and, "any_of": np.logical_or, "is_false": np.logical_not},
    **{"div": _divides(_quotient), "floor_div": _divides(np.floor_divide)},
    **{"mod": _divides(np.mod), "rem": _divides(np.fmod)},
    **dict.fromkeys(("copy", "stop_gradient"), lambda a: a),
    "where": np.where,
}
"""Function of ``pase.ir.functions`` -> its value. Operands broadcast."""


def elementwise(function: str, *operands: np.ndarray) -> np.ndarray:
    """A function of small arrays. A result that is not boolean has the dtype of the first operand that is a value."""
    small(*np.broadcast_shapes(*(x.shape for x in operands)))
    made = np.asarray(ELEMENTWISE[function](*operands))
    return (
        made if FUNCTIONS[function].boolean else made.astype(operands[1 if function == "where" else 0].dtype)
    )


def reduced(how: str, a: np.ndarray, axes: Sequence[int] | None, keepdims: bool) -> np.ndarray:
    """A reduction over axes (all of them if None). how: numpy's name: sum, prod, max, min, mean, all, any."""
    axis = None if axes is None else tuple(axes)
    return np.asarray(getattr(np, how)(a, axis=axis, keepdims=keepdims)).astype(a.dtype)


def arange(start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """The numbers from start to limit, without it, in steps of delta; all three are scalars of one dtype."""
    first, end, step = (x.reshape(()).item() for x in (start, limit, delta))
    n = max(math.ceil((end - first) / step), 0)
    small(n)
    return (np.arange(n, dtype=start.dtype) * delta + start).astype(start.dtype)


def expand(a: np.ndarray, shape: Sequence[int] | np.ndarray) -> np.ndarray:
    """The array, broadcast to a shape."""
    wide = [int(s) for s in shape]
    small(*wide)
    return np.broadcast_to(a, wide)


def repeated(a: np.ndarray, times: Sequence[int] | np.ndarray) -> np.ndarray:
    """The array, repeated along each dim."""
    small(*(s * int(r) for s, r in zip(a.shape, times, strict=True)))
    return np.tile(a, [int(r) for r in times])
