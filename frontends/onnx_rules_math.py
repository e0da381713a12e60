"""ONNX: matrix products, convolutions, reductions, softmax and losses."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pase.frontends.onnx_fold import axes_of
from pase.frontends.onnx_rules import lowers, nothing
from pase.frontends.onnx_values import Call, Value
from pase.ir import functions
from pase.ir.functions import FUNCTIONS
from pase.ops import composites, nests

__all__ = ["matmul"]


def matmul(c: Call, x: Value, y: Value, dtype: str | None = None) -> Value:
    """numpy's matmul: the last two dims multiply, those before are batch dims and broadcast."""
    if not x.shape or not y.shape:
        raise c.fail("a product of numbers that are no tensors")
    a = c.reshape(x, (1, *x.shape)) if len(x.shape) == 1 else x
    b = c.reshape(y, (*y.shape, 1)) if len(y.shape) == 1 else y
    if a.shape[-1] != b.shape[-2]:
        raise c.fail(f"{list(x.shape)} times {list(y.shape)}: {a.shape[-1]} columns meet {b.shape[-2]} rows")
    lead = c.broadcast(a.shape[:-2], b.shape[:-2])
    full = c.shape((*lead, a.shape[-2], b.shape[-1]))
    out = list(full)
    if len(y.shape) == 1:
        out.pop(-1)
    if len(x.shape) == 1:
        out.pop(-1 if len(y.shape) == 1 else -2)
    if math.prod(full) == 0 or a.elements == 0:
        return nothing(out, dtype or x.dtype)
    # Dims of one element and missing ones are dropped: what is left is batch (in both) or free (in one).
    if len(y.shape) == 2 and len(x.shape) == 2 and (whole := c.unmerged(x)) is not x:
        made = matmul(c, whole, y, dtype)
        return c.reshape(made, out)
    batch_a: list[int] = []
    batch_b: list[int] = []
    only_a: list[int] = []
    only_b: list[int] = []
    for i in range(len(lead)):
        ia, ib = i - len(lead) + len(a.shape) - 2, i - len(lead) + len(b.shape) - 2
        in_a, in_b = ia >= 0 and a.shape[ia] != 1, ib >= 0 and b.shape[ib] != 1
        if in_a and in_b:
            batch_a.append(ia)
            batch_b.append(ib)
        elif in_a:
            only_a.append(i)
        elif in_b:
            only_b.append(i)
    ones_a = [i for i in range(len(a.shape) - 2) if a.shape[i] == 1]
    ones_b = [i for i in range(len(b.shape) - 2) if b.shape[i] == 1]
    kept_a = [i for i in range(len(a.shape)) if i not in ones_a]
    kept_b = [i for i in range(len(b.shape)) if i not in ones_b]
    a = c.reshape(a, [a.shape[i] for i in kept_a])
    b = c.reshape(b, [b.shape[i] for i in kept_b])
    shared = [i for i, n in enumerate(lead) if n != 1 and i not in only_a and i not in only_b]
    product = nests.contract(
        c.b,
        c.tensor(a),
        c.tensor(b),
        ([len(a.shape) - 1], [len(b.shape) - 2]),
        ([kept_a.index(i) for i in batch_a], [kept_b.index(i) for i in batch_b]),
        dtype,
    )
    made = c.value(product)
    # It stands as: shared batch, a's own batch, rows, b's own batch, columns.
    stands = [*shared, *only_a, "m", *only_b, "n"]
    wanted = [i for i, n in enumerate(lead) if n != 1] + ["m", "n"]
    made = c.transpose(made, [stands.index(w) for w in wanted])
    return c.reshape(made, out)


@lowers("MatMul", "MatMulInteger")
def _matmul(c: Call) -> Value:
    return matmul(c, c.x(0), c.x(1), "int32" if c.op == "MatMulInteger" else None)


@lowers("QLinearMatMul")
def _qlinear_matmul(c: Call) -> Value:
    zero = c.x(7)
    return c.elementwise([matmul(c, c.x(0), c.x(3), "int32")], functions.QUANTIZE, dtype=zero.dtype)


