"""One rule per ONNX op: which loop nests it is. This file has the table of rules and the elementwise ops.

A rule takes a ``Call`` (``onnx_values``) and returns the node's values. Differences between opsets are the rules'
own: ``call.version`` is the opset, and inputs that once were attributes are looked for in both places.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pase.frontends.onnx_values import Call, Value, known
from pase.registry import Registry

__all__ = ["ELEMENTWISE", "RULES", "Result", "Rule", "lowers", "nothing"]

Result = "Value | Sequence[Value | None]"
Rule = Callable[[Call], "Value | Sequence[Value | None]"]
RULES: Registry[Rule] = Registry("rule for ONNX op", package="pase.frontends", prefix="onnx_rules")
lowers = RULES.register
"""Op (with "domain:" before it where that is not ai.onnx) -> rule."""

_SIMPLE = "Abs Neg Add Sub Mul Max Min Sum Relu"
_LOGIC = (
    "Not And Or Xor BitwiseAnd BitwiseOr BitwiseXor BitwiseNot BitShift Sign Ceil Floor Round Equal Less Greater "
    "LessOrEqual GreaterOrEqual IsNaN IsInf"
)
_DIVIDE = "Div Sqrt Reciprocal Mod"
_SPECIAL = "Exp Log Sin Cos Tan Sinh Cosh Tanh Asin Acos Atan Asinh Acosh Atanh Erf Sigmoid Pow"
ELEMENTWISE: dict[str, tuple[float, bool]] = {
    **{op: (1.0, True) for op in _SIMPLE.split()},
    **{op: (1.0, False) for op in _LOGIC.split()},
    **{op: (4.0, True) for op in _DIVIDE.split()},
    **{op: (10.0, True) for op in _SPECIAL.split()},
    "Clip": (2.0, True), "LeakyRelu": (2.0, True), "PRelu": (2.0, True), "ThresholdedRelu": (1.0, True),
    "Shrink": (3.0, True), "HardSigmoid": (4.0, True), "HardSwish": (5.0, True), "Softsign": (6.0, True),
    "Elu": (12.0, True), "Celu": (16.0, True), "Selu": (13.0, True), "Softplus": (21.0, True), "Mish": (32.0, True),
    "Swish": (11.0, True), "Mean": (4.0, True), "Where": (1.0, True),
    "com.microsoft:QuickGelu": (12.0, True), "com.microsoft:FastGelu": (20.0, True),
    "com.microsoft:Gelu": (14.0, True), "com.microsoft:BiasGelu": (15.0, True),
    "com.microsoft:BiasAdd": (1.0, True), "com.microsoft:IsAllFinite": (1.0, False),
}  # fmt: skip
"""op -> (FLOPs a point, differentiable); inputs broadcast. Counted as in ``jax_rules``."""

_BOOL = {
    "Not",
    "And",
    "Or",
    "Xor",
    "Equal",
    "Less",
    "Greater",
    "LessOrEqual",
    "GreaterOrEqual",
    "IsNaN",
    "IsInf",
}


def nothing(shape: Sequence[int], dtype: str) -> Value:
    """A value of which only the shape matters (a constant mask, an unused second result)."""
    return Value(shape=tuple(shape), dtype=dtype)


def _elementwise(c: Call) -> Value:
    flops, differentiable = ELEMENTWISE[c.low.key(c.node)]
    values = [c.x(i) for i, v in enumerate(c.ins) if v is not None]
    if not values:
        raise c.fail("it has no inputs")
    if c.op == "Clip":  # bounds are numbers
        values = values[:1] + [v for v in values[1:] if not v.literal]
    if c.version < 7 and len(values) == 2:
        values = [values[0], _aligned(c, *values)]
    if c.op == "PRelu" and len(values[1].shape) == 1 and len(values[0].shape) > 1 and c.version < 7:
        values[1] = c.reshape(values[1], (values[1].shape[0], *[1] * (len(values[0].shape) - 2)))
    dtype = "bool" if c.op in _BOOL else values[1].dtype if c.op == "Where" else values[0].dtype
    if c.op == "Pow" and values[1].literal and values[1].data is not None:
        whole = float(values[1].data.reshape(())).is_integer()
        flops = 4.0 if whole else flops
    if c.op == "Where":  # the condition has no gradient
        (cond, x, y) = values if len(values) == 3 else _short(c)
        values = [x, y, cond] if not x.literal else [y, cond, x]
        return replace(c.elementwise(values, flops=flops, dtype=dtype, differentiable=differentiable))
    return c.elementwise(values, flops=flops, dtype=dtype, differentiable=differentiable)


def _short(c: Call) -> list[Value]:
    raise c.fail("it has too few inputs")


def _aligned(c: Call, x: Value, y: Value) -> Value:
    """Before opset 7 the second operand's dims stood at ``axis`` of the first, and only with ``broadcast``."""
    if not c.integer("broadcast") or not y.shape:
        return y
    axis = c.integer("axis", len(x.shape) - len(y.shape))
    axis = c.axis(axis, len(x.shape)) if x.shape else 0
    trailing = len(x.shape) - axis - len(y.shape)
    return c.reshape(y, (*y.shape, *[1] * trailing)) if trailing > 0 else y


