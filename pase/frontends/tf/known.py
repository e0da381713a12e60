"""Evaluates small values that a TensorFlow graph determines without data: arithmetic on shapes, axes and counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy import ndarray as Array

from pase.errors import PaseError
from pase.frontends.common import folding
from pase.frontends.common.folding import FoldedArrays
from pase.frontends.tf.graph import TfNode, dtype_name
from pase.frontends.tf.rules import function_of
from pase.frontends.tf.slices import positions
from pase.registry import Registry

if TYPE_CHECKING:
    from onnx import TensorProto


__all__ = ["KNOWN", "constant", "evaluate", "numpy_dtype"]

TfFold = Callable[..., FoldedArrays]
"""A function of a node and the values of its operands that returns the node's results."""

KNOWN: Registry[TfFold] = Registry("rule for small values of TensorFlow op")
_rule = KNOWN.register

_ELEMENTWISE = {
    "TruncateDiv": "div",
    "Mod": "rem",
    "AddN": "add",
}
"""Ops whose function in the graph only has their cost -> what they compute (``folding.ELEMENTWISE``)."""


def evaluate(node: TfNode, arrays: Sequence[Array]) -> list[Array] | None:
    """The results of a node on known operands; None if the op has no rule here, or a result is too large."""
    if (rule := KNOWN.get(node.op)) is not None:
        return folding.folded(rule, node, *arrays)
    exact = function_of(node.op)
    function = _ELEMENTWISE.get(node.op) or (exact.name if exact is not None else "")
    return folding.folded(folding.elementwise, function, *arrays) if function in folding.ELEMENTWISE else None