@lowers("com.microsoft:FusedMatMul", "com.microsoft:TransposeMatMul")
def _fused_matmul(c: Call) -> Value:
    def turned(v: Value, flag: str) -> Value:
        order = list(range(len(v.shape)))
        if c.integer(flag) and len(order) > 1:
            order[-2:] = order[:-3:-1]
        return c.transpose(v, order)

    out = matmul(c, turned(c.x(0), "transA"), turned(c.x(1), "transB"))
    return c.elementwise([out], functions.MUL) if c.real("alpha", 1.0) != 1.0 else out


@lowers("Gemm")
def _gemm(c: Call) -> Value:
    x, y = c.x(0), c.x(1)
    if len(x.shape) != 2 or len(y.shape) != 2:
        raise c.fail(f"{list(x.shape)} times {list(y.shape)}: both must be matrices")
    ka, kb = (0 if c.integer("transA") else 1), (1 if c.integer("transB") else 0)
    if x.shape[ka] != y.shape[kb]:
        raise c.fail(f"{list(x.shape)} times {list(y.shape)}: {x.shape[ka]} columns meet {y.shape[kb]} rows")
    bias = c.opt(2) if c.real("beta", 1.0) != 0.0 else None
    shape = c.shape((x.shape[1 - ka], y.shape[1 - kb]))
    if bias is not None and c.broadcast(shape, bias.shape) != shape:
        raise c.fail(f"a bias of shape {list(bias.shape)} on a product of shape {list(shape)}")
    if ka == 1 and (bias is None or math.prod(bias.shape[:-1]) == 1):
        x = c.unmerged(x)
    out = c.value(nests.contract(c.b, c.tensor(x), c.tensor(y), ([len(x.shape) - 1 if ka else 0], [kb])))
    if c.real("alpha", 1.0) != 1.0:
        out = c.elementwise([out], functions.MUL)
    if bias is not None:
        bias = c.reshape(bias, bias.shape[-1:]) if math.prod(bias.shape[:-1]) == 1 else bias
        out = c.elementwise([out, bias], functions.ADD, flops=1.0 if c.real("beta", 1.0) == 1.0 else 2.0)
    return c.reshape(out, shape)


@lowers("Einsum")
def _einsum(c: Call) -> Value:
    """Operands are contracted from the left; what no later operand and no result has is summed on the way."""
    text = c.text("equation").replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    values = [c.x(i) for i in range(len(c.ins))]
    if len(terms) != len(values) or len(text) > 400:
        raise c.fail(f"equation '{text[:60]}' for {len(values)} operands")
    names: list[list[str]] = []
    dots = 0
    for t, v in zip(terms, values, strict=True):
        letters = t.replace("...", "")
        n = len(v.shape) - len(letters) if "..." in t else 0
        if (not letters.isalpha() and letters) or n < 0 or len(letters) + n != len(v.shape):
            raise c.fail(f"equation '{text[:60]}' does not fit shape {list(v.shape)}")
        dots = max(dots, n)
        front, _, tail = t.partition("...")
        names.append([*front, *([f".{i}" for i in range(-n, 0)] if "..." in t else []), *tail])
    every = [x for t in names for x in t]
    spread = [f".{i}" for i in range(-dots, 0)]
    if arrow:
        before, ellipsis, behind = right.partition("...")
        out = [*before, *(spread if ellipsis else []), *behind]
    else:
        out = [*spread, *sorted(x for x in set(every) if every.count(x) == 1 and x not in spread)]
    if len(set(out)) != len(out) or any(x not in every for x in out):
        raise c.fail(f"equation '{text[:60]}' has a result that its operands do not make")
    sizes: dict[str, int] = {}
    for letters_of, v in zip(names, values, strict=True):
        for x, s in zip(letters_of, v.shape, strict=True):
            if sizes.setdefault(x, s) not in (s, 1) and s != 1:
                raise c.fail(f"equation '{text[:60]}': dim '{x}' is {sizes[x]} and {s}")
            sizes[x] = max(sizes[x], s)
    shape = c.shape([sizes[x] for x in out])
    if math.prod(sizes.values()) == 0:
        return nothing(shape, values[0].dtype)
    if any(len(set(t)) != len(t) for t in names):  # a diagonal
        work = 2.0 * math.prod(float(s) for s in sizes.values())
        (t_out,) = nests.opaque(c.b, "einsum", c.tensors(*values), [(shape, values[0].dtype)], flops=work)
        return c.value(t_out)
    have, value = _drop_ones(c, names[0], values[0])
    for k in range(1, len(values)):
        later = {*out, *(x for t in names[k + 1 :] for x in t)}
        more, other = _drop_ones(c, names[k], values[k])
        have, value = _sum_out(c, have, value, {*later, *more})
        more, other = _sum_out(c, more, other, {*later, *have})
        both = [x for x in have if x in more]
        summed = [x for x in both if x not in later]
        batch = [x for x in both if x in later]
        made = nests.contract(
            c.b,
            c.tensor(value),
            c.tensor(other),
            ([have.index(x) for x in summed], [more.index(x) for x in summed]),
            ([have.index(x) for x in batch], [more.index(x) for x in batch]),
        )
        have = [*batch, *(x for x in have if x not in both), *(x for x in more if x not in both)]
        value = c.value(made)
    have, value = _sum_out(c, have, value, set(out))
    here = [x for x in out if x in have]
    value = c.transpose(value, [have.index(x) for x in here])
    return c.reshape(value, shape)


