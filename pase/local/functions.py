"""How the functions of ops are computed, by the names that numpy and PyTorch share, and their derivatives in numpy.

``pase.local.nests`` runs them in numpy, and ``backends/torch/spmd/nests.py`` in PyTorch. JAX runs the user's own
primitives.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from pase.ir.literals import Number
from pase.pytree import Tree

__all__ = ["COMPUTED", "NUMPY", "SLOPES", "PointValues"]

PointValues: TypeAlias = "np.ndarray | Number"
"""What a function is applied to: an array over iteration dims, or a number."""
Pointwise = Callable[..., PointValues]
Slopes = Callable[[int], Pointwise]


class _Numpy:
    """numpy, with the functions of PyTorch that it lacks."""

    detach = staticmethod(lambda x: x)
    eq = staticmethod(np.equal)
    erf = staticmethod(np.vectorize(math.erf, otypes=[float]))
    erfc = staticmethod(np.vectorize(math.erfc, otypes=[float]))
    rsqrt = staticmethod(lambda x: 1 / np.sqrt(x))
    sigmoid = staticmethod(lambda x: 0.5 * (1 + np.tanh(0.5 * x)))

    def __getattr__(self, name: str) -> Tree:
        return getattr(np, name)


NUMPY: Tree = _Numpy()


def _named(name: str) -> Callable[..., Tree]:
    return lambda xp, *xs: getattr(xp, name)(*xs)


def _of_several(name: str) -> Callable[..., Tree]:
    """A function of two operands, applied to any number of them."""
    return lambda xp, *xs: functools.reduce(getattr(xp, name), xs)


def _same(xp: Tree, x: Tree) -> Tree:
    return x


def _selected(xp: Tree, index: Tree, *values: Tree) -> Tree:
    some = enumerate(values[:-1])
    return functools.reduce(lambda other, kx: xp.where(index == kx[0], kx[1], other), some, values[-1])


def _or_zero(xp: Tree, x: Tree, y: Tree) -> Tree:
    """x / y, and 0 where y is 0."""
    return xp.where(y == 0, 0.0, x / xp.where(y == 0, 1.0, y))


_FLAT = {
    **{"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "eq"},
    **{"ne": "not_equal", "is_finite": "isfinite", "is_nan": "isnan", "is_inf": "isinf"},
    **{"is_false": "logical_not", "floor_div": "floor_divide", "stop_gradient": "detach"},
    **{n: n for n in ("floor", "ceil", "round", "trunc", "sign")},
}
"""Functions whose derivative is zero almost everywhere, or stopped, and their names."""
_SAME = (
    *("copy", "move", "cast", "reduce_sum", "reduce_max", "reduce_min"),
    *("reduce_window_max", "reduce_window_min", "reduce_window_sum"),
)
"""Functions that do nothing to an element."""
_PRODUCTS, _QUOTIENTS = ("mul", "matmul", "conv", "gather"), ("div", "reciprocal")
_OTHERS = (
    *("abs", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "sigmoid", "sin", "cos"),
    *("erf", "erfc", "square", "sqrt", "rsqrt", "pow"),
)

COMPUTED: dict[str, Callable[..., Tree]] = {
    **{function: _named(name) for function, name in _FLAT.items()},
    **{name: _named(name) for name in _OTHERS},
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(_PRODUCTS, _of_several("multiply")),
    **dict.fromkeys(_QUOTIENTS, lambda xp, *xs: xp.divide(*xs) if len(xs) == 2 else xp.reciprocal(*xs)),
    "div_no_nan": _or_zero,
    "add": _of_several("add"),
    "max": _of_several("maximum"),
    "min": _of_several("minimum"),
    "all_of": _of_several("logical_and"),
    "any_of": _of_several("logical_or"),
    "sub": _named("subtract"),
    "neg": _named("negative"),
    "mod": _named("remainder"),
    "rem": _named("fmod"),
    "integer_pow": _named("pow"),
    "add_scaled": lambda xp, x, y, c: x + c * y,
    "passed": lambda xp, x, y: x,
    "clamp": lambda xp, low, x, high: xp.clip(x, low, high),
    "where": lambda xp, c, a, b: xp.where(c != 0, a, b),
    "select": _selected,
}
"""Function -> its value, from (``NUMPY`` or ``torch``, the operands)."""


def _share(i: int, xs: Sequence[PointValues]) -> PointValues:
    """The derivative of a maximum or minimum, the last of ``xs``, by operand i; operands that attain it share it."""
    *operands, top = xs
    return (operands[i] == top) / sum(1.0 * (x == top) for x in operands)


def _each(*slopes: Pointwise) -> Slopes:
    """The derivatives by each operand of a function with a fixed number of operands."""
    return lambda i: slopes[i]


def _but(i: int, factors: Sequence[PointValues]) -> PointValues:
    """The product of all factors but one."""
    out: PointValues = 1.0
    for k, x in enumerate(factors):
        out = out * x if k != i else out
    return out


def _flat(*_: PointValues) -> PointValues:
    return 0.0


def _one(*_: PointValues) -> PointValues:
    return 1.0


_SQRT_PI = math.sqrt(math.pi)

SLOPES: dict[str, Slopes] = {
    **dict.fromkeys((*_FLAT, "all_of", "any_of"), lambda i: _flat),
    **dict.fromkeys((*_SAME, "add"), lambda i: _one),
    **dict.fromkeys(_PRODUCTS, lambda i: lambda *xs: _but(i, xs[:-1])),
    **dict.fromkeys(_QUOTIENTS, lambda i: lambda *xs: -xs[-1] / xs[-2] if i == len(xs) - 2 else 1 / xs[1]),
    **dict.fromkeys(("max", "min"), lambda i: lambda *xs: _share(i, xs)),
    "sub": _each(_one, lambda a, b, y: -1.0),
    "div_no_nan": _each(
        lambda x, y, q: _or_zero(np, 1.0, y),
        lambda x, y, q: -_or_zero(np, q, y),
    ),
    "passed": _each(_flat, _one),
    "add_scaled": _each(_one, lambda a, b, c, y: c, lambda a, b, c, y: b),
    "clamp": _each(
        lambda low, x, high, y: 1.0 * (x < low),
        lambda low, x, high, y: 1.0 * ((x > low) & (x < high)),
        lambda low, x, high, y: 1.0 * (x > high),
    ),
    "integer_pow": _each(lambda a, n, y: n * a ** (n - 1), _flat),
    "pow": _each(lambda a, b, y: b * a ** (b - 1), lambda a, b, y: y * np.log(a)),
    "mod": _each(_one, lambda a, b, y: -np.floor(a / b)),
    "rem": _each(_one, lambda a, b, y: -np.trunc(a / b)),
    "select": lambda i: lambda c, *xs: 0.0 if i == 0 else 1.0 * (np.asarray(c, int) == i - 1),
    "where": _each(_flat, lambda c, a, b, y: 1.0 * (c != 0), lambda c, a, b, y: 1.0 * (c == 0)),
    "neg": _each(lambda a, y: -1.0),
    "abs": _each(lambda a, y: np.sign(a)),
    "exp": _each(lambda a, y: y),
    "exp2": _each(lambda a, y: y * math.log(2.0)),
    "expm1": _each(lambda a, y: y + 1.0),
    "log": _each(lambda a, y: 1 / a),
    "log2": _each(lambda a, y: 1 / (a * math.log(2.0))),
    "log10": _each(lambda a, y: 1 / (a * math.log(10.0))),
    "log1p": _each(lambda a, y: 1 / (1 + a)),
    "tanh": _each(lambda a, y: 1 - y * y),
    "sigmoid": _each(lambda a, y: y * (1 - y)),
    "sin": _each(lambda a, y: np.cos(a)),
    "cos": _each(lambda a, y: -np.sin(a)),
    "erf": _each(lambda a, y: 2 / _SQRT_PI * np.exp(-a * a)),
    "erfc": _each(lambda a, y: -2 / _SQRT_PI * np.exp(-a * a)),
    "square": _each(lambda a, y: 2 * a),
    "sqrt": _each(lambda a, y: 0.5 / y),
    "rsqrt": _each(lambda a, y: -0.5 * y / a),
}
"""Function -> its derivative by operand i, from the operands and the result, in numpy."""
