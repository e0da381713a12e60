"""Rules that lower ONNX ops to loop nests: the table of rules and the elementwise ops.

A rule takes an ``OnnxCall`` (``values``) and returns the results of the node. Rules handle the differences between
opsets: ``call.version`` is the opset, and an input that used to be an attribute is looked for in both places.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from pase.frontends.common.values import Value, known
from pase.frontends.onnx.values import OnnxCall
from pase.ir import functions
from pase.ir.functions import FUNCTIONS, Function
from pase.ir.literals import Number
from pase.ops.activations import ACTIVATIONS
from pase.registry import Registry

__all__ = ["FUNCTIONS_OF", "RULES", "OnnxRule", "Result", "activation", "lowers", "nothing"]

Result = "Value | Sequence[Value | None]"
OnnxRule = Callable[[OnnxCall], "Value | Sequence[Value | None]"]
RULES: Registry[OnnxRule] = Registry("rule for ONNX op", package="pase.frontends.onnx", prefix="rules")
lowers = RULES.register
"""Decorator: registers a rule for these ops. An op of a domain other than ai.onnx is written "domain:op"."""

FUNCTIONS_OF = {
    "Abs": "abs",
    "Neg": "neg",
    "Add": "add",
    "Sum": "add",
    "Sub": "sub",
    "Mul": "mul",
    "Max": "max",
    "Min": "min",
    "Not": "is_false",
    "And": "all_of",
    "Or": "any_of",
    "Xor": "ne",
    "BitwiseAnd": "and",
    "BitwiseOr": "or",
    "BitwiseXor": "xor",
    "BitwiseNot": "not",
    "Sign": "sign",
    "Ceil": "ceil",
    "Floor": "floor",
    "Round": "round",
    "Equal": "eq",
    "Less": "lt",
    "Greater": "gt",
    "LessOrEqual": "le",
    "GreaterOrEqual": "ge",
    "IsNaN": "is_nan",
    "IsInf": "is_inf",
    "Div": "div",
    "Sqrt": "sqrt",
    "Reciprocal": "reciprocal",
    "Exp": "exp",
    "Log": "log",
    "Sin": "sin",
    "Cos": "cos",
    "Tan": "tan",
    "Sinh": "sinh",
    "Cosh": "cosh",
    "Tanh": "tanh",
    "Asin": "asin",
    "Acos": "acos",
    "Atan": "atan",
    "Asinh": "asinh",
    "Acosh": "acosh",
    "Atanh": "atanh",
    "Erf": "erf",
    "Sigmoid": "sigmoid",
    "Pow": "pow",
    "com.microsoft:BiasAdd": "add",
}
"""Elementwise ops on inputs that broadcast -> the function that they compute (``pase.ir.functions``)."""

_ACTIVATIONS = {
    "Relu": "relu",
    "LeakyRelu": "leaky_relu",
    "HardSigmoid": "hard_sigmoid",
    "HardSwish": "hard_silu",
    "Softsign": "softsign",
    "Elu": "elu",
    "Celu": "celu",
    "Selu": "selu",
    "Softplus": "softplus",
    "Mish": "mish",
    "Swish": "silu",
    "com.microsoft:QuickGelu": "quick_gelu",
    "com.microsoft:Gelu": "gelu",
}


def nothing(shape: Sequence[int], dtype: str) -> Value:
    """A value of which only shape and dtype matter (a constant mask)."""
    return Value(shape=tuple(shape), dtype=dtype)


def _elementwise(function: Function, c: OnnxCall) -> Value:
    values = [c.x(i) for i, v in enumerate(c.ins) if v is not None]
    if not values:
        raise c.fail("it has no inputs")
    if c.version < 7 and len(values) == 2:
        values = [values[0], _aligned(c, *values)]
    operands: list[Value | Number | None] = [*values]
    power = values[-1].data if function is functions.POW and values[-1].literal else None
    if power is not None and float(power.reshape(())).is_integer():
        function = functions.INTEGER_POW
    if function is functions.DIV and values[0].literal:
        function = functions.RECIPROCAL
    if function is functions.DIV and "int" in values[0].dtype:  # rounds to zero
        operands.append(None)
    if c.op == "IsInf" and not (c.integer("detect_negative", 1) and c.integer("detect_positive", 1)):
        operands.append(None)
    flops = function.flops * max(len(values) - 1, 1) if function is functions.ADD else None
    if function in (functions.ADD, functions.MAX, functions.MIN) and len(values) == 1:  # a sum of one operand
        operands.append(None)
    return c.elementwise(operands, function, flops=flops)


@lowers("Clip")
def _clip(c: OnnxCall) -> Value:
    """Bounds that are numbers belong to the op; a bound that is computed is read after the operand."""
    x, bounds = c.x(), [c.opt(1), c.opt(2)]
    if any(v is not None and not v.literal for v in bounds):
        return c.elementwise(
            [x, *(v for v in bounds if v is not None and not v.literal), None], functions.CLAMP
        )
    low, high = (None if v is None else v.scalar for v in bounds)
    low = c.real("min", -math.inf) if bounds[0] is None else low
    high = c.real("max", math.inf) if bounds[1] is None else high
    return c.elementwise([low, x, high], functions.CLAMP)


@lowers("Mod")
def _mod(c: OnnxCall) -> Value:
    return c.elementwise([c.x(0), c.x(1)], FUNCTIONS["rem" if c.integer("fmod") else "mod"], name="rem")


@lowers("BitShift")
def _shift(c: OnnxCall) -> Value:
    function = FUNCTIONS["shift_left" if c.text("direction") == "LEFT" else "shift_right_logical"]
    return c.elementwise([c.x(0), c.x(1)], function, name="shift_left")


def _aligned(c: OnnxCall, x: Value, y: Value) -> Value:
    """The second operand, reshaped to broadcast. Before opset 7, ``broadcast`` aligned it at ``axis`` of the first."""
    if not c.integer("broadcast") or not y.shape:
        return y
    axis = c.integer("axis", len(x.shape) - len(y.shape))
    axis = c.axis(axis, len(x.shape)) if x.shape else 0
    trailing = len(x.shape) - axis - len(y.shape)
    return c.reshape(y, (*y.shape, *[1] * trailing)) if trailing > 0 else y


for _op, _name in FUNCTIONS_OF.items():
    RULES.add(_op, partial(_elementwise, FUNCTIONS[_name]))


def activation(c: OnnxCall, name: str, x: Value, *numbers: float | None) -> Value:
    """An activation in the ops that jax.nn uses, so that its cost and its residuals are the same as in JAX."""
    if x.literal or not x.elements:
        return Value(shape=x.shape, dtype=x.dtype, foldable=False)
    return c.value(ACTIVATIONS[name](c.b, c.tensor(x), *numbers))


@lowers(*_ACTIVATIONS)
def _activation(c: OnnxCall) -> Value:
    name = _ACTIVATIONS[c.low.key(c.node)]
    numbers: list[float | None] = []
    if c.op in ("LeakyRelu", "Elu", "Celu", "QuickGelu"):
        numbers = [c.real("alpha", {"LeakyRelu": 0.01, "QuickGelu": 1.702}.get(c.op, 1.0))]
    elif c.op == "Selu":
        numbers = [c.real("alpha", 1.67326319217681884765625), c.real("gamma", 1.05070102214813232421875)]
    elif c.op == "HardSigmoid":
        alpha = c.real("alpha", 0.2)
        numbers = [c.real("beta", 0.5) / alpha, 1.0 / alpha] if alpha > 0 else [None, None]
    elif c.op == "Swish" and c.real("alpha", 1.0) != 1.0:
        return c.elementwise([c.x(), c.elementwise([c.x()], functions.SIGMOID), None], functions.MUL)
    return activation(c, name, c.x(), *numbers)


@lowers("Gelu")
def _gelu(c: OnnxCall) -> Value:
    return activation(c, "gelu_tanh" if c.text("approximate", "none") == "tanh" else "gelu", c.x())


@lowers("com.microsoft:FastGelu", "com.microsoft:BiasGelu")
def _biased_gelu(c: OnnxCall) -> Value:
    x, bias = c.x(), c.opt(1)
    x = x if bias is None else c.elementwise([x, bias], functions.ADD)
    return activation(c, "gelu" if c.op == "BiasGelu" else "gelu_tanh", x)


@lowers("SwiGLU")
def _swiglu(c: OnnxCall) -> Value:
    gated = [c.x(i) for i, v in enumerate(c.ins) if v is not None and i < 2]
    more = [] if len(gated) == 2 and c.real("alpha", 1.0) == 1.0 else [None]
    return c.elementwise([activation(c, "silu", gated[0]), *gated[1:], *more], functions.MUL)


@lowers("PRelu")
def _prelu(c: OnnxCall) -> Value:
    x, slope = c.x(0), c.x(1)
    if c.version < 7 and len(slope.shape) == 1 and len(x.shape) > 1:
        slope = c.reshape(slope, (slope.shape[0], *[1] * (len(x.shape) - 2)))
    below = c.elementwise([x, slope], functions.MUL)
    return c.elementwise([_above(c, x, 0.0), below, x], functions.SELECT, dtype=x.dtype)


@lowers("ThresholdedRelu", "Shrink")
def _cut(c: OnnxCall) -> Value:
    """Zero within a threshold. Shrink also moves the other values towards zero."""
    x = c.x()
    if c.op == "Shrink":  # it compares on both sides of zero, which is priced as one comparison
        left = c.elementwise([x, None], functions.SUB)
        return c.elementwise([_above(c, x, None), left, None], functions.SELECT, dtype=x.dtype)
    return c.elementwise([_above(c, x, c.real("alpha", 1.0)), 0.0, x], functions.SELECT, dtype=x.dtype)


def _above(c: OnnxCall, x: Value, threshold: float | None) -> Value:
    return c.elementwise([x, threshold], FUNCTIONS["gt"])


@lowers("Where")
def _where(c: OnnxCall) -> Value:
    if len(c.ins) < 3:
        raise c.fail(f"it has {len(c.ins)} inputs, but needs 3")
    return c.elementwise([c.x(0), c.x(1), c.x(2)], functions.WHERE, dtype=c.x(1).dtype, name="select")


@lowers("Mean")
def _mean(c: OnnxCall) -> Value:
    values = [c.x(i) for i, v in enumerate(c.ins) if v is not None]
    if not values:
        raise c.fail("it has no inputs")
    more = [0.0] if len(values) == 1 else []
    total = c.elementwise([*values, *more], functions.ADD, flops=float(len(values) - 1))
    return c.elementwise([total, len(values)], functions.DIV)


@lowers("com.microsoft:IsAllFinite")
def _all_finite(c: OnnxCall) -> Value:
    return c.elementwise(
        [*(c.x(i) for i, v in enumerate(c.ins) if v is not None), None], FUNCTIONS["is_finite"]
    )


@lowers("Identity", "Optional", "OptionalGetElement", "com.microsoft:Identity")
def _identity(c: OnnxCall) -> Value:
    v = c.opt(0)
    if v is None:
        raise c.fail("its input is an optional without a value")
    return v


@lowers("OptionalHasElement")
def _has(c: OnnxCall) -> Value:
    return known(np.array(c.opt(0) is not None))


@lowers("Cast", "CastLike", "BitCast")
def _cast(c: OnnxCall) -> Value:
    x = c.x()
    dtype = c.x(1).dtype if c.op == "CastLike" else c.dtype("to", x.dtype)
    if c.op == "Cast" and c.version < 6:
        dtype = c.text("to", x.dtype).lower().replace("float", "float32") or x.dtype
        dtype = re.sub("float32(16|64)", r"float\1", dtype)
    if dtype == "string" or x.dtype == "string":
        raise c.fail("it converts from or to text, which pase cannot price", fix="remove it from the model")
    if dtype == x.dtype:
        return x
    if x.note[:1] == ("initializer",) and x.tensor is None and x.foldable and not x.weight:
        return Value(shape=x.shape, dtype=dtype, foldable=False)
    return c.elementwise([x, *([None] if c.op == "BitCast" else [])], functions.CAST, dtype=dtype)


@lowers("Dropout")
def _dropout(c: OnnxCall) -> Sequence[Value | None]:
    """The identity if exported for inference; in training mode, a product with a mask and a scale."""
    x = c.x()
    mode = c.opt(2)
    training = mode is not None and mode.data is not None and bool(mode.data.reshape(-1)[:1].any())
    if c.version < 7:
        training = c.integer("is_test", 1) == 0
    out = c.elementwise([x, None], functions.MUL, flops=2.0) if training else x
    return [out, c.missing(x.shape, "bool", "its mask")]


@lowers("RandomNormal", "RandomUniform")
def _random(c: OnnxCall) -> Value:
    return nothing(c.shape(c.ints("shape") or []), c.dtype("dtype", "float32"))


@lowers("RandomNormalLike", "RandomUniformLike", "Bernoulli", "EyeLike")
def _random_like(c: OnnxCall) -> Value:
    x = c.x()
    return nothing(x.shape, c.dtype("dtype", x.dtype if c.op in ("Bernoulli", "EyeLike") else "float32"))


@lowers("QuantizeLinear", "DynamicQuantizeLinear")
def _quantize(c: OnnxCall) -> Value | Sequence[Value | None]:
    """Converts to integers. If only DequantizeLinear reads the result, the pair is one op on floats."""
    x = c.x()
    zero = c.opt(2)
    dtype = zero.dtype if zero is not None else c.dtype("output_dtype", "uint8")
    made = Value(shape=x.shape, dtype=dtype)
    if c.op == "DynamicQuantizeLinear":
        scalars = [nothing((), "float32"), nothing((), "uint8")]
        return [c.elementwise([x], functions.QUANTIZE, dtype="uint8"), *scalars]
    made = c.later(x.shape, dtype, lambda: c.tensor(c.elementwise([x], functions.QUANTIZE, dtype=dtype)))
    return replace(made, note=("quantize", x))


@lowers("DequantizeLinear")
def _dequantize(c: OnnxCall) -> Value:
    x, scale = c.x(), c.x(1)
    if x.note[:1] == ("quantize",):
        return c.elementwise([x.note[1]], FUNCTIONS["fake_quantize"])
    dtype = c.dtype("output_dtype", scale.dtype)
    return c.elementwise([x], FUNCTIONS["dequantize"], dtype=dtype)
