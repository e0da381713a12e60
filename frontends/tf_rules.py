"""One rule per TensorFlow op: which loop nest it is. An elementwise op is a function of ``pase.ir.functions``.

Here are these, products and reductions; ``tf_rules_nn`` has convolutions, norms, pools and losses,
``tf_rules_shape`` what moves data about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from pase.frontends.tf_values import Reshaped, StaticValue, TfCall, TfValue, elements
from pase.ir import Tensor, functions
from pase.ir.functions import FUNCTIONS, Function
from pase.ops import composites, nests
from pase.ops.activations import ACTIVATIONS
from pase.registry import Registry

__all__ = ["RULES", "TfRule", "broadcast_shape", "lowers", "opaque", "pointwise", "product_of"]

TfRule = Callable[[TfCall], Sequence[TfValue]]
"""Returns one value per output of the node."""

RULES: Registry[TfRule] = Registry("rule for TensorFlow op", package="pase.frontends", prefix="tf_rules")
lowers = RULES.register


_FUNCTIONS = {
    "Neg": "neg", "Abs": "abs", "ComplexAbs": "abs", "Sign": "sign", "Add AddV2 BiasAddV1": "add", "Sub": "sub",
    "Mul MulNoNan": "mul", "Maximum": "max", "Minimum": "min", "Square": "square", "Real": "real", "Imag": "imag",
    "Conj": "conj", "Complex": "complex", "Angle": "atan2", "Select SelectV2": "select", "ClipByValue": "clamp",
    "Equal": "eq", "NotEqual": "ne", "Less": "lt", "LessEqual": "le", "Greater": "gt", "GreaterEqual": "ge",
    "ApproximateEqual": "eq", "LogicalAnd": "all_of", "LogicalOr": "any_of", "LogicalNot": "is_false",
    "IsFinite": "is_finite", "IsNan": "is_nan", "IsInf": "is_inf", "Floor": "floor", "Ceil": "ceil",
    "Round Rint": "round", "NextAfter": "nextafter", "BitwiseAnd": "and", "BitwiseOr": "or", "BitwiseXor": "xor",
    "Invert": "not", "LeftShift": "shift_left", "RightShift": "shift_right", "PopulationCount": "population_count",
    "Bucketize": "bucketize", "Cast": "cast",
    "Identity Snapshot PreventGradient CheckNumerics CheckNumericsV2 Copy EnsureShape PlaceholderWithDefault "
    "DebugIdentity DebugIdentityV2 DebugIdentityV3 DeepCopy RefIdentity XlaSharding": "copy",
    "StopGradient": "stop_gradient", "Div RealDiv DivNoNan": "div",
    "TruncateDiv FloorDiv FloorMod Mod TruncateMod": "rem", "Sqrt": "sqrt", "Rsqrt": "rsqrt",
    "Reciprocal Inv": "reciprocal", "Exp": "exp", "Expm1": "expm1", "Log": "log", "Log1p": "log1p", "Sin": "sin",
    "Cos": "cos", "Tan": "tan", "Tanh": "tanh", "Sinh": "sinh", "Cosh": "cosh", "Asin": "asin", "Acos": "acos",
    "Atan": "atan", "Asinh": "asinh", "Acosh": "acosh", "Atanh": "atanh", "Atan2": "atan2", "Sigmoid": "sigmoid",
    "Erf": "erf", "Erfc": "erfc", "Erfinv Ndtri": "erf_inv", "Pow": "pow", "Lgamma": "lgamma", "Digamma": "digamma",
    "Polygamma": "polygamma", "Zeta": "zeta", "Igamma": "igamma", "Igammac": "igammac", "IgammaGradA": "igamma_grad",
    "RandomGammaGrad": "random_gamma_grad", "Betainc": "incomplete_beta", "BesselI0": "bessel_i0",
    "BesselI0e": "bessel_i0e", "BesselI1": "bessel_i1", "BesselI1e": "bessel_i1e", "BesselJ0 BesselJ1": "bessel_j",
    "BesselK0 BesselK0e BesselK1 BesselK1e": "bessel_k", "BesselY0 BesselY1": "bessel_y", "Dawsn": "dawsn",
    "Expint": "expint", "FresnelCos FresnelSin": "fresnel", "Spence": "spence",
    "Xlogy Xlog1py": "xlogy", "Xdivy": "div",
    "ReluGrad Relu6Grad LeakyReluGrad": "gradient_of_max",
    "InvGrad ReciprocalGrad SqrtGrad RsqrtGrad SigmoidGrad TanhGrad SoftsignGrad": "gradient_of_result",
    "SoftplusGrad EluGrad SeluGrad": "gradient_of_exp",
}  # fmt: skip
"""Ops that are one function, point by point -> the function (``pase.ir.functions``)."""

_TYPED = {
    "Cast": "DstT",
    "Real": "Tout",
    "Imag": "Tout",
    "ComplexAbs": "Tout",
    "Angle": "Tout",
    "Complex": "Tout",
}
"""Attributes that say the result's dtype, where it is not T."""


