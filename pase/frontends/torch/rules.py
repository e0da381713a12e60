"""Rules that lower ATen ops to loop nests: the table of rules, elementwise ops and reductions.

A rule takes a ``TorchCall`` (``values``) and returns the op's results. One rule serves all overloads of an op. The
shapes and dtypes of the results are those that PyTorch found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from pase.frontends.common.slicing import join
from pase.frontends.common.values import Value
from pase.frontends.torch.passed import PASSED
from pase.frontends.torch.values import TorchCall
from pase.ir import functions
from pase.ir.functions import FUNCTIONS, Function
from pase.ir.parameters import Cumulative, Sort
from pase.ops import composites, nests
from pase.ops.activations import ACTIVATIONS
from pase.registry import Registry

__all__ = ["POINTWISE", "RULES", "TorchRule", "lowers"]

TorchRule = Callable[[TorchCall], "Value | Sequence[Value | None]"]
RULES: Registry[TorchRule] = Registry("rule for ATen op", package="pase.frontends.torch", prefix="rules")
lowers = RULES.register
"""Decorator: registers a rule for these ops. An op of a namespace other than aten is written "namespace::op"."""

POINTWISE = {
    "mul": "mul",
    "neg": "neg",
    "abs": "abs",
    "sign": "sign",
    "sgn": "sign",
    "maximum": "max",
    "minimum": "min",
    "fmax": "max",
    "fmin": "min",
    "clamp_min": "max",
    "clamp_max": "min",
    "exp": "exp",
    "exp2": "exp2",
    "expm1": "expm1",
    "log": "log",
    "log2": "log2",
    "log10": "log10",
    "log1p": "log1p",
    "sqrt": "sqrt",
    "rsqrt": "rsqrt",
    "reciprocal": "reciprocal",
    "sin": "sin",
    "cos": "cos",
    "tan": "tan",
    "sinh": "sinh",
    "cosh": "cosh",
    "asin": "asin",
    "acos": "acos",
    "atan": "atan",
    "asinh": "asinh",
    "acosh": "acosh",
    "atanh": "atanh",
    "atan2": "atan2",
    "erf": "erf",
    "erfc": "erfc",
    "erfinv": "erf_inv",
    "lgamma": "lgamma",
    "digamma": "digamma",
    "polygamma": "polygamma",
    "igamma": "igamma",
    "igammac": "igammac",
    "i0": "bessel_i0",
    "special_i0e": "bessel_i0e",
    "special_i1": "bessel_i1",
    "special_i1e": "bessel_i1e",
    "special_zeta": "zeta",
    "nextafter": "nextafter",
    "xlogy": "xlogy",
    "floor": "floor",
    "ceil": "ceil",
    "trunc": "trunc",
    "fmod": "rem",
    "remainder": "mod",
    "floor_divide": "floor_div",
    "eq": "eq",
    "ne": "ne",
    "lt": "lt",
    "le": "le",
    "gt": "gt",
    "ge": "ge",
    "isnan": "is_nan",
    "isinf": "is_inf",
    "isfinite": "is_finite",
    "logical_and": "all_of",
    "logical_or": "any_of",
    "logical_not": "is_false",
    "logical_xor": "ne",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "bitwise_not": "not",
    "__and__": "and",
    "__or__": "or",
    "__xor__": "xor",
    "__lshift__": "shift_left",
    "__rshift__": "shift_right",
    "bitwise_left_shift": "shift_left",
    "bitwise_right_shift": "shift_right",
    "where": "where",
    "real": "real",
    "imag": "imag",
    "conj": "conj",
    "_conj": "conj",
    "complex": "complex",
    "detach": "stop_gradient",
    PASSED: "passed",
}
"""Elementwise ops on operands that broadcast -> the function that they compute (``pase.ir.functions``)."""

_ACTIVATIONS = {
    "relu": "relu",
    "relu6": "relu6",
    "leaky_relu": "leaky_relu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "elu": "elu",
    "selu": "selu",
    "celu": "celu",
    "softplus": "softplus",
    "silu": "silu",
    "mish": "mish",
    "hardsigmoid": "hard_sigmoid",
    "hardswish": "hard_silu",
}


_NAMES = {
    "log10": "log",
    "trunc": "floor",
    "floor_div": "floor",
    "trunc_div": "floor",
    "mod": "rem",
    "where": "select",
}
"""Function -> the name of its ops in a graph, which a digest contains, if it is not the function's."""

