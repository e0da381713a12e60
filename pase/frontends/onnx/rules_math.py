"""Rules for ONNX's matrix products, reductions, softmax and losses."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pase.frontends.common.products import einsum, matmul
from pase.frontends.common.values import Value
from pase.frontends.onnx.fold import axes_of
from pase.frontends.onnx.rules import lowers, nothing
from pase.frontends.onnx.values import OnnxCall
from pase.ir import functions
from pase.ir.functions import FUNCTIONS
from pase.ops import composites, nests

__all__: list[str] = []


@lowers("MatMul", "MatMulInteger")
def _matmul(c: OnnxCall) -> Value:
    with c.b.undetermined(unless=c.opt(2) is None and c.opt(3) is None):  # zero points
        return matmul(c, c.x(0), c.x(1), "int32" if c.op == "MatMulInteger" else None)


@lowers("QLinearMatMul")
def _qlinear_matmul(c: OnnxCall) -> Value:
    zero = c.x(7)
    with c.b.undetermined():  # scales and zero points
        out = matmul(c, c.x(0), c.x(3), "int32")
    return c.elementwise([out], functions.QUANTIZE, dtype=zero.dtype)


@lowers("com.microsoft:FusedMatMul", "com.microsoft:TransposeMatMul")
def _fused_matmul(c: OnnxCall) -> Value:
    def turned(v: Value, flag: str) -> Value:
        order = list(range(len(v.shape)))
        if c.integer(flag) and len(order) > 1:
            order[-2:] = order[:-3:-1]
        return c.transpose(v, order)

    out = matmul(c, turned(c.x(0), "transA"), turned(c.x(1), "transB"))
    alpha = c.real("alpha", 1.0)
    return c.elementwise([out, alpha], functions.MUL) if alpha != 1.0 else out


@lowers("Gemm")
def _gemm(c: OnnxCall) -> Value:
    x, y = c.x(0), c.x(1)
    if len(x.shape) != 2 or len(y.shape) != 2:
        raise c.fail(f"its operands {list(x.shape)} and {list(y.shape)} must be matrices")
    ka, kb = (0 if c.integer("transA") else 1), (1 if c.integer("transB") else 0)
    if x.shape[ka] != y.shape[kb]:
        raise c.fail(
            f"it multiplies {list(x.shape)} by {list(y.shape)}, but {x.shape[ka]} columns do not match "
            f"{y.shape[kb]} rows"
        )
    bias = c.opt(2) if c.real("beta", 1.0) != 0.0 else None
    shape = c.shape((x.shape[1 - ka], y.shape[1 - kb]))
    if bias is not None and c.broadcast(shape, bias.shape) != shape:
        raise c.fail(
            f"its bias has shape {list(bias.shape)}, which does not fit a product of shape {list(shape)}"
        )
    if ka == 1 and (bias is None or math.prod(bias.shape[:-1]) == 1):
        x = c.unmerged(x)
    out = c.value(nests.contract(c.b, c.tensor(x), c.tensor(y), ([len(x.shape) - 1 if ka else 0], [kb])))
    if c.real("alpha", 1.0) != 1.0:
        out = c.elementwise([out, c.real("alpha", 1.0)], functions.MUL)
    if bias is not None:
        bias = c.reshape(bias, bias.shape[-1:]) if math.prod(bias.shape[:-1]) == 1 else bias
        if (beta := c.real("beta", 1.0)) == 1.0:
            out = c.elementwise([out, bias], functions.ADD)
        else:
            out = c.elementwise([out, bias, beta], functions.ADD_SCALED, flops=2.0, name="add")
    return c.reshape(out, shape)


@lowers("Einsum")
def _einsum(c: OnnxCall) -> Value:
    return einsum(c, c.text("equation"), [c.x(i) for i in range(len(c.ins))])


# Reductions.


_REDUCE: dict[str, tuple[str | None, str, str | None]] = {
    "ReduceSum": (None, "reduce_sum", None),
    "ReduceMean": (None, "reduce_sum", "div"),
    "ReduceMax": (None, "reduce_max", None),
    "ReduceMin": (None, "reduce_min", None),
    "ReduceProd": (None, "reduce_prod", None),
    "ReduceL1": ("abs", "reduce_sum", None),
    "ReduceL2": ("square", "reduce_sum", "sqrt"),
    "ReduceSumSquare": ("square", "reduce_sum", None),
    "ReduceLogSum": (None, "reduce_sum", "log"),
    "ReduceLogSumExp": ("exp", "reduce_sum", "log"),
}
"""Op -> (function of each element, function of the reduction, function of its result). None: no function."""


@lowers(*_REDUCE)
def _reduce(c: OnnxCall) -> Value:
    x = c.x()
    rank, (before, over, after) = len(x.shape), _REDUCE[c.op]
    axes = axes_of(c, rank)
    keep = bool(c.integer("keepdims", 1))
    if not axes:
        if c.integer("noop_with_empty_axes"):
            return x
        axes = list(range(rank))
    shape = [1 if i in axes else s for i, s in enumerate(x.shape) if keep or i not in axes]
    if x.elements == 0:
        return nothing(shape, x.dtype)
    if c.op == "ReduceLogSumExp":
        x = c.value(composites.shifted(c.b, c.tensor(x), axes))
    if before is not None:
        x = c.elementwise([x], FUNCTIONS[before])
    (out,) = nests.reduce(c.b, FUNCTIONS[over], [c.tensor(x)], axes, [x.dtype], keepdims=keep)
    made = c.value(out)
    if after is None:
        return made
    count = [math.prod(x.shape[i] for i in axes)] if c.op == "ReduceMean" else []
    more = [None] if c.op == "ReduceLogSumExp" else []  # the maximum, which is not added back
    return c.elementwise([made, *count, *more], FUNCTIONS[after])


@lowers("ArgMax", "ArgMin")
def _arg(c: OnnxCall) -> Value:
    x = c.x()
    axis = c.axis(c.integer("axis"), len(x.shape))
    keep = bool(c.integer("keepdims", 1))
    (out,) = nests.reduce(
        c.b,
        FUNCTIONS[c.op.lower()],
        [c.tensor(x)],
        [axis],
        ["int64"],
        keepdims=keep,
        combines=False,
    )
    return c.value(out)


# Softmax and losses.


def _softmax_axes(c: OnnxCall, x: Value) -> list[int]:
    """The dims that a softmax is over. Before opset 13, these are all dims from ``axis`` on."""
    if c.version >= 13:
        return [c.axis(c.integer("axis", -1), len(x.shape))]
    axis = c.integer("axis", 1)
    if axis == len(x.shape):
        return []
    return list(range(c.axis(axis, len(x.shape)), len(x.shape)))


@lowers("Softmax", "LogSoftmax", "Hardmax")
def _softmax(c: OnnxCall) -> Value:
    x = c.x()
    axes = _softmax_axes(c, x) if x.shape else []
    if c.op == "Hardmax":
        (top,) = nests.reduce(
            c.b, FUNCTIONS["argmax"], [c.tensor(x)], axes, [x.dtype], keepdims=True, combines=False
        )
        return c.elementwise([x, c.value(top), None], functions.STOP_GRADIENT)
    make = composites.softmax if c.op == "Softmax" else composites.log_softmax
    return c.value(make(c.b, c.tensor(x), axes))


@lowers("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def _loss(c: OnnxCall) -> Sequence[Value | None]:
    """The loss of scores [n c ...] for labels [n ...]. Classes are moved to the last dim for the lookup."""
    x, labels = c.x(0), c.x(1)
    rank = len(x.shape)
    if rank < 2 or labels.shape != (x.shape[0], *x.shape[2:]):
        raise c.fail(f"its scores {list(x.shape)} do not fit its labels {list(labels.shape)}")
    logp = x
    if c.op == "SoftmaxCrossEntropyLoss":
        logp = c.value(composites.log_softmax(c.b, c.tensor(x), [1]))
    last = c.transpose(logp, [0, *range(2, rank), 1])
    losses = c.value(composites.cross_entropy(c.b, c.tensor(last), c.tensor(labels)))
    if (weights := c.opt(2)) is not None:  # one weight per class, looked up by the label
        losses = c.elementwise([losses, None], functions.MUL) if weights.elements else losses
    how = c.text("reduction", "mean")
    if how != "none":
        (total,) = nests.reduce(c.b, functions.SUM, [c.tensor(losses)], range(len(losses.shape)), [x.dtype])
        losses = c.value(total)
        if how == "mean":
            plain = weights is None and not c.has("ignore_index")
            losses = c.elementwise([losses, labels.elements if plain else None], functions.DIV)
    return [losses, logp]
