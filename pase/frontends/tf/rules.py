"""Rules that lower TensorFlow ops to loop nests: the table of rules, elementwise ops, reductions and random ops.

``rules_products`` has products, ``rules_nn`` convolutions, norms, pools and losses, ``rules_rnn`` recurrent layers, and
``rules_shape`` ops that move data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from pase.frontends.common.values import Value, known
from pase.frontends.tf.values import TfCall, TfResult, elements
from pase.ir import Tensor, functions
from pase.ir.functions import FUNCTIONS, Function
from pase.ir.literals import Number, literal
from pase.ops import composites, nests
from pase.ops.activations import ACTIVATIONS
from pase.registry import Registry

__all__ = ["RULES", "TfRule", "function_of", "lowers", "opaque", "pointwise"]

TfRule = Callable[[TfCall], Sequence[TfResult]]
"""A rule returns one value per output of the node."""

RULES: Registry[TfRule] = Registry("rule for TensorFlow op", package="pase.frontends.tf", prefix="rules")
lowers = RULES.register


_FUNCTIONS = {
    "Neg": "neg",
    "Abs": "abs",
    "ComplexAbs": "abs",
    "Sign": "sign",
    "Add AddV2 BiasAddV1": "add",
    "Sub": "sub",
    "Mul MulNoNan": "mul",
    "Maximum": "max",
    "Minimum": "min",
    "Square": "square",
    "Real": "real",
    "Imag": "imag",
    "Conj": "conj",
    "Complex": "complex",
    "Angle": "atan2",
    "Select SelectV2": "where",
    "ClipByValue": "clamp",
    "Equal": "eq",
    "NotEqual": "ne",
    "Less": "lt",
    "LessEqual": "le",
    "Greater": "gt",
    "GreaterEqual": "ge",
    "ApproximateEqual": "eq",
    "LogicalAnd": "all_of",
    "LogicalOr": "any_of",
    "LogicalNot": "is_false",
    "IsFinite": "is_finite",
    "IsNan": "is_nan",
    "IsInf": "is_inf",
    "Floor": "floor",
    "Ceil": "ceil",
    "Round Rint": "round",
    "NextAfter": "nextafter",
    "BitwiseAnd": "and",
    "BitwiseOr": "or",
    "BitwiseXor": "xor",
    "Invert": "not",
    "LeftShift": "shift_left",
    "RightShift": "shift_right",
    "PopulationCount": "population_count",
    "Bucketize": "bucketize",
    "Cast": "cast",
    "Identity Snapshot PreventGradient CheckNumerics CheckNumericsV2 Copy EnsureShape PlaceholderWithDefault "
    "DebugIdentity DebugIdentityV2 DebugIdentityV3 DeepCopy RefIdentity XlaSharding": "copy",
    "StopGradient": "stop_gradient",
    "Div RealDiv": "div",
    "DivNoNan": "div_no_nan",
    "FloorDiv": "floor_div",
    "TruncateDiv TruncateMod Mod": "rem",
    "FloorMod": "mod",
    "Sqrt": "sqrt",
    "Rsqrt": "rsqrt",
    "Reciprocal Inv": "reciprocal",
    "Exp": "exp",
    "Expm1": "expm1",
    "Log": "log",
    "Log1p": "log1p",
    "Sin": "sin",
    "Cos": "cos",
    "Tan": "tan",
    "Tanh": "tanh",
    "Sinh": "sinh",
    "Cosh": "cosh",
    "Asin": "asin",
    "Acos": "acos",
    "Atan": "atan",
    "Asinh": "asinh",
    "Acosh": "acosh",
    "Atanh": "atanh",
    "Atan2": "atan2",
    "Sigmoid": "sigmoid",
    "Erf": "erf",
    "Erfc": "erfc",
    "Erfinv Ndtri": "erf_inv",
    "Pow": "pow",
    "Lgamma": "lgamma",
    "Digamma": "digamma",
    "Polygamma": "polygamma",
    "Zeta": "zeta",
    "Igamma": "igamma",
    "Igammac": "igammac",
    "IgammaGradA": "igamma_grad",
    "RandomGammaGrad": "random_gamma_grad",
    "Betainc": "incomplete_beta",
    "BesselI0": "bessel_i0",
    "BesselI0e": "bessel_i0e",
    "BesselI1": "bessel_i1",
    "BesselI1e": "bessel_i1e",
    "BesselJ0 BesselJ1": "bessel_j",
    "BesselK0 BesselK0e BesselK1 BesselK1e": "bessel_k",
    "BesselY0 BesselY1": "bessel_y",
    "Dawsn": "dawsn",
    "Expint": "expint",
    "FresnelCos FresnelSin": "fresnel",
    "Spence": "spence",
    "Xlogy": "xlogy",
    "Xlog1py": "xlog1py",
    "Xdivy": "div",
    "ReluGrad Relu6Grad LeakyReluGrad": "gradient_of_max",
    "InvGrad ReciprocalGrad SqrtGrad RsqrtGrad SigmoidGrad TanhGrad SoftsignGrad": "gradient_of_result",
    "SoftplusGrad EluGrad SeluGrad": "gradient_of_exp",
}
"""Elementwise ops, separated by spaces -> the function that they compute (``pase.ir.functions``)."""

_INEXACT = frozenset(
    (
        *(
            "Angle",
            "ApproximateEqual",
            "TruncateDiv",
            "Mod",
            "Ndtri",
            "Xdivy",
            "MulNoNan",
        ),
        *("BesselJ0", "BesselJ1", "BesselK0", "BesselK0e", "BesselK1", "BesselK1e", "BesselY0", "BesselY1"),
        *("FresnelCos", "FresnelSin", "RightShift", "BiasAddV1"),
    )
)
"""Ops whose function has their cost, but is not exactly what they compute, or not for every dtype."""

_TYPED = {
    "Cast": "DstT",
    "Real": "Tout",
    "Imag": "Tout",
    "ComplexAbs": "Tout",
    "Angle": "Tout",
    "Complex": "Tout",
}
"""Op -> the attribute with the dtype of its result, if that is not T."""


def pointwise(function: Function, c: TfCall) -> Sequence[TfResult]:
    """The rule for an elementwise op. A known number among its operands becomes part of the op."""
    op = c.node.op
    shape = c.broadcast(*[c.shape_of(i) for i in range(len(c.ins))])
    dtype = "bool" if function.boolean else c.type(_TYPED.get(op, "T"))
    dtype = {"Bucketize": "int32", "PopulationCount": "uint8"}.get(op, dtype)
    if "int" in dtype and any(c.dtype(i) == "key" for i in range(len(c.ins))):
        dtype = "key"  # arithmetic on a random seed
    numbers = [isinstance(v, Value) and v.literal for v in c.ins]
    if all(numbers):
        return [c.b.constant(shape, dtype)]
    operands = [_number(c.v(i)) if number else c.x(i) for i, number in enumerate(numbers)]
    if function is functions.CLAMP and len(operands) == 3:
        x, low, high = operands
        bounds = isinstance(low, Tensor) or isinstance(high, Tensor)
        operands = [*operands, None] if bounds else [low, x, high]
    if function is functions.DIV and numbers[0]:
        function = functions.RECIPROCAL
    elif op in _INEXACT or (function is functions.DIV and "int" in dtype):
        operands.append(None)
    return nests.elementwise(c.b, function, operands, [dtype], name=op, shape=shape)


def _number(v: Value) -> Number | None:
    return literal(v.known) if v.known is not None and v.known.dtype.kind in "biufc" else None


_BY_OP = {op: FUNCTIONS[name] for ops, name in _FUNCTIONS.items() for op in ops.split()}
for _op, _function in _BY_OP.items():
    RULES.add(_op, partial(pointwise, _function))


def function_of(op: str) -> Function | None:
    """The function that an elementwise op computes exactly, with a result of its operands' dtype; None for other
    ops."""
    return None if op in _INEXACT or op in _TYPED else _BY_OP.get(op)


@lowers("ZerosLike", "OnesLike")
def _constant_like(c: TfCall) -> Sequence[TfResult]:
    return [c.b.constant(c.shape_of(), c.type("T"), contents=int(c.node.op == "OnesLike"))]


_ACTIVATIONS = {
    "Relu": "relu",
    "Relu6": "relu6",
    "LeakyRelu": "leaky_relu",
    "Elu": "elu",
    "Selu": "selu",
    "Softplus": "softplus",
    "Softsign": "softsign",
}


@lowers(*_ACTIVATIONS)
def _activation(c: TfCall) -> Sequence[TfResult]:
    """An activation in the ops that jax.nn uses, so that its cost and its residuals are the same as in JAX."""
    numbers = [c.real("alpha", 0.2)] if c.node.op == "LeakyRelu" else []
    return [ACTIVATIONS[_ACTIVATIONS[c.node.op]](c.b, c.x(), *numbers)]


@lowers("SquaredDifference")
def _squared_difference(c: TfCall) -> Sequence[TfResult]:
    shape = c.broadcast(*[c.shape_of(0), c.shape_of(1)])
    (difference,) = nests.elementwise(c.b, functions.SUB, [c.x(0), c.x(1)], [c.type("T")], shape=shape)
    return [composites.apply(c.b, functions.SQUARE, difference)]


def opaque(
    c: TfCall, outs: Sequence[tuple[tuple[int, ...], str]], *, flops: float = 0.0, differentiable: bool = True
) -> Sequence[Tensor]:
    """The node as one op that is not split."""
    xs = [c.x(i) for i in range(len(c.ins)) if c.known(i) is None]
    return nests.opaque(c.b, c.node.op, xs, outs, flops=flops, differentiable=differentiable)


@lowers("IdentityN", "ShapeN")
def _pass_on(c: TfCall) -> Sequence[TfResult]:
    """Several values passed on unchanged, or their shapes."""
    if c.node.op == "ShapeN":
        return [known(np.array(c.shape_of(i), c.type("out_type"))) for i in range(len(c.ins))]
    return list(c.ins)


@lowers("Shape", "Size", "Rank")
def _shape_of(c: TfCall) -> Sequence[TfResult]:
    shape = c.shape_of()
    if c.node.op == "Rank":
        return [known(np.array(len(shape), np.int32))]
    dtype = c.type("out_type") if "out_type" in c.node.attr else "int32"
    if c.node.op == "Size" and elements(shape) > np.iinfo(dtype).max:
        raise c.fail(
            f"its operand of shape {shape} has more elements than {dtype} can count", "use out_type=tf.int64"
        )
    if any(s > np.iinfo(dtype).max for s in shape):
        raise c.fail(
            f"a dim of its operand of shape {shape} is larger than {dtype} can count", "use out_type=tf.int64"
        )
    return [known(np.array(elements(shape) if c.node.op == "Size" else shape, dtype))]


@lowers("AddN", "AccumulateNV2")
def _add_n(c: TfCall) -> Sequence[TfResult]:
    xs = [c.x(i) for i in range(max(len(c.ins), 1))]
    more = [0] if len(xs) == 1 else []
    shape = c.broadcast(*[c.shape_of(i) for i in range(len(c.ins))])
    return nests.elementwise(
        c.b,
        functions.ADD,
        [*xs, *more],
        [xs[0].dtype],
        name="AddN",
        flops=max(len(xs) - 1.0, 0.0),
        shape=shape,
    )


@lowers("BiasAdd")
def _bias_add(c: TfCall) -> Sequence[TfResult]:
    """Adds a bias per channel. Channels are the last dim, or the second one for the data formats NC…."""
    x, bias = c.x(0), c.x(1)
    c.rank(1, 1)
    at = 1 if c.text("data_format", "NHWC").startswith("NC") else len(x.shape) - 1
    if not 0 <= at < len(x.shape) or x.shape[at] != bias.shape[0]:
        raise c.fail(f"its bias of shape {c.shape_of(1)} does not fit a tensor of shape {c.shape_of(0)}")
    if at != len(x.shape) - 1:
        bias = nests.reshape(c.b, bias, (bias.shape[0], *[1] * (len(x.shape) - 1 - at)))
    return nests.elementwise(c.b, functions.ADD, [x, bias], [x.dtype], name="BiasAdd", shape=x.shape)


_REDUCTIONS = {
    "Sum": "reduce_sum",
    "Mean": "reduce_sum",
    "Max": "reduce_max",
    "Min": "reduce_min",
    "Prod": "reduce_prod",
    "All": "reduce_and",
    "Any": "reduce_or",
    "EuclideanNorm": "reduce_sum",
}


@lowers(*_REDUCTIONS)
def _reduce(c: TfCall) -> Sequence[TfResult]:
    """A mean is a sum and a division, and a norm is the root of a sum of squares, as in JAX."""
    op, x, keep = c.node.op, c.x(), c.flag("keep_dims")
    axes = sorted(set(c.axes_at(1, len(x.shape))))
    if not axes:
        return [x]
    if op == "EuclideanNorm":
        x = composites.apply(c.b, functions.SQUARE, x)
    (out,) = nests.reduce(c.b, FUNCTIONS[_REDUCTIONS[op]], [x], axes, [x.dtype], keepdims=keep, name=op)
    if op == "Mean":
        return [composites.apply(c.b, functions.DIV, out, composites.count(x, axes))]
    return [composites.apply(c.b, functions.SQRT, out) if op == "EuclideanNorm" else out]


@lowers("ArgMax", "ArgMin")
def _arg(c: TfCall) -> Sequence[TfResult]:
    x = c.x()
    axis = c.axis_at(1, len(x.shape)) if len(c.ins) > 1 else 0
    dtype = c.type("output_type") if "output_type" in c.node.attr else "int64"
    return nests.reduce(
        c.b, FUNCTIONS[c.node.op.lower()], [x], [axis], [dtype], combines=False, name=c.node.op
    )


@lowers("L2Loss")
def _l2(c: TfCall) -> Sequence[TfResult]:
    """Half of the sum of squares."""
    x = c.x()
    (square,) = nests.elementwise(c.b, functions.SQUARE, [x], [x.dtype])
    half = composites.apply(c.b, functions.MUL, square, 0.5)
    return nests.reduce(c.b, functions.SUM, [half], range(len(x.shape)), [x.dtype])


@lowers(
    "FakeQuantWithMinMaxVars",
    "FakeQuantWithMinMaxArgs",
    "QuantizeAndDequantizeV2",
    "QuantizeAndDequantizeV3",
    "QuantizeAndDequantizeV4",
)
def _fake_quant(c: TfCall) -> Sequence[TfResult]:
    """Rounds to a grid whose ends are scalars."""
    x = c.x()
    return nests.elementwise(c.b, FUNCTIONS["fake_quantize"], [x], [x.dtype], name=c.node.op)


@lowers(
    "RandomUniform",
    "RandomStandardNormal",
    "TruncatedNormal",
    "RandomUniformInt",
    "StatelessRandomUniform",
    "StatelessRandomUniformV2",
    "StatelessRandomNormal",
    "StatelessRandomNormalV2",
    "StatelessTruncatedNormal",
    "StatelessTruncatedNormalV2",
    "StatelessRandomUniformInt",
    "StatelessRandomUniformIntV2",
    "StatelessRandomUniformFullInt",
    "StatelessRandomUniformFullIntV2",
)
def _random(c: TfCall) -> Sequence[TfResult]:
    """Random numbers, generated in any layout. The key, a few integers, is replicated."""
    shape = c.shape(c.numbers(0, "shape"))
    dtype = c.type("dtype", "Tout") if {"dtype", "Tout"} & set(c.node.attr) else "float32"
    keys = [c.x(i) for i, v in enumerate(c.ins) if i and isinstance(v, Value) and v.known is None]
    return [nests.generate(c.b, functions.RANDOM, shape, dtype, keys, name=c.node.op)]


@lowers(
    "StatelessRandomGetKeyCounter",
    "StatelessRandomGetKey",
    "StatelessRandomGetAlg",
    "StatelessRandomGetKeyCounterAlg",
    "RngReadAndSkip",
)
def _key(c: TfCall) -> Sequence[TfResult]:
    """Arithmetic on random keys: a few integers, replicated on every device."""
    if c.node.op == "StatelessRandomGetAlg":
        return [known(np.array(1, np.int32))]
    outs = {
        "StatelessRandomGetKeyCounter": [(1,), (2,)],
        "StatelessRandomGetKey": [(1,)],
        "RngReadAndSkip": [(3,)],
    }
    shapes = outs.get(c.node.op, [(1,), (2,), ()])
    dtypes = ["int64" if c.node.op == "RngReadAndSkip" else "key", "key", "int32"]
    return opaque(c, list(zip(shapes, dtypes, strict=False)), differentiable=False)