_INEXACT = frozenset(("fmax", "fmin", "logical_xor"))
"""Ops whose function is not exactly what they compute: it differs for NaN, or for operands that are not boolean."""


def _elementwise(function: Function, c: TorchCall) -> Value:
    inexact = [None] if c.op in _INEXACT else []
    return c.pointwise(function, [*c.operands, *inexact], name=_NAMES.get(function.name, ""))


for _op, _name in POINTWISE.items():
    RULES.add(_op, partial(_elementwise, FUNCTIONS[_name]))


@lowers("add", "sub", "rsub")
def _sum(c: TorchCall) -> Value:
    """A sum or difference. The second operand is multiplied by ``alpha``; in "rsub", the operands are swapped."""
    x, y, alpha = c.given["self"], c.given["other"], c.arg("alpha", 1)
    function = functions.ADD if c.op == "add" else functions.SUB
    if alpha == 1:
        if c.op == "rsub":
            return c.pointwise(function, [x, y, None] if isinstance(y, Value) else [y, x])
        return c.pointwise(function, [x, y])
    flops, factor = function.flops + 1.0, alpha if c.op == "add" else -alpha
    if isinstance(factor, Value) or c.op == "rsub":
        return c.pointwise(function, [x, y, None], flops=flops)
    if not isinstance(y, Value):
        return c.pointwise(function, [x, y * alpha], flops=flops)
    return c.pointwise(functions.ADD_SCALED, [x, y, factor], flops=flops, name=function.name)


@lowers("clamp", "hardtanh")
def _clamp(c: TorchCall) -> Value:
    bounds = (
        [c.given["min_val"], c.given["max_val"]] if c.op == "hardtanh" else [c.given["min"], c.given["max"]]
    )
    if any(isinstance(v, Value) for v in bounds):
        return c.pointwise(functions.CLAMP, [*c.values, None])
    low, high = bounds
    return c.pointwise(
        functions.CLAMP, [-math.inf if low is None else low, c.x(), math.inf if high is None else high]
    )


@lowers("round")
def _round(c: TorchCall) -> Value:
    return c.pointwise(FUNCTIONS["round"], [c.x(), *([None] if "decimals" in c.given else [])])


@lowers("div", "true_divide")
def _div(c: TorchCall) -> Value:
    """A quotient that is rounded has no gradient."""
    how = c.arg("rounding_mode")
    if how is None:
        return c.pointwise(functions.DIV)
    return c.pointwise(FUNCTIONS[f"{how}_div"], name="floor")


@lowers("pow", "float_power")
def _pow(c: TorchCall) -> Value:
    power = c.arg("exponent")
    if isinstance(power, (int, float)):
        known = {
            2.0: functions.SQUARE,
            0.5: functions.SQRT,
            -0.5: functions.RSQRT,
            -1.0: functions.RECIPROCAL,
        }
        if (function := known.get(float(power))) is not None:
            return c.pointwise(function, [c.x()])
        return c.pointwise(functions.INTEGER_POW if float(power).is_integer() else functions.POW)
    return c.pointwise(functions.POW)


@lowers("square")
def _square(c: TorchCall) -> Value:
    return c.pointwise(functions.SQUARE)


@lowers("masked_fill")
def _masked_fill(c: TorchCall) -> Value:
    value = c.arg("value")
    number = value.scalar if isinstance(value, Value) and c.low.folds else value
    return c.pointwise(functions.WHERE, [c.x("mask"), number, c.x()], name="select")


@lowers("tril", "triu")
def _triangle(c: TorchCall) -> Value:
    """Selects each value or zero by the positions in the last two dims."""
    mask = None if c.low.folds else c.filled(c.shape_out[-2:], "bool")
    return c.pointwise(functions.WHERE, [mask, c.x(), 0], name="select")


@lowers("_to_copy", "to", "type_as")
def _cast(c: TorchCall) -> Value:
    x = c.x()
    return x if c.out()[1] == x.dtype else c.pointwise(functions.CAST, [x])