def _drop_ones(c: Call, names: list[str], v: Value) -> tuple[list[str], Value]:
    kept = [x for x, s in zip(names, v.shape, strict=True) if s != 1]
    return kept, c.reshape(v, [s for s in v.shape if s != 1])


def _sum_out(c: Call, names: list[str], v: Value, wanted: set[str]) -> tuple[list[str], Value]:
    axes = [i for i, x in enumerate(names) if x not in wanted]
    if not axes:
        return names, v
    (out,) = nests.reduce(c.b, functions.SUM, [c.tensor(v)], axes, [v.dtype])
    return [x for x in names if x in wanted], c.value(out)


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
"""op -> the functions of each element, over the dims, and of what comes out."""


@lowers(*_REDUCE)
def _reduce(c: Call) -> Value:
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
    return made if after is None else c.elementwise([made], FUNCTIONS[after])


@lowers("ArgMax", "ArgMin")
def _arg(c: Call) -> Value:
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


def _softmax_axes(c: Call, x: Value) -> list[int]:
    """Before opset 13: over all dims from ``axis`` on, taken as one."""
    if c.version >= 13:
        return [c.axis(c.integer("axis", -1), len(x.shape))]
    axis = c.integer("axis", 1)
    if axis == len(x.shape):
        return []
    return list(range(c.axis(axis, len(x.shape)), len(x.shape)))


@lowers("Softmax", "LogSoftmax", "Hardmax")
def _softmax(c: Call) -> Value:
    x = c.x()
    axes = _softmax_axes(c, x) if x.shape else []
    if c.op == "Hardmax":
        (top,) = nests.reduce(
            c.b, FUNCTIONS["argmax"], [c.tensor(x)], axes, [x.dtype], keepdims=True, combines=False
        )
        return c.elementwise([x, c.value(top)], functions.STOP_GRADIENT)
    make = composites.softmax if c.op == "Softmax" else composites.log_softmax
    return c.value(make(c.b, c.tensor(x), axes))


@lowers("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def _loss(c: Call) -> Sequence[Value | None]:
    """Scores [n c ...] and labels [n ...]; classes are moved last, where a lookup wants them."""
    x, labels = c.x(0), c.x(1)
    rank = len(x.shape)
    if rank < 2 or labels.shape != (x.shape[0], *x.shape[2:]):
        raise c.fail(f"scores {list(x.shape)} and labels {list(labels.shape)} do not fit together")
    logp = x
    if c.op == "SoftmaxCrossEntropyLoss":
        logp = c.value(composites.log_softmax(c.b, c.tensor(x), [1]))
    last = c.transpose(logp, [0, *range(2, rank), 1])
    losses = c.value(composites.cross_entropy(c.b, c.tensor(last), c.tensor(labels)))
    if (weights := c.opt(2)) is not None:  # a weight for each class, looked up like the label
        losses = c.elementwise([losses], functions.MUL) if weights.elements else losses
    how = c.text("reduction", "mean")
    if how != "none":
        (total,) = nests.reduce(c.b, functions.SUM, [c.tensor(losses)], range(len(losses.shape)), [x.dtype])
        losses = c.value(total)
        if how == "mean":
            losses = c.elementwise([losses], functions.DIV)
    return [losses, logp]
