"""Translates TensorFlow's ops to Mesh-TensorFlow ops. ``tf_source`` yields them in order, with calls inlined and loops
unrolled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pase.backends.mesh_tf import images, lower
from pase.backends.mesh_tf.lower import MeshTfRules, refuse
from pase.backends.mesh_tf.names import TensorDims, flat
from pase.backends.mesh_tf.program import MeshTfProgram, MeshTfValue, SourceOp
from pase.backends.mesh_tf.tf_source import source_ops
from pase.frontends.tf.rules import function_of
from pase.frontends.tf.slices import positions

__all__ = ["RULES", "source_ops"]


def _reduced(op: SourceOp) -> tuple[Sequence[int], bool]:
    rank = len(op.inputs[0].shape)
    axes = op.inputs[1].value
    if axes is None:
        raise refuse(op, "its axes depend on data")
    return [int(a) % rank for a in axes.reshape(-1)], _flag(op, "keep_dims")


RULES = MeshTfRules(
    file="backends/mesh_tf/tf_ops.py",
    function=function_of,
    elementwise={
        "Relu": "mtf.relu",
        "Softplus": "mtf.softplus",
        "Elu": "tf.nn.elu",
        "Selu": "tf.nn.selu",
        "Relu6": "tf.nn.relu6",
        "Softsign": "tf.nn.softsign",
        "BiasAdd": "mtf.add",
        "SquaredDifference": "tf.math.squared_difference",
        "DivNoNan": "tf.math.divide_no_nan",
        "FloorDiv": "mtf.floordiv",
    },
    reduce={
        "Sum": "mtf.reduce_sum",
        "Mean": "mtf.reduce_mean",
        "Max": "mtf.reduce_max",
        "Min": "mtf.reduce_min",
        "All": "mtf.reduce_all",
        "Any": "mtf.reduce_any",
    },
    axes=_reduced,
    views=frozenset(
        {
            "Reshape",
            "Transpose",
            "ExpandDims",
            "Squeeze",
            "BroadcastTo",
            "MatMul",
            "BatchMatMul",
            "BatchMatMulV2",
            "BatchMatMulV3",
            "Einsum",
        }
    ),
)


def _flag(op: SourceOp, key: str) -> bool:
    return key in op.attrs and bool(op.attrs[key].b)


def _text(op: SourceOp, key: str, default: str = "") -> str:
    return op.attrs[key].s.decode() if key in op.attrs else default


def _ints(op: SourceOp, key: str) -> list[int]:
    return [int(i) for i in op.attrs[key].list.i] if key in op.attrs else []


# --- elementwise


@RULES.rule("Cast")
def _cast(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    x = p.arg(op, 0)
    return p.let(f"mtf.cast({x.code}, tf.{op.dtypes[0]})", x.order, x.dims, op.dtypes[0])


@RULES.rule("Select", "SelectV2")
def _select(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    return lower.select(p, op, 0, 1, 2)


@RULES.rule("AddN")
def _add_n(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    xs = [p.arg(op, k) for k in range(len(op.inputs))]
    return p.let(" + ".join(x.code for x in xs), xs[0].order, lower.joined(op, xs), xs[0].dtype)


@RULES.rule("ClipByValue")
def _clip(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    low, high = p.scalar(op, 1), p.scalar(op, 2)
    if low is None or high is None:
        raise refuse(op, "its bounds are not numbers")
    x = p.arg(op, 0)
    return p.let(
        f"ops.cwise(lambda x: tf.clip_by_value(x, {low}, {high}), {x.code})", x.order, x.dims, x.dtype
    )


@RULES.rule("LeakyRelu")
def _leaky(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    x, alpha = p.arg(op, 0), float(op.attrs["alpha"].f)
    return p.let(f"ops.cwise(lambda x: tf.nn.leaky_relu(x, {alpha!r}), {x.code})", x.order, x.dims, x.dtype)


@RULES.rule("L2Loss")
def _l2(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    x = p.arg(op, 0)
    return p.let(f"mtf.reduce_sum(mtf.square({x.code}), output_shape=[]) * 0.5", (), (), x.dtype)


# --- softmax and losses


@RULES.rule("Softmax", "LogSoftmax")
def _softmax(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    x = p.arg(op, 0)
    fn = "ops.softmax" if op.name == "Softmax" else "ops.log_softmax"
    return p.let(f"{fn}({x.code}, {p.shape(x.dims[-1])})", x.order, x.dims, x.dtype)


@RULES.rule("SparseSoftmaxCrossEntropyWithLogits")
def _sparse_cross_entropy(p: MeshTfProgram, op: SourceOp) -> list[MeshTfValue | None]:
    x = p.arg(op, 0)
    labels = p.to(p.arg(op, 1), x.dims[:-1])
    code = f"ops.sparse_cross_entropy({x.code}, {labels.code}, {p.shape(x.dims[-1])})"
    return [p.let(code, flat(x.dims[:-1]), x.dims[:-1], x.dtype)]


@RULES.rule("SoftmaxCrossEntropyWithLogits")
def _cross_entropy(p: MeshTfProgram, op: SourceOp) -> list[MeshTfValue | None]:
    x = p.arg(op, 0)
    labels = p.to(p.arg(op, 1), x.dims)
    code = f"ops.cross_entropy({x.code}, {labels.code}, {p.shape(x.dims[-1])})"
    return [p.let(code, flat(x.dims[:-1]), x.dims[:-1], x.dtype)]


# --- images


@RULES.rule("Conv2D")
def _conv(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    strides, dilation = _ints(op, "strides"), _ints(op, "dilations") or [1] * 4
    if _text(op, "data_format", "NHWC") != "NHWC":
        raise refuse(op, "its images are NCHW, which TensorFlow's own CPU kernels do not support either")
    x, w = op.inputs[0].shape, op.inputs[1].shape
    if dilation != [1] * 4 or w[2] != x[3]:
        raise refuse(op, "it has dilation or groups, which Mesh-TensorFlow's conv2d does not support")
    pads = _pads(op, _text(op, "padding"), x[1:3], w[:2], strides[1:3])
    return images.conv2d(p, op, p.arg(op, 0), p.arg(op, 1), op.shapes[0], strides=strides[1:3], padding=pads)


def _pads(
    op: SourceOp, kind: str, rows: Sequence[int], extents: Sequence[int], strides: Sequence[int]
) -> list[tuple[int, int]]:
    if kind == "EXPLICIT":
        e = _ints(op, "explicit_paddings")
        return [(e[2], e[3]), (e[4], e[5])]
    if kind == "VALID":
        return [(0, 0), (0, 0)]
    need = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(rows, extents, strides, strict=True)]
    return [(n // 2, n - n // 2) for n in need]


@RULES.rule("MaxPool", "AvgPool")
def _pool(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    window, strides, padding = _ints(op, "ksize"), _ints(op, "strides"), _text(op, "padding")
    plain = window[0] == window[3] == 1 and _text(op, "data_format", "NHWC") == "NHWC"
    if not plain or padding not in ("SAME", "VALID"):
        raise refuse(
            op, "only pools over rows and columns (NHWC) with padding SAME or VALID can be expressed"
        )
    return images.pool2d(
        p,
        op,
        p.arg(op, 0),
        "MAX" if op.name == "MaxPool" else "AVG",
        op.shapes[0],
        window=window[1:3],
        strides=strides[1:3],
        padding=padding,
    )


# --- parts of tensors


@RULES.rule("StridedSlice")
def _strided_slice(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    begin, end, strides = (p.static(op, k).reshape(-1) for k in (1, 2, 3))
    x = p.arg(op, 0)
    picks = positions(op.attrs["node"], op.inputs[0].shape, begin, end, strides)
    axis = 0
    groups: list[int | None] = []
    for pick in picks:
        if pick is not None and pick.fresh:
            groups.append(None)
            continue
        if pick is not None:
            if (abs(pick.picked.step) != 1 and len(pick.picked) > 1) or pick.picked.step < 0:
                raise refuse(op, "Mesh-TensorFlow's slices have no strides")
            x = lower.cut(p, op, x, axis, pick.picked.start, len(pick.picked))
        if pick is None or not pick.shrink:
            groups.append(axis)
        axis += 1
    dims: TensorDims = tuple(() if i is None else x.dims[i] for i in groups)
    return replace(x, dims=dims)


@RULES.rule("Slice")
def _slice(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    x, begin, size = p.arg(op, 0), p.static(op, 1), p.static(op, 2)
    for axis, (b, n) in enumerate(zip(begin, size, strict=True)):
        x = lower.cut(p, op, x, axis, int(b), x.shape[axis] - int(b) if n < 0 else int(n))
    return x


@RULES.rule("Split", "SplitV")
def _split(p: MeshTfProgram, op: SourceOp) -> list[MeshTfValue | None]:
    of, at = (1, 0) if op.name == "Split" else (0, 2)
    x = p.arg(op, of)
    axis = int(p.static(op, at)) % len(x.dims)
    n = len(op.outputs)
    sizes = [x.shape[axis] // n] * n if op.name == "Split" else [int(s) for s in p.static(op, 1)]
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.shape[axis] - sum(s for s in sizes if s >= 0)
    ends = np.cumsum(sizes)
    return [
        lower.cut(p, op, x, axis, int(e - s), s) if out else None
        for e, s, out in zip(ends, sizes, op.outputs, strict=True)
    ]


@RULES.rule("ConcatV2")
def _concat(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    axis = int(p.static(op, len(op.inputs) - 1)) % len(op.shapes[0])
    return lower.concat(p, op, [p.arg(op, k) for k in range(len(op.inputs) - 1)], axis)


@RULES.rule("Pack")
def _pack(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    axis = (int(op.attrs["axis"].i) if "axis" in op.attrs else 0) % len(op.shapes[0])
    xs = [p.arg(op, k) for k in range(len(op.inputs))]
    return lower.concat(p, op, [replace(x, dims=(*x.dims[:axis], (), *x.dims[axis:])) for x in xs], axis)


@RULES.rule("Unpack")
def _unpack(p: MeshTfProgram, op: SourceOp) -> list[MeshTfValue | None]:
    x = p.arg(op, 0)
    axis = (int(op.attrs["axis"].i) if "axis" in op.attrs else 0) % len(x.dims)
    return [lower.pick(p, op, x, axis, k) if out else None for k, out in enumerate(op.outputs)]


RULES.rule("pase:take")(lower.take)
RULES.rule("pase:stack")(lower.stack)
RULES.rule("pase:same")(lower.same)


@RULES.rule("Pad", "PadV2")
def _pad(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    x, pads = p.arg(op, 0), p.static(op, 1)
    if op.name == "PadV2" and p.scalar(op, 2) != "0.0":
        raise refuse(op, "Mesh-TensorFlow pads only with zeros")
    for axis, (low, high) in enumerate(pads.tolist()):
        if not low and not high:
            continue
        x, part = lower.single(p, op, x, axis)
        wide = replace(part, size=part.size + low + high)
        name, wide_name = p.dim(part), p.dim(wide)
        del name, wide_name
        dims = tuple((wide,) if i == axis else g for i, g in enumerate(x.dims))
        order = tuple(wide if d == part else d for d in x.order)
        x = p.let(f'mtf.pad({x.code}, [{low}, {high}], "{p.names.name(part)}")', order, dims, x.dtype)
    return x


# --- lookups


@RULES.rule("GatherV2", "Gather", "ResourceGather")
def _gather(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    shape = op.inputs[0].shape
    axis = int(p.static(op, 2)) % len(shape) if len(op.inputs) > 2 else 0
    if "batch_dims" in op.attrs and op.attrs["batch_dims"].i:
        raise refuse(op, "its operands share batch dims")
    table = p.arg(op, 0)
    known = op.inputs[1].value
    if known is not None and known.ndim < 2:
        parts = [lower.pick(p, op, table, axis, int(k)) for k in known.reshape(-1)]
        if known.ndim == 0:
            return parts[0]
        return lower.concat(
            p, op, [replace(x, dims=(*x.dims[:axis], (), *x.dims[axis:])) for x in parts], axis
        )
    ids = p.arg(op, 1)
    dims = (*table.dims[:axis], *ids.dims, *table.dims[axis + 1 :])
    if len({d.base for d in flat(dims)}) != len(flat(dims)):
        raise refuse(op, "the table and its indices share a dim")
    return lower.lookup(p, op, table, ids, axis, dims)


@RULES.rule("OneHot")
def _one_hot(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    """Translate one-hot vectors of indices, in the plan's dim of the classes."""
    on, off = p.scalar(op, 2), p.scalar(op, 3)
    dims = p.written(op.outputs[0])
    axis = int(op.attrs["axis"].i) % len(op.shapes[0]) if "axis" in op.attrs else len(op.shapes[0]) - 1
    if (on, off) not in (("1.0", "0.0"), ("1", "0")) or dims is None or op.dtypes[0] != "float32":
        raise refuse(op, "only one-hot vectors of 32-bit ones and zeros can be expressed")
    ids = p.to(p.arg(op, 0), (*dims[:axis], *dims[axis + 1 :])) if op.inputs[0].value is None else None
    if ids is None:
        raise refuse(op, "its indices are constants")
    code = f"mtf.einsum(ops.one_hot({ids.code}, {p.shape(dims[axis])}, tf.float32), output_shape={p.shape(flat(dims))})"
    return p.let(code, flat(dims), dims, op.dtypes[0])
