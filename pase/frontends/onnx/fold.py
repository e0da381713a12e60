"""Evaluates small values while lowering: Shape, Gather, Concat, Reshape and other ops that compute sizes from sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from pase.frontends.common.values import Value, known
from pase.frontends.onnx.values import MOST_KNOWN, OnnxCall
from pase.registry import Registry

__all__ = ["FOLDS", "fold"]

OnnxFold = Callable[[OnnxCall, list[np.ndarray]], np.ndarray | list[np.ndarray] | None]
FOLDS: Registry[OnnxFold] = Registry("rule for small values of ONNX op")
_folds = FOLDS.register

_BINARY: dict[str, Callable[..., np.ndarray]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Pow": np.power,
    "Equal": np.equal,
    "Less": np.less,
    "Greater": np.greater,
    "LessOrEqual": np.less_equal,
    "GreaterOrEqual": np.greater_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
}
_UNARY: dict[str, Callable[..., np.ndarray]] = {
    "Neg": np.negative,
    "Abs": np.abs,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Round": np.round,
    "Sqrt": np.sqrt,
    "Exp": np.exp,
    "Log": np.log,
    "Sign": np.sign,
    "Not": np.logical_not,
    "Cos": np.cos,
    "Sin": np.sin,
    "Reciprocal": np.reciprocal,
    "Identity": lambda a: a,
    "IsNaN": np.isnan,
    "IsInf": np.isinf,
}
_VARIADIC: dict[str, Callable[..., np.ndarray]] = {"Max": np.maximum, "Min": np.minimum, "Sum": np.add}
_REDUCE: dict[str, Callable[..., np.ndarray]] = {
    "ReduceProd": np.prod,
    "ReduceSum": np.sum,
    "ReduceMax": np.max,
    "ReduceMin": np.min,
    "ReduceMean": np.mean,
}


_VIEWS = ("Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
"""Ops whose result is a weight if their operand is a weight, even if the contents of the weight are known."""


class _Unfit(Exception):
    """The result is not folded: it is too large, or the op's own rule must handle it."""


def fold(c: OnnxCall) -> list[Value] | None:
    """The node's results if its inputs are known and the op can be folded, else None."""
    if c.op not in FOLDS or not c.ins or (c.op in _VIEWS and c.x().weight):
        return None
    arrays = []
    for v in c.ins:
        data = None if v is None else v.known
        if v is not None and data is None:
            return None
        arrays.append(np.zeros(0, np.int64) if data is None else data)
    try:
        with np.errstate(all="ignore"):
            out = FOLDS[c.op](c, arrays)
    except (_Unfit, ValueError, IndexError, TypeError, OverflowError, ZeroDivisionError):
        return None  # the op's own rule reports what is wrong
    made = out if isinstance(out, list) else [np.asarray(out)]
    if any(np.size(a) > MOST_KNOWN for a in made):
        return None
    return [known(a) for a in made]


def _small(*extents: int) -> None:
    """Raises _Unfit if a shape is too large to be evaluated."""
    if any(e < 0 for e in extents) or math.prod(extents) > MOST_KNOWN:
        raise _Unfit


@_folds("Div")
def _div(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    x, y = a
    if x.dtype.kind == "f":
        return x / y
    if (y == 0).any():
        raise _Unfit
    return (np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))).astype(x.dtype)  # rounds towards zero