def broadcast_shape(c: TfCall, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise c.fail(f"shapes {', '.join(map(str, shapes))} do not broadcast") from None


def pointwise(function: Function, c: TfCall) -> Sequence[TfValue]:
    """The rule of an op that is one function: a known number among its operands is part of it."""
    op = c.node.op
    shape = broadcast_shape(c, [c.shape(i) for i in range(len(c.ins))])
    dtype = "bool" if function.boolean else c.type(_TYPED.get(op, "T"))
    dtype = {"Bucketize": "int32", "PopulationCount": "uint8"}.get(op, dtype)
    if "int" in dtype and any(c.dtype(i) == "key" for i in range(len(c.ins))):
        dtype = "key"  # arithmetic on a random seed
    numbers = [isinstance(v, StaticValue) and v.array.size == 1 for v in c.ins]
    xs = [c.x(i) for i, number in enumerate(numbers) if not number]
    if not xs:
        return [c.b.constant(shape, dtype)]
    if function is functions.DIV and numbers[0]:
        function = functions.RECIPROCAL
    return nests.elementwise(c.b, function, xs, [dtype], name=op, shape=shape)


for _ops, _name in _FUNCTIONS.items():
    for _op in _ops.split():
        RULES.add(_op, partial(pointwise, FUNCTIONS[_name]))


@lowers("ZerosLike", "OnesLike")
def _constant_like(c: TfCall) -> Sequence[TfValue]:
    return [c.b.constant(c.shape(), c.type("T"))]


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
def _activation(c: TfCall) -> Sequence[TfValue]:
    """Written out as jax.nn has it, so that it is priced and kept alike."""
    return [ACTIVATIONS[_ACTIVATIONS[c.node.op]](c.b, c.x())]


@lowers("SquaredDifference")
def _squared_difference(c: TfCall) -> Sequence[TfValue]:
    shape = broadcast_shape(c, [c.shape(0), c.shape(1)])
    (difference,) = nests.elementwise(c.b, functions.SUB, [c.x(0), c.x(1)], [c.type("T")], shape=shape)
    return [composites.apply(c.b, functions.SQUARE, difference)]


def opaque(
    c: TfCall, outs: Sequence[tuple[tuple[int, ...], str]], *, flops: float = 0.0, differentiable: bool = True
) -> Sequence[Tensor]:
    """The node as one op that is not split."""
    xs = [c.x(i) for i, v in enumerate(c.ins) if not isinstance(v, StaticValue)]
    return nests.opaque(c.b, c.node.op, xs, outs, flops=flops, differentiable=differentiable)


@lowers("IdentityN", "ShapeN")
def _pass_on(c: TfCall) -> Sequence[TfValue]:
    """Several values passed on, each as it is."""
    if c.node.op == "ShapeN":
        return [StaticValue(np.array(c.shape(i), c.type("out_type"))) for i in range(len(c.ins))]
    return list(c.ins)


@lowers("Shape", "Size", "Rank")
def _shape_of(c: TfCall) -> Sequence[TfValue]:
    shape = c.shape()
    if c.node.op == "Rank":
        return [StaticValue(np.array(len(shape), np.int32))]
    dtype = c.type("out_type") if "out_type" in c.node.attr else "int32"
    if c.node.op == "Size" and elements(shape) > np.iinfo(dtype).max:
        raise c.fail(f"a tensor of shape {shape} has more elements than an {dtype} counts")
    if any(s > np.iinfo(dtype).max for s in shape):
        raise c.fail(f"a dim of shape {shape} is larger than an {dtype} counts")
    return [StaticValue(np.array(elements(shape) if c.node.op == "Size" else shape, dtype))]


@lowers("AddN", "AccumulateNV2")
def _add_n(c: TfCall) -> Sequence[TfValue]:
    xs = [c.x(i) for i in range(max(len(c.ins), 1))]
    shape = broadcast_shape(c, [c.shape(i) for i in range(len(c.ins))])
    return nests.elementwise(
        c.b, functions.ADD, xs, [xs[0].dtype], name="AddN", flops=max(len(xs) - 1.0, 0.0), shape=shape
    )


@lowers("BiasAdd")
def _bias_add(c: TfCall) -> Sequence[TfValue]:
    """The bias is of the channels, which stand last or (NC...) second."""
    x, bias = c.x(0), c.x(1)
    c.rank(1, 1)
    at = 1 if c.text("data_format", "NHWC").startswith("NC") else len(x.shape) - 1
    if not 0 <= at < len(x.shape) or x.shape[at] != bias.shape[0]:
        raise c.fail(f"a bias of {c.shape(1)} for a tensor of {c.shape(0)}")
    if at != len(x.shape) - 1:
        bias = nests.reshape(c.b, bias, (bias.shape[0], *[1] * (len(x.shape) - 1 - at)))
    return nests.elementwise(c.b, functions.ADD, [x, bias], [x.dtype], name="BiasAdd", shape=x.shape)


@lowers("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _matmul(c: TfCall) -> Sequence[TfValue]:
    """Matrices in the last two dims; those before are a batch, which broadcasts."""
    batched = c.node.op != "MatMul"
    adjoint = (
        (c.flag("adj_x"), c.flag("adj_y")) if batched else (c.flag("transpose_a"), c.flag("transpose_b"))
    )
    if not batched:
        c.rank(0, 2), c.rank(1, 2)
    if len(c.shape(0)) < 2 or len(c.shape(1)) < 2:
        raise c.fail(f"matrices are needed, got shapes {c.shape(0)} and {c.shape(1)}")
    return [matmul(c, *adjoint, dtype=c.type("Tout", "T"))]


def matmul(c: TfCall, adj_x: bool, adj_y: bool, dtype: str) -> TfValue:
    """Operands 0 and 1 multiplied; dims that a reshape before it has merged stay apart where they can."""
    sx, sy = c.shape(0), c.shape(1)
    kx, ky = len(sx) - (2 if adj_x else 1), len(sy) - (1 if adj_y else 2)
    if sx[kx] != sy[ky]:
        raise c.fail(f"shapes {sx} and {sy} do not multiply")
    lead = broadcast_shape(c, [sx[:-2], sy[:-2]])
    letters = [f"b{i}" for i in range(len(lead))]

    def names(shape: tuple[int, ...], contracted: int, free: str) -> list[str]:
        own = len(shape) - 2
        wide = lead[len(lead) - own :]
        batch = [
            n if s == w else "" for n, s, w in zip(letters[len(lead) - own :], shape, wide, strict=False)
        ]
        return [*batch, *(["k", free] if contracted == own else [free, "k"])]

    of_x, of_y, out = names(sx, kx, "m"), names(sy, ky, "n"), [*letters, "m", "n"]
    shape = (*lead, sx[len(sx) * 2 - 3 - kx], sy[len(sy) * 2 - 3 - ky])
    apart = _apart(c, of_x, of_y)
    if apart is None:
        return product_of(c, c.x(0), c.x(1), of_x, of_y, out, dtype)
    (x, of_x), (y, of_y), inside = apart
    made = product_of(c, x, y, of_x, of_y, [p for n in out for p in inside.get(n, [n])], dtype)
    return made if made.shape == shape else Reshaped(source=made, shape=shape, at=c.b.eqn)


def _apart(
    c: TfCall, of_x: list[str], of_y: list[str]
) -> tuple[tuple[Tensor, list[str]], tuple[Tensor, list[str]], dict[str, list[str]]] | None:
    """Operands before the reshapes that merged their dims, with names for the dims, and which make up which; None
    where there is no such reshape, or the two operands do not agree."""
    inside: dict[str, list[str]] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    found: list[tuple[Tensor, list[str]]] = []
    for i, names in ((0, of_x), (1, of_y)):
        v = c.value(i)
        parts = v.parts() if isinstance(v, Reshaped) else None
        x = v.source if isinstance(v, Reshaped) and parts is not None else c.x(i)
        groups = parts if parts is not None else [(k,) for k in range(len(names))]
        dims = [""] * len(x.shape)
        for name, group in zip(names, groups, strict=True):
            own = tuple(int(x.shape[k]) for k in group)  # type: ignore[arg-type]
            if name and sizes.setdefault(name, own) != own:
                return None
            inside[name] = [f"{name}.{k}" for k in range(len(group))] if len(group) != 1 else [name]
            for k, part in zip(group, inside[name] if name else [""] * len(group), strict=True):
                dims[k] = part
        found.append((x, dims))
    if not any(isinstance(c.value(i), Reshaped) for i in (0, 1)):
        return None
    return found[0], found[1], inside


def product_of(
    c: TfCall, x: Tensor, y: Tensor, of_x: Sequence[str], of_y: Sequence[str], out: Sequence[str], dtype: str
) -> Tensor:
    """A product of two tensors whose dims have names ("": one element, dropped); a name in neither is one element."""
    x, of_x = _without(c, x, of_x)
    y, of_y = _without(c, y, of_y)
    x, of_x = _summed(c, x, of_x, {*of_y, *out})
    y, of_y = _summed(c, y, of_y, {*of_x, *out})
    shared = [n for n in of_x if n in of_y]
    batch = [n for n in shared if n in out]
    over = [n for n in shared if n not in out]
    made = nests.contract(
        c.b,
        x,
        y,
        ([of_x.index(n) for n in over], [of_y.index(n) for n in over]),
        ([of_x.index(n) for n in batch], [of_y.index(n) for n in batch]),
        dtype,
        name=c.node.op,
    )
    order = [*batch, *(n for n in of_x if n not in shared), *(n for n in of_y if n not in shared)]
    kept = [n for n in out if n in order]
    if kept != order:
        made = nests.transpose(c.b, made, [order.index(n) for n in kept])
    if len(kept) != len(out):
        sizes = dict(zip(kept, made.shape, strict=True))
        made = nests.reshape(c.b, made, [sizes.get(n, 1) for n in out])
    return made


def _without(c: TfCall, x: Tensor, names: Sequence[str]) -> tuple[Tensor, list[str]]:
    kept = [n for n in names if n]
    if len(kept) == len(names):
        return x, kept
    return nests.reshape(c.b, x, [s for s, n in zip(x.shape, names, strict=True) if n]), kept


def _summed(c: TfCall, x: Tensor, names: list[str], used: set[str]) -> tuple[Tensor, list[str]]:
    """Sum over dims that neither the other operand nor the result has."""
    gone = [i for i, n in enumerate(names) if n not in used]
    if not gone:
        return x, names
    return nests.reduce(c.b, functions.SUM, [x], gone, [x.dtype])[0], [n for n in names if n in used]


@lowers("Einsum")
def _einsum(c: TfCall) -> Sequence[TfValue]:
    equation = c.text("equation").replace(" ", "")
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != len(c.ins) or not 1 <= len(terms) <= 2:
        raise c.fail(f"equation '{equation[:100]}' is not of one or two operands and a result")
    wide = max(
        (len(c.shape(i)) - len(t.replace("...", "")) for i, t in enumerate(terms) if "..." in t), default=0
    )
    sizes: dict[str, int] = {}
    named: list[list[str]] = []
    for i, term in enumerate(terms):
        shape = c.shape(i)
        head, dots, tail = term.partition("...")
        own = len(shape) - len(head) - len(tail)
        if own < 0 or (own and not dots):
            raise c.fail(f"'{term[:50]}' of equation '{equation[:100]}' does not fit shape {shape}")
        names = [*head, *[f"...{k}" for k in range(wide - own, wide)], *tail]
        if len(set(names)) != len(names):
            raise c.fail(f"equation '{equation[:100]}' walks a diagonal, for which there is no loop nest")
        for n, s in zip(names, shape, strict=True):
            if sizes.get(n, 1) not in (1, s) and s != 1:
                raise c.fail(f"'{n}' is both {sizes[n]} and {s} in equation '{equation[:100]}'")
            sizes[n] = max(sizes.get(n, 1), s)
        named.append(names)
    head, dots, tail = out.partition("...")
    result = [*head, *([f"...{k}" for k in range(wide)] if dots else []), *tail]
    if missing := [n for n in result if n not in sizes]:
        raise c.fail(f"'{missing[0]}' of the result is in no operand of equation '{equation[:100]}'")
    dropped = [
        [n if c.shape(i)[k] == sizes[n] else "" for k, n in enumerate(names)] for i, names in enumerate(named)
    ]
    if len(named) == 1:
        x, names = _without(c, c.x(0), dropped[0])
        x, names = _summed(c, x, names, set(result))
        return [nests.transpose(c.b, x, [names.index(n) for n in result])]
    return [product_of(c, c.x(0), c.x(1), dropped[0], dropped[1], result, c.type("T"))]


_REDUCTIONS = {
    "Sum": "reduce_sum", "Mean": "reduce_sum", "Max": "reduce_max", "Min": "reduce_min", "Prod": "reduce_prod",
    "All": "reduce_and", "Any": "reduce_or", "EuclideanNorm": "reduce_sum",
}  # fmt: skip


@lowers(*_REDUCTIONS)
def _reduce(c: TfCall) -> Sequence[TfValue]:
    """A mean is a sum and a division, a norm a sum of squares and its root, as in JAX."""
    op, x, keep = c.node.op, c.x(), c.flag("keep_dims")
    axes = sorted(set(c.axes(1, len(x.shape))))
    if not axes:
        return [x]
    if op == "EuclideanNorm":
        x = composites.apply(c.b, functions.SQUARE, x)
    (out,) = nests.reduce(c.b, FUNCTIONS[_REDUCTIONS[op]], [x], axes, [x.dtype], keepdims=keep, name=op)
    after = {"Mean": functions.DIV, "EuclideanNorm": functions.SQRT}.get(op)
    return [out if after is None else composites.apply(c.b, after, out)]


@lowers("ArgMax", "ArgMin")
def _arg(c: TfCall) -> Sequence[TfValue]:
    x = c.x()
    axis = c.axis(1, len(x.shape)) if len(c.ins) > 1 else 0
    dtype = c.type("output_type") if "output_type" in c.node.attr else "int64"
    return nests.reduce(
        c.b, FUNCTIONS[c.node.op.lower()], [x], [axis], [dtype], combines=False, name=c.node.op
    )


@lowers("L2Loss")
def _l2(c: TfCall) -> Sequence[TfValue]:
    x = c.x()
    return nests.reduce(
        c.b,
        functions.SUM,
        [composites.apply(c.b, functions.SQUARE, x, flops=2.0)],
        range(len(x.shape)),
        [x.dtype],
    )


@lowers(
    "FakeQuantWithMinMaxVars",
    "FakeQuantWithMinMaxArgs",
    "QuantizeAndDequantizeV2",
    "QuantizeAndDequantizeV3",
    "QuantizeAndDequantizeV4",
)
def _fake_quant(c: TfCall) -> Sequence[TfValue]:
    """Rounded to a grid whose ends are scalars."""
    x = c.x()
    return nests.elementwise(c.b, FUNCTIONS["fake_quantize"], [x], [x.dtype], name=c.node.op)


@lowers("RandomUniform", "RandomStandardNormal", "TruncatedNormal", "RandomUniformInt", "StatelessRandomUniform",
        "StatelessRandomUniformV2", "StatelessRandomNormal", "StatelessRandomNormalV2", "StatelessTruncatedNormal",
        "StatelessTruncatedNormalV2", "StatelessRandomUniformInt", "StatelessRandomUniformIntV2",
        "StatelessRandomUniformFullInt", "StatelessRandomUniformFullIntV2")  # fmt: skip
def _random(c: TfCall) -> Sequence[TfValue]:
    """Made where it is used; the key, a few integers, is on every device."""
    shape = c.make(c.numbers(0, "shape"))
    dtype = c.type("dtype", "Tout") if {"dtype", "Tout"} & set(c.node.attr) else "float32"
    keys = [c.x(i) for i, v in enumerate(c.ins) if i and isinstance(v, Tensor)]
    return [nests.generate(c.b, functions.RANDOM, shape, dtype, keys, name=c.node.op)]


@lowers(
    "StatelessRandomGetKeyCounter",
    "StatelessRandomGetKey",
    "StatelessRandomGetAlg",
    "StatelessRandomGetKeyCounterAlg",
    "RngReadAndSkip",
)
def _key(c: TfCall) -> Sequence[TfValue]:
    """Arithmetic on random keys: a few integers, on every device alike."""
    if c.node.op == "StatelessRandomGetAlg":
        return [StaticValue(np.array(1, np.int32))]
    outs = {
        "StatelessRandomGetKeyCounter": [(1,), (2,)],
        "StatelessRandomGetKey": [(1,)],
        "RngReadAndSkip": [(3,)],
    }
    shapes = outs.get(c.node.op, [(1,), (2,), ()])
    dtypes = ["int64" if c.node.op == "RngReadAndSkip" else "key", "key", "int32"]
    return opaque(c, list(zip(shapes, dtypes, strict=False)), differentiable=False)