@lowers("view_as_complex")
def _complex(c: TorchCall) -> Value:
    """Each pair of numbers in the last dim becomes one complex number."""
    x = c.x()
    return _over(c, FUNCTIONS["complex"], x, [len(x.shape) - 1], keep=False, combines=False)


@lowers("view_as_real")
def _pairs(c: TorchCall) -> Value:
    x = c.x()
    parts = [c.elementwise([x], FUNCTIONS[name], dtype=c.out()[1]) for name in ("real", "imag")]
    return join(c, [c.reshape(v, (*x.shape, 1)) for v in parts], len(x.shape))


def activation(c: TorchCall, name: str, x: Value, *numbers: float | None) -> Value:
    """An activation in the ops that jax.nn uses, so that its cost and its residuals are the same as in JAX."""
    return c.value(ACTIVATIONS[name](c.b, c.tensor(x), *numbers))


@lowers(*_ACTIVATIONS)
def _activation(c: TorchCall) -> Value:
    numbers: list[float | None] = []
    if c.op == "leaky_relu":
        numbers = [c.arg("negative_slope")]
    elif c.op == "celu":
        numbers = [c.arg("alpha")]
    elif c.op == "elu":
        numbers = [c.arg("alpha") if c.arg("scale") == c.arg("input_scale") == 1 else None]
    elif c.op == "softplus":  # above its threshold, it is the identity
        numbers = [0.0 if c.arg("beta") == 1 and c.arg("threshold") >= 20 else None]
    return activation(c, _ACTIVATIONS[c.op], c.x(), *numbers)


@lowers("gelu")
def _gelu(c: TorchCall) -> Value:
    return activation(c, "gelu_tanh" if c.arg("approximate", "none") == "tanh" else "gelu", c.x())


# Reductions.


_REDUCE: dict[str, tuple[str, str | None]] = {
    "sum": ("reduce_sum", None),
    "mean": ("reduce_sum", "div"),
    "amax": ("reduce_max", None),
    "amin": ("reduce_min", None),
    "any": ("reduce_or", None),
    "all": ("reduce_and", None),
}
"""Op -> the function of the reduction, and a function that is applied to its result (or None)."""


def _over(
    c: TorchCall, function: Function, x: Value, axes: Sequence[int], keep: bool, combines: bool = True
) -> Value:
    if not x.shape:
        return x
    (out,) = nests.reduce(c.b, function, [c.tensor(x)], axes, [c.out()[1]], keepdims=keep, combines=combines)
    return c.value(out)


@lowers(*_REDUCE)
def _reduce(c: TorchCall) -> Value:
    over, after = _REDUCE[c.op]
    x = c.x()
    axes = c.dims("dim", len(x.shape))
    made = _over(c, FUNCTIONS[over], x, axes, bool(c.arg("keepdim", False)))
    return (
        made
        if after is None
        else c.elementwise([made, math.prod(x.shape[i] for i in axes)], FUNCTIONS[after])
    )


@lowers("prod", "max", "min", "argmax", "argmin")
def _extreme(c: TorchCall) -> Value | Sequence[Value]:
    """A reduction over all dims or over one. Over one dim, max and min also return the index.

    With two tensors, the elementwise max or min.
    """
    x = c.x()
    if c.opt("other") is not None:
        return c.pointwise(FUNCTIONS[c.op])
    keep, axes = bool(c.arg("keepdim", False)), c.dims("dim", len(x.shape))
    name = c.op if c.op.startswith("arg") else f"reduce_{c.op}"
    combines = c.op in ("max", "min")  # no collective multiplies
    made = _over(c, FUNCTIONS[name], x, axes, keep, combines=combines)
    if len(c.outs) == 1:
        return made
    (where,) = nests.reduce(
        c.b, FUNCTIONS[f"arg{c.op}"], [c.tensor(x)], axes, ["int64"], keepdims=keep, combines=False
    )
    return [made, c.value(where)]