@_folds("Mod")
def _mod(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    if (a[1] == 0).any():
        raise _Unfit
    return np.fmod(a[0], a[1]) if c.integer("fmod") else np.mod(a[0], a[1])


@_folds("Cast", "CastLike")
def _cast(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    dtype = c.dtype("to", "") if c.op == "Cast" else str(a[1].dtype)
    if dtype in ("", "string"):
        raise _Unfit
    return a[0].astype(np.dtype(dtype))


@_folds("Gather")
def _gather(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    _small(a[1].size, *a[0].shape[1:])
    return np.take(a[0], a[1], axis=c.axis(c.integer("axis"), a[0].ndim))


def axes_of(c: OnnxCall, rank: int, i: int = 1) -> list[int] | None:
    """Axes from an attribute (older opsets) or from input i; None if there are none."""
    given = c.ints("axes")
    if given is None and c.opt(i) is not None:
        given = c.ints_of(i, "axes")
    return None if given is None else c.axes(given, rank)


@_folds(*_REDUCE)
def _reduce(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    axes = axes_of(c, a[0].ndim)
    if not axes and c.integer("noop_with_empty_axes"):
        return a[0]
    axis = tuple(axes) if axes else None
    return np.asarray(_REDUCE[c.op](a[0], axis=axis, keepdims=bool(c.integer("keepdims", 1)))).astype(
        a[0].dtype
    )


@_folds("Slice")
def _slice(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    x = a[0]
    starts, ends, axes, steps = slice_arguments(c, x.ndim)
    index = [slice(None)] * x.ndim
    for s, e, i, t in zip(starts, ends, axes, steps, strict=True):
        index[i] = slice(*slice_bounds(s, e, t, x.shape[i]))
    return x[tuple(index)]


def slice_arguments(c: OnnxCall, rank: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """(starts, ends, axes, steps) of a Slice, from attributes or inputs, depending on its opset."""
    if c.has("starts"):
        starts, ends = c.ints("starts") or [], c.ints("ends") or []
        axes, steps = c.ints("axes"), None
    else:
        starts, ends = c.ints_of(1, "starts"), c.ints_of(2, "ends")
        axes = c.ints_of(3, "axes") if c.opt(3) is not None else None
        steps = c.ints_of(4, "steps") if c.opt(4) is not None else None
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise c.fail("its starts, ends, axes and steps differ in length, or a step is 0")
    return starts, ends, c.axes(axes, rank), steps


def slice_bounds(start: int, end: int, step: int, size: int) -> tuple[int, int | None, int]:
    """(start, end, step) for Python's slice. A negative end, which means "before the first element", becomes None.

    A start before the first element is the first element in either direction, as the specification of Slice says and
    onnxruntime does. (Python's slices are empty there if the step is negative.)
    """
    start, end, step = slice(start, end, step).indices(size)
    return max(start, 0), None if end < 0 else end, step


@_folds("Squeeze")
def _squeeze(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    axes = axes_of(c, a[0].ndim)
    return np.squeeze(a[0], None if axes is None else tuple(axes))


@_folds("Unsqueeze")
def _unsqueeze(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    given = c.ints("axes") or c.ints_of(1, "axes")
    return np.expand_dims(a[0], tuple(c.axes(given, a[0].ndim + len(given))))


@_folds("Reshape")
def _reshape(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    return a[0].reshape(reshaped(c, a[0].shape))


def reshaped(c: OnnxCall, shape: Sequence[int]) -> list[int]:
    """The target shape of a Reshape: 0 keeps a dim (unless allowzero is set), and -1 takes the remaining elements."""
    target = c.ints("shape")
    if target is None:
        target = c.ints_of(1, "shape")
    out = []
    for i, t in enumerate(target):
        if t == 0 and not c.integer("allowzero"):
            if i >= len(shape):
                raise c.fail(f"its shape {target[:8]} keeps dim {i}, but the tensor has {len(shape)} dims")
            t = shape[i]
        out.append(t)
    if out.count(-1) > 1 or any(t < -1 for t in out):
        raise c.fail(f"its shape {target[:8]} is not valid")
    if -1 in out:
        rest = math.prod(t for t in out if t != -1)
        total = math.prod(shape)
        if rest == 0 or total % rest:
            raise c.fail(f"{list(shape)} cannot be reshaped to {target[:8]}: the number of elements differs")
        out[out.index(-1)] = total // rest
    return out


@_folds("Range")
def _range(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    start, limit, delta = (x.reshape(()) for x in a[:3])
    n = max(math.ceil((float(limit) - float(start)) / float(delta)), 0)
    _small(n)
    return np.arange(n, dtype=start.dtype) * delta + start


@_folds("Expand")
def _expand(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    shape = np.broadcast_shapes(a[0].shape, tuple(int(n) for n in a[1]))
    _small(*shape)
    return np.broadcast_to(a[0], shape)


@_folds("Tile")
def _tile(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    _small(*(int(s) * int(r) for s, r in zip(a[0].shape, a[1], strict=True)))
    return np.tile(a[0], a[1])


@_folds("Split")
def _split(c: OnnxCall, a: list[np.ndarray]) -> list[np.ndarray]:
    axis = c.axis(c.integer("axis"), a[0].ndim)
    cuts = np.cumsum(split_sizes(c, a[0].shape[axis]))[:-1]
    return np.split(a[0], cuts, axis)


def split_sizes(c: OnnxCall, size: int) -> list[int]:
    """The size of each part of a Split."""
    given = c.ints("split")
    if given is None and c.opt(1) is not None:
        given = c.ints_of(1, "split")
    if given is None:
        n = c.integer("num_outputs", len(c.node.output))
        if n < 1 or n != len(c.node.output):
            raise c.fail(f"it makes {n} parts, but has {len(c.node.output)} outputs")
        part = -(-size // n)
        given = [part] * (n - 1) + [size - part * (n - 1)]
    if sum(given) != size or any(g < 0 for g in given) or len(given) != len(c.node.output):
        raise c.fail(
            f"its parts {given[:8]} do not match a dim of {size} elements and {len(c.node.output)} outputs"
        )
    return given


@_folds("Concat")
def _concat(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    _small(sum(x.size for x in a))
    return np.concatenate(a, c.axis(c.integer("axis", 1), a[0].ndim))


@_folds("Where")
def _where(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    _small(*np.broadcast_shapes(*(x.shape for x in a)))
    return np.where(*a)


@_folds("Transpose")
def _transpose(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    return np.transpose(a[0], c.ints("perm"))


@_folds("NonZero")
def _nonzero(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    return np.array(np.nonzero(a[0]), np.int64)


@_folds("CumSum")
def _cumsum(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    return np.cumsum(a[0], int(a[1].reshape(())), dtype=a[0].dtype)


def _broadcasts(f: Callable[..., np.ndarray]) -> OnnxFold:
    def out(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
        _small(*np.broadcast_shapes(*(x.shape for x in a)))
        if c.has("axis") or c.integer("broadcast"):  # opsets before 7 have other rules for broadcasting
            raise _Unfit
        made = a[0]
        for x in a[1:]:
            made = np.asarray(f(made, x))
        return made

    return out


for _op, _f in (_BINARY | _VARIADIC).items():
    FOLDS.add(_op, _broadcasts(_f))
for _op, _f in _UNARY.items():
    FOLDS.add(_op, lambda c, a, f=_f: np.asarray(f(a[0])))  # type: ignore[misc]
