"""Rules that lower ONNX ops to loop nests: the table of rules and the elementwise ops.

A rule takes an ``OnnxCall`` (``values``) and returns the results of the node. Rules handle the differences between
opsets: ``call.version`` is the opset, and an input that used to be an attribute is looked for in both places.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from pase.frontends.common.values import Value, known
from pase.frontends.onnx.values import OnnxCall
from pase.ir import functions
from pase.ir.functions import FUNCTIONS, Function
from pase.ops.activations import ACTIVATIONS
from pase.registry import Registry

__all__ = ["RULES", "OnnxRule", "Result", "activation", "lowers", "nothing"]

Result = "Value | Sequence[Value | None]"
OnnxRule = Callable[[OnnxCall], "Value | Sequence[Value | None]"]
RULES: Registry[OnnxRule] = Registry("rule for ONNX op", package="pase.frontends.onnx", prefix="rules")
lowers = RULES.register
"""Decorator: registers a rule for these ops. An op of a domain other than ai.onnx is written "domain:op"."""

_FUNCTIONS = {
    "Abs": "abs",
    "Neg": "neg",
    "Add": "add",
    "Sum": "add",
    "Sub": "sub",
    "Mul": "mul",
    "Max": "max",
    "Min": "min",
    "Clip": "clamp",
    "Not": "is_false",
    "And": "all_of",
    "Or": "any_of",
    "Xor": "ne",
    "BitwiseAnd": "and",
    "BitwiseOr": "or",
    "BitwiseXor": "xor",
    "BitwiseNot": "not",
    "BitShift": "shift_left",
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
    "Mod": "rem",
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
    """A value of which only shape and dtype matter (a constant mask, an unused second result)."""
    return Value(shape=tuple(shape), dtype=dtype)


def _elementwise(function: Function, c: OnnxCall) -> Value:
    values = [c.x(i) for i, v in enumerate(c.ins) if v is not None]
    if not values:
        raise c.fail("it has no inputs")
    if c.op == "Clip":  # bounds that are numbers belong to the op
        values = values[:1] + [v for v in values[1:] if not v.literal]
    if c.version < 7 and len(values) == 2:
        values = [values[0], _aligned(c, *values)]
    power = values[-1].data if function is functions.POW and values[-1].literal else None
    if power is not None and float(power.reshape(())).is_integer():
        function = functions.INTEGER_POW
    if function is functions.DIV and values[0].literal:
        function = functions.RECIPROCAL
    flops = function.flops * max(len(values) - 1, 1) if function is functions.ADD else None
    return c.elementwise(values, function, flops=flops)


def _aligned(c: OnnxCall, x: Value, y: Value) -> Value:
    """The second operand, reshaped to broadcast. Before opset 7, ``broadcast`` aligned it at ``axis`` of the first."""
    if not c.integer("broadcast") or not y.shape:
        return y
    axis = c.integer("axis", len(x.shape) - len(y.shape))
    axis = c.axis(axis, len(x.shape)) if x.shape else 0
    trailing = len(x.shape) - axis - len(y.shape)
    return c.reshape(y, (*y.shape, *[1] * trailing)) if trailing > 0 else y


for _op, _name in _FUNCTIONS.items():
    RULES.add(_op, partial(_elementwise, FUNCTIONS[_name]))


def activation(c: OnnxCall, name: str, x: Value) -> Value:
    """An activation in the ops that jax.nn uses, so that its cost and its residuals are the same as in JAX."""
    if x.literal or not x.elements:
        return Value(shape=x.shape, dtype=x.dtype, foldable=False)
    return c.value(ACTIVATIONS[name](c.b, c.tensor(x)))


@lowers(*_ACTIVATIONS)
def _activation(c: OnnxCall) -> Value:
    return activation(c, _ACTIVATIONS[c.low.key(c.node)], c.x())


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
    return c.elementwise([activation(c, "silu", gated[0]), *gated[1:]], functions.MUL)


@lowers("PRelu")
def _prelu(c: OnnxCall) -> Value:
    x, slope = c.x(0), c.x(1)
    if c.version < 7 and len(slope.shape) == 1 and len(x.shape) > 1:
        slope = c.reshape(slope, (slope.shape[0], *[1] * (len(x.shape) - 2)))
    below = c.elementwise([x, slope], functions.MUL)
    return c.elementwise([_positive(c, x), below, x], functions.SELECT, dtype=x.dtype)


@lowers("ThresholdedRelu", "Shrink")
def _cut(c: OnnxCall) -> Value:
    """Zero within a threshold. Shrink also moves the other values towards zero."""
    x = c.x()
    left = c.elementwise([x], functions.SUB) if c.op == "Shrink" else x
    return c.elementwise([_positive(c, x), left], functions.SELECT, dtype=x.dtype)


def _positive(c: OnnxCall, x: Value) -> Value:
    return c.elementwise([x], FUNCTIONS["gt"])


@lowers("Where")
def _where(c: OnnxCall) -> Value:
    if len(c.ins) < 3:
        raise c.fail(f"it has {len(c.ins)} inputs, but needs 3")
    return c.elementwise([c.x(0), c.x(1), c.x(2)], functions.SELECT, dtype=c.x(1).dtype)


@lowers("Mean")
def _mean(c: OnnxCall) -> Value:
    values = [c.x(i) for i, v in enumerate(c.ins) if v is not None]
    if not values:
        raise c.fail("it has no inputs")
    total = c.elementwise(values, functions.ADD, flops=float(len(values) - 1))
    return c.elementwise([total], functions.DIV)


@lowers("com.microsoft:IsAllFinite")
def _all_finite(c: OnnxCall) -> Value:
    return c.elementwise([c.x(i) for i, v in enumerate(c.ins) if v is not None], FUNCTIONS["is_finite"])


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
    return c.elementwise([x], functions.CAST, dtype=dtype)


@lowers("Dropout")
def _dropout(c: OnnxCall) -> Sequence[Value | None]:
    """The identity if exported for inference; in training mode, a product with a mask and a scale."""
    x = c.x()
    mode = c.opt(2)
    training = mode is not None and mode.data is not None and bool(mode.data.reshape(-1)[:1].any())
    if c.version < 7:
        training = c.integer("is_test", 1) == 0
    out = c.elementwise([x], functions.MUL, flops=2.0) if training else x
    return [out, nothing(x.shape, "bool")]


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