for _op in ELEMENTWISE:
    RULES.add(_op, _elementwise)


@lowers("Identity", "Optional", "OptionalGetElement", "com.microsoft:Identity")
def _identity(c: Call) -> Value:
    v = c.opt(0)
    if v is None:
        raise c.fail("an optional without a value")
    return v


@lowers("OptionalHasElement")
def _has(c: Call) -> Value:
    return known(np.array(c.opt(0) is not None))


@lowers("Cast", "CastLike", "BitCast")
def _cast(c: Call) -> Value:
    x = c.x()
    dtype = c.x(1).dtype if c.op == "CastLike" else c.dtype("to", x.dtype)
    if c.op == "Cast" and c.version < 6:
        dtype = c.text("to", x.dtype).lower().replace("float", "float32") or x.dtype
        dtype = re.sub("float32(16|64)", r"float\1", dtype)
    if dtype == "string" or x.dtype == "string":
        raise c.fail("text has no price; cut it off the model")
    if dtype == x.dtype:
        return x
    if x.note[:1] == ("initializer",) and x.tensor is None and x.settled:
        return Value(shape=x.shape, dtype=dtype, settled=False)
    return c.elementwise([x], flops=0.0, dtype=dtype, name="convert_element_type")


@lowers("Dropout")
def _dropout(c: Call) -> Sequence[Value | None]:
    """As exported for inference it is the identity; in training mode, a mask times a scale."""
    x = c.x()
    mode = c.opt(2)
    training = mode is not None and mode.data is not None and bool(mode.data.reshape(-1)[:1].any())
    if c.version < 7:
        training = c.integer("is_test", 1) == 0
    out = c.elementwise([x], flops=2.0) if training else x
    return [out, nothing(x.shape, "bool")]


@lowers("Gelu")
def _gelu(c: Call) -> Value:
    return c.elementwise([c.x()], flops=20.0 if c.text("approximate", "none") == "tanh" else 14.0)


@lowers("SwiGLU")
def _swiglu(c: Call) -> Value:
    return c.elementwise([c.x(i) for i, v in enumerate(c.ins) if v is not None and i < 2], flops=12.0)


@lowers("RandomNormal", "RandomUniform")
def _random(c: Call) -> Value:
    return nothing(c.shape(c.ints("shape") or []), c.dtype("dtype", "float32"))


@lowers("RandomNormalLike", "RandomUniformLike", "Bernoulli", "EyeLike")
def _random_like(c: Call) -> Value:
    x = c.x()
    return nothing(x.shape, c.dtype("dtype", x.dtype if c.op in ("Bernoulli", "EyeLike") else "float32"))


@lowers("QuantizeLinear", "DynamicQuantizeLinear")
def _quantize(c: Call) -> Value | Sequence[Value | None]:
    """To integers. Read by DequantizeLinear alone, the pair is one op on floats (as in training with quantization)."""
    x = c.x()
    zero = c.opt(2)
    dtype = zero.dtype if zero is not None else c.dtype("output_dtype", "uint8")
    made = Value(shape=x.shape, dtype=dtype)
    if c.op == "DynamicQuantizeLinear":
        scalars = [nothing((), "float32"), nothing((), "uint8")]
        return [c.elementwise([x], flops=6.0, dtype="uint8", differentiable=False), *scalars]
    made = c.later(
        x.shape, dtype, lambda: c.tensor(c.elementwise([x], flops=6.0, dtype=dtype, differentiable=False))
    )
    return replace(made, note=("quantize", x))


@lowers("DequantizeLinear")
def _dequantize(c: Call) -> Value:
    x, scale = c.x(), c.x(1)
    if x.note[:1] == ("quantize",):
        return c.elementwise([x.note[1]], flops=8.0, name="fake_quantize")
    dtype = c.dtype("output_dtype", scale.dtype)
    return c.elementwise([x], flops=2.0, dtype=dtype)