def constant(node: TfNode, proto: TensorProto, shape: Sequence[int]) -> Array | None:
    """The value of a small Const; None if it holds no numbers."""
    from tensorflow.python.framework import tensor_util

    if dtype_name(proto.dtype) in ("string", "resource", "variant"):
        return None
    try:
        a = np.asarray(tensor_util.MakeNdarray(proto))
    except (ValueError, TypeError, IndexError, OverflowError, AttributeError) as e:
        raise PaseError(
            f"its value cannot be read: {e}", where=f"TensorFlow op 'Const' at {node.name}"
        ) from e
    if a.shape != tuple(shape):
        raise PaseError(
            f"its value has shape {a.shape}, but its declared shape is {tuple(shape)}",
            where=f"TensorFlow op 'Const' at {node.name}",
        )
    return a


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a name. Names that numpy does not know (bfloat16) are looked up in TensorFlow."""
    try:
        return np.dtype(name)
    except TypeError:
        import tensorflow as tf

        return np.dtype(tf.dtypes.as_dtype(name).as_numpy_dtype)


@_rule("ZerosLike", "OnesLike")
def _like(node: TfNode, a: Array) -> FoldedArrays:
    return np.full_like(a, node.op == "OnesLike")


@_rule("InvertPermutation")
def _inverse(node: TfNode, a: Array) -> FoldedArrays:
    return np.argsort(a).astype(a.dtype)


@_rule("ClipByValue")
def _clip(node: TfNode, a: Array, low: Array, high: Array) -> FoldedArrays:
    return np.clip(a, low, high)


@_rule("IdentityN", "ShapeN")
def _each_result(node: TfNode, *a: Array) -> list[Array]:
    return list(a) if node.op == "IdentityN" else [np.array(x.shape, _out_type(node)) for x in a]


def _out_type(node: TfNode, key: str = "out_type") -> np.dtype:
    return numpy_dtype(dtype_name(node.attr[key].type)) if key in node.attr else np.dtype("int32")


@_rule("Shape")
def _shape(node: TfNode, a: Array) -> FoldedArrays:
    return np.array(a.shape, _out_type(node))


@_rule("Size")
def _size(node: TfNode, a: Array) -> FoldedArrays:
    return np.array(a.size, _out_type(node))


@_rule("Rank")
def _rank(node: TfNode, a: Array) -> FoldedArrays:
    return np.array(a.ndim, np.int32)


@_rule("Cast")
def _cast(node: TfNode, a: Array) -> FoldedArrays:
    return a.astype(_out_type(node, "DstT"))


@_rule("Pack")
def _pack(node: TfNode, *a: Array) -> FoldedArrays:
    return np.stack(a, int(node.attr["axis"].i) if "axis" in node.attr else 0)


@_rule("Unpack")
def _unpack(node: TfNode, a: Array) -> FoldedArrays:
    axis = int(node.attr["axis"].i) if "axis" in node.attr else 0
    return [np.take(a, k, axis) for k in range(a.shape[axis])]


@_rule("ConcatV2")
def _concat_v2(node: TfNode, *a: Array) -> FoldedArrays:
    return np.concatenate(a[:-1], int(a[-1]))


@_rule("Concat")
def _concat(node: TfNode, *a: Array) -> FoldedArrays:
    return np.concatenate(a[1:], int(a[0]))


@_rule("ExpandDims")
def _expand(node: TfNode, a: Array, axis: Array) -> FoldedArrays:
    return np.expand_dims(a, int(axis.reshape(())))


@_rule("Squeeze")
def _squeeze(node: TfNode, a: Array) -> FoldedArrays:
    axes = tuple(int(i) for i in node.attr["squeeze_dims"].list.i) if "squeeze_dims" in node.attr else ()
    return np.squeeze(a, axes or None)


@_rule("Reshape")
def _reshape(node: TfNode, a: Array, shape: Array) -> FoldedArrays:
    return a.reshape([int(s) for s in shape])


@_rule("Transpose")
def _transpose(node: TfNode, a: Array, perm: Array) -> FoldedArrays:
    return a.transpose([int(p) for p in perm])


@_rule("Fill")
def _fill(node: TfNode, dims: Array, value: Array) -> FoldedArrays:
    return folding.expand(value, dims)


@_rule("Range")
def _range(node: TfNode, start: Array, limit: Array, delta: Array) -> FoldedArrays:
    return folding.arange(start, limit, delta)


@_rule("Tile")
def _tile(node: TfNode, a: Array, times: Array) -> FoldedArrays:
    return folding.repeated(a, times)


@_rule("BroadcastTo")
def _broadcast_to(node: TfNode, a: Array, shape: Array) -> FoldedArrays:
    return folding.expand(a, shape)


@_rule("BroadcastArgs")
def _broadcast_args(node: TfNode, a: Array, b: Array) -> FoldedArrays:
    return np.array(np.broadcast_shapes(tuple(map(int, a)), tuple(map(int, b))), a.dtype)


@_rule("Sum", "Prod", "Max", "Min", "Mean", "All", "Any")
def _reduce(node: TfNode, a: Array, axes: Array) -> FoldedArrays:
    keep = bool(node.attr["keep_dims"].b) if "keep_dims" in node.attr else False
    return folding.reduced(node.op.lower(), a, [int(i) for i in axes.reshape(-1)], keep)


@_rule("StridedSlice")
def _strided_slice(node: TfNode, a: Array, begin: Array, end: Array, strides: Array) -> FoldedArrays:
    picks = positions(node, a.shape, begin, end, strides)
    index = tuple(
        slice(None) if p is None else (p.picked[0] if p.shrink else np.array(list(p.picked), np.int64))
        for p in picks
        if p is None or not p.fresh
    )
    out, at = a, 0
    for k in index:  # one dim at a time, because numpy would pair several index arrays
        out = out[(slice(None),) * at + (k,)]
        at += not isinstance(k, int)
    at = 0
    for p in picks:
        if p is not None and p.fresh:
            out = np.expand_dims(out, at)
        at += p is None or p.fresh or not p.shrink
    return out


@_rule("Slice")
def _slice(node: TfNode, a: Array, begin: Array, size: Array) -> FoldedArrays:
    spans = zip(a.shape, begin, size, strict=True)
    return a[tuple(slice(int(b), n if s < 0 else int(b + s)) for n, b, s in spans)]


@_rule("GatherV2", "Gather")
def _gather(node: TfNode, a: Array, ids: Array, axis: Array | None = None) -> FoldedArrays:
    if int(node.attr["batch_dims"].i if "batch_dims" in node.attr else 0):
        return None
    return np.take(a, ids, 0 if axis is None else int(axis))


@_rule("Split", "SplitV")
def _split(node: TfNode, *a: Array) -> FoldedArrays:
    if node.op == "Split":
        return list(np.split(a[1], int(node.attr["num_split"].i), int(a[0])))
    sizes = [int(s) for s in a[1]]
    return list(np.split(a[0], np.cumsum(sizes)[:-1], int(a[2]))) if -1 not in sizes else None


@_rule("ListDiff")
def _list_diff(node: TfNode, x: Array, y: Array) -> FoldedArrays:
    kept = ~np.isin(x, y)
    return [x[kept], np.flatnonzero(kept).astype(np.int32)]


@_rule("MatrixBandPart")
def _band(node: TfNode, a: Array, lower: Array, upper: Array) -> FoldedArrays:
    i, j = np.indices(a.shape[-2:])
    keep = ((lower < 0) | (i - j <= lower)) & ((upper < 0) | (j - i <= upper))
    return np.where(keep, a, np.zeros((), a.dtype))


@_rule("ReverseV2")
def _reverse(node: TfNode, a: Array, axes: Array) -> FoldedArrays:
    return np.flip(a, tuple(int(i) for i in axes))


@_rule("ArgMax", "ArgMin")
def _arg(node: TfNode, a: Array, axis: Array) -> FoldedArrays:
    f = np.argmax if node.op == "ArgMax" else np.argmin
    return f(a, axis=int(axis)).astype(_out_type(node, "output_type"))