@lowers("var", "std", "var_mean", "std_mean")
def _variance(c: TorchCall) -> Value | Sequence[Value]:
    x = c.x()
    axes = c.dims("dim", len(x.shape))
    centre = composites.mean(c.b, c.tensor(x), axes)
    square = composites.apply(
        c.b, functions.SQUARE, composites.apply(c.b, functions.SUB, c.tensor(x), centre)
    )
    total = nests.reduce(c.b, functions.SUM, [square], axes, [square.dtype], keepdims=True)[0]
    correction = int(c.arg("unbiased")) if "unbiased" in c.given else c.arg("correction", 1)
    count = math.prod(x.shape[i] for i in axes)
    spread = c.elementwise([c.value(total), count - correction], functions.DIV)
    if c.op.startswith("std"):
        spread = c.elementwise([spread], functions.SQRT)
    spread = c.reshape(spread, c.shape_out)
    return [spread, c.reshape(c.value(centre), c.shape_out)] if c.op.endswith("mean") else spread


@lowers("logsumexp")
def _logsumexp(c: TorchCall) -> Value:
    x = c.tensor(c.x())
    axes = c.dims("dim", len(x.shape))
    top = composites.apply(
        c.b,
        functions.STOP_GRADIENT,
        nests.reduce(c.b, functions.REDUCE_MAX, [x], axes, [x.dtype], keepdims=True)[0],
    )
    # As PyTorch does: an infinite maximum less itself would be no number.
    infinite = c.elementwise([c.value(top)], FUNCTIONS["is_inf"], dtype="bool")
    top = c.tensor(c.elementwise([infinite, c.value(top), 0], functions.SELECT, dtype=x.dtype))
    e = composites.apply(c.b, functions.EXP, composites.apply(c.b, functions.SUB, x, top))
    (total,) = nests.reduce(c.b, functions.SUM, [e], axes, [x.dtype], keepdims=True)
    log = composites.apply(c.b, functions.LOG, total)
    return c.reshape(c.value(composites.apply(c.b, functions.ADD, log, top)), c.shape_out)


@lowers("softmax", "_softmax", "log_softmax", "_log_softmax")
def _softmax(c: TorchCall) -> Value:
    x = c.x()
    if not x.shape:
        return c.pointwise(functions.EXP)
    if c.out()[1] != x.dtype:
        x = c.elementwise([x], functions.CAST, dtype=c.out()[1])
    make = composites.log_softmax if "log" in c.op else composites.softmax
    return c.value(make(c.b, c.tensor(x), c.dims("dim", len(x.shape))))


_SEQUENTIAL = {
    "cumsum": "cumsum",
    "cumprod": "cumprod",
    "cummax": "cummax",
    "cummin": "cummin",
    "logcumsumexp": "cumlogsumexp",
    "sort": "sort",
    "argsort": "argsort",
    "topk": "top_k",
    "kthvalue": "top_k",
    "median": "sort",
    "nanmedian": "sort",
    "mode": "sort",
    "multinomial": "random",
}
"""Ops that process a dim in order."""


@lowers(*_SEQUENTIAL)
def _sequential(c: TorchCall) -> Sequence[Value]:
    x = c.x()
    if not x.shape or not c.shape_out:
        made = nests.opaque(c.b, c.op, [c.tensor(x)], [s for s in c.outs if s], flops=20.0 * x.elements)
        return [c.value(t) for t in made]
    axis = c.axis(c.arg("dim", -1), len(x.shape))
    parameters: Cumulative | Sort | None = None
    if c.op in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"):
        parameters = Cumulative(axis=axis, reverse=False, exclusive=False)
    elif c.op in ("sort", "argsort"):
        parameters = Sort(axis=axis, descending=bool(c.arg("descending", False)))
    function, outs = FUNCTIONS[_SEQUENTIAL[c.op]], [s for s in c.outs if s]
    if len(c.shape_out) < len(x.shape):  # one value of the dim is chosen, and the dim is gone
        outs = [((*shape[:axis], 1, *shape[axis:]), dtype) for shape, dtype in outs]
    made = nests.sequential(c.b, function, [c.tensor(x)], axis, outs, name=c.op, parameters=parameters)
    return [c.reshape(c.value(t), s[0]) for t, s in zip(made, (s for s in c.outs if s), strict=True)]
