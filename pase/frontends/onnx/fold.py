"""Evaluates small values while lowering: Shape, Gather, Concat, Reshape and other ops that compute sizes from sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from pase.frontends.common import folding
from pase.frontends.common.folding import Unfit, small
from pase.frontends.common.values import Value, known
from pase.frontends.onnx.rules import FUNCTIONS_OF
from pase.frontends.onnx.values import OnnxCall
from pase.registry import Registry

__all__ = ["FOLDS", "fold"]

OnnxFold = Callable[[OnnxCall, list[np.ndarray]], np.ndarray | list[np.ndarray] | None]
FOLDS: Registry[OnnxFold] = Registry("rule for small values of ONNX op")
_folds = FOLDS.register

_VIEWS = ("Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
"""Ops whose result is a weight if their operand is a weight, even if the contents of the weight are known."""


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
    made = folding.folded(FOLDS[c.op], c, arrays)
    return None if made is None else [known(a) for a in made]


@_folds("Mod")
def _mod(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    return folding.elementwise("rem" if c.integer("fmod") else "mod", *a)


@_folds("Cast", "CastLike")
def _cast(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    dtype = c.dtype("to", "") if c.op == "Cast" else str(a[1].dtype)
    if dtype in ("", "string"):
        raise Unfit
    return a[0].astype(np.dtype(dtype))


@_folds("Gather")
def _gather(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    small(a[1].size, *a[0].shape[1:])
    return np.take(a[0], a[1], axis=c.axis(c.integer("axis"), a[0].ndim))


def axes_of(c: OnnxCall, rank: int, i: int = 1) -> list[int] | None:
    """Axes from an attribute (older opsets) or from input i; None if there are none."""
    given = c.ints("axes")
    if given is None and c.opt(i) is not None:
        given = c.ints_of(i, "axes")
    return None if given is None else c.axes(given, rank)


@_folds("ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean")
def _reduce(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    axes = axes_of(c, a[0].ndim)
    if not axes and c.integer("noop_with_empty_axes"):
        return a[0]
    how = c.op.removeprefix("Reduce").lower()
    return folding.reduced(how, a[0], axes or None, bool(c.integer("keepdims", 1)))


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
    return folding.arange(*a[:3])


@_folds("Expand")
def _expand(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    return folding.expand(a[0], np.broadcast_shapes(a[0].shape, tuple(int(n) for n in a[1])))


@_folds("Tile")
def _tile(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    return folding.repeated(a[0], a[1])


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
    small(sum(x.size for x in a))
    return np.concatenate(a, c.axis(c.integer("axis", 1), a[0].ndim))


@_folds("Transpose")
def _transpose(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    return np.transpose(a[0], c.ints("perm"))


@_folds("NonZero")
def _nonzero(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    return np.array(np.nonzero(a[0]), np.int64)


@_folds("CumSum")
def _cumsum(c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    return np.cumsum(a[0], int(a[1].reshape(())), dtype=a[0].dtype)


def _elementwise(function: str, c: OnnxCall, a: list[np.ndarray]) -> np.ndarray:
    if c.has("axis") or c.integer("broadcast"):  # opsets before 7 have other rules for broadcasting
        raise Unfit
    if c.op == "IsInf" and not (c.integer("detect_negative", 1) and c.integer("detect_positive", 1)):
        raise Unfit
    return folding.elementwise(function, *a)


for _op, _function in {**FUNCTIONS_OF, "Identity": "copy", "Where": "where"}.items():
    if _function in folding.ELEMENTWISE and ":" not in _op:
        FOLDS.add(_op, partial(_elementwise, _function))
