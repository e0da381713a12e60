"""Rules for ONNX ops that move or make data: reshapes, slices, padding, constants, sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pase.frontends.common.folding import MOST_KNOWN
from pase.frontends.common.slicing import join, part, spread
from pase.frontends.common.values import Value, known
from pase.frontends.onnx.fold import axes_of, reshaped, slice_arguments, slice_bounds, split_sizes
from pase.frontends.onnx.model import dtype_name
from pase.frontends.onnx.rules import lowers, nothing
from pase.frontends.onnx.values import OnnxCall
from pase.ir import functions
from pase.ir.parameters import Pad, Slice
from pase.ops import nests

__all__: list[str] = []


@lowers("Reshape")
def _reshape(c: OnnxCall) -> Value:
    x = c.x()
    return c.reshape(x, reshaped(c, x.shape))


@lowers("Flatten")
def _flatten(c: OnnxCall) -> Value:
    x = c.x()
    axis = c.integer("axis", 1)
    axis = axis + len(x.shape) if axis < 0 else axis
    if not 0 <= axis <= len(x.shape):
        raise c.fail(f"its axis {axis} is out of range for a tensor of {len(x.shape)} dims")
    return c.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@lowers("Squeeze")
def _squeeze(c: OnnxCall) -> Value:
    x = c.x()
    axes = axes_of(c, len(x.shape))
    axes = [i for i, s in enumerate(x.shape) if s == 1] if axes is None else axes
    if any(x.shape[i] != 1 for i in axes):
        raise c.fail(f"its dims {axes} of {list(x.shape)} do not all have one element")
    return c.reshape(x, [s for i, s in enumerate(x.shape) if i not in axes])


@lowers("Unsqueeze")
def _unsqueeze(c: OnnxCall) -> Value:
    x = c.x()
    given = c.ints("axes") if c.has("axes") else c.ints_of(1, "axes")
    rank = len(x.shape) + len(given or ())
    axes = c.axes(given or (), rank)
    rest = iter(x.shape)
    return c.reshape(x, [1 if i in axes else next(rest) for i in range(rank)])


@lowers("Transpose")
def _transpose(c: OnnxCall) -> Value:
    x = c.x()
    order = c.ints("perm")
    order = list(reversed(range(len(x.shape)))) if order is None else c.axes(order, len(x.shape))
    if len(order) != len(x.shape):
        raise c.fail(f"its perm {order[:8]} does not fit a tensor of {len(x.shape)} dims")
    if x.elements == 0:
        return nothing([x.shape[i] for i in order], x.dtype)
    return c.transpose(x, order)


@lowers("Slice")
def _slice(c: OnnxCall) -> Value:
    x = c.x()
    starts, ends, axes, steps = slice_arguments(c, len(x.shape))
    shape, kept = list(x.shape), [True] * len(x.shape)
    note: tuple[object, ...] = ()
    first, by = [0] * len(shape), [1] * len(shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        a, b, t = slice_bounds(start, end, step, x.shape[axis])
        shape[axis] = len(range(a, -1 if b is None else b, t))
        first[axis], by[axis] = a, t
        kept[axis] = (a, shape[axis], t) == (0, x.shape[axis], 1)
        note = (axis, a, a + shape[axis]) if t == 1 and len(axes) == 1 else ()
    parameters = Slice(start=tuple(first), step=tuple(by))
    return x if all(kept) else part(c, x, shape, kept, "slice", note, parameters)


@lowers("Split")
def _split(c: OnnxCall) -> Sequence[Value]:
    x = c.x()
    axis = c.axis(c.integer("axis"), len(x.shape))
    out, at = [], 0
    for size in split_sizes(c, x.shape[axis]):
        shape = [size if i == axis else s for i, s in enumerate(x.shape)]
        kept = [i != axis for i in range(len(shape))]
        whole = size == x.shape[axis]
        out.append(x if whole else part(c, x, shape, kept, "split", (axis, at, at + size)))
        at += size
    return out


@lowers("Concat")
def _concat(c: OnnxCall) -> Value:
    values = [c.x(i) for i in range(len(c.ins))]
    return join(c, values, c.integer("axis", 1))


@lowers("Expand")
def _expand(c: OnnxCall) -> Value:
    x = c.x()
    return spread(c, x, c.broadcast(x.shape, c.shape(c.ints_of(1, "shape"))))


@lowers("Tile")
def _tile(c: OnnxCall) -> Value:
    x = c.x()
    if c.version < 6:
        n, axis = c.ints_of(1, "tiles"), c.ints_of(2, "axis")
        repeats = [n[0] if i == c.axis(axis[0], len(x.shape)) else 1 for i in range(len(x.shape))]
    else:
        repeats = c.ints_of(1, "repeats")
    if len(repeats) != len(x.shape):
        raise c.fail(f"it has {len(repeats)} repeats for {len(x.shape)} dims")
    shape = c.shape([s * r for s, r in zip(x.shape, repeats, strict=True)])
    if math.prod(shape) == 0 or all(s == 1 or r == 1 for s, r in zip(x.shape, repeats, strict=True)):
        return spread(c, x, shape)
    return c.value(nests.restrict(c.b, "tile", [c.tensor(x)], shape, [r == 1 for r in repeats]))


@lowers("Pad")
def _pad(c: OnnxCall) -> Value:
    x = c.x()
    rank = len(x.shape)
    pads = c.ints("pads") or c.ints("paddings")
    pads = c.ints_of(1, "pads") if pads is None else pads
    axes = c.axes(c.ints_of(3, "axes"), rank) if c.opt(3) is not None else list(range(rank))
    if len(pads) != 2 * len(axes):
        raise c.fail(f"it has {len(pads)} pads for {len(axes)} dims")
    n = len(axes)
    shape, kept = list(x.shape), [True] * rank
    for k, axis in enumerate(axes):
        shape[axis] += pads[k] + pads[k + n]
        kept[axis] = pads[k] == pads[k + n] == 0
    if all(kept):
        return x
    full = c.shape(shape)
    if math.prod(full) == 0 or x.elements == 0:
        return nothing(full, x.dtype)
    told = c.opt(2)
    value = c.real("value", 0.0) if told is None else told.scalar
    parameters = None
    if c.text("mode", "constant") == "constant" and value is not None:
        before = [0] * rank
        for k, axis in enumerate(axes):
            before[axis] = pads[k]
        parameters = Pad(before=tuple(before), interior=(0,) * rank, value=value)
    return c.value(nests.restrict(c.b, "pad", [c.tensor(x)], full, kept, parameters))


@lowers("CenterCropPad")
def _crop(c: OnnxCall) -> Value:
    x = c.x()
    target = c.ints_of(1, "shape")
    axes = c.axes(c.ints("axes") or list(range(len(x.shape))), len(x.shape))
    shape = list(x.shape)
    for axis, size in zip(axes, target, strict=True):
        shape[axis] = size
    kept = [s == t for s, t in zip(x.shape, shape, strict=True)]
    full = c.shape(shape)
    return x if all(kept) else c.value(nests.restrict(c.b, "pad", [c.tensor(x)], full, kept))


@lowers("DepthToSpace", "SpaceToDepth")
def _blocks(c: OnnxCall) -> Value:
    x, s = c.x(), c.integer("blocksize", 1)
    if len(x.shape) != 4 or s < 1:
        raise c.fail(
            f"it needs images [n c h w] and a positive blocksize, but has {len(x.shape)} dims and a blocksize of {s}"
        )
    n, ch, h, w = x.shape
    if c.op == "SpaceToDepth":
        if h % s or w % s:
            raise c.fail(f"its images of {h} by {w} pixels cannot be divided into blocks of {s} by {s}")
        cut = c.transpose(c.reshape(x, (n, ch, h // s, s, w // s, s)), [0, 3, 5, 1, 2, 4])
        return c.reshape(cut, (n, ch * s * s, h // s, w // s))
    if ch % (s * s):
        raise c.fail(f"its {ch} channels cannot be divided into blocks of {s} by {s}")
    rest = ch // (s * s)
    if c.text("mode", "DCR") == "DCR":
        cut = c.transpose(c.reshape(x, (n, s, s, rest, h, w)), [0, 3, 4, 1, 5, 2])
    else:
        cut = c.transpose(c.reshape(x, (n, rest, s, s, h, w)), [0, 1, 4, 2, 5, 3])
    return c.reshape(cut, (n, rest, h * s, w * s))


@lowers("ReverseSequence")
def _reverse(c: OnnxCall) -> Value:
    x = c.x()
    time = c.axis(c.integer("time_axis"), len(x.shape))
    return c.value(
        nests.restrict(c.b, "rev", [c.tensor(x)], x.shape, [i != time for i in range(len(x.shape))])
    )


@lowers("Trilu")
def _trilu(c: OnnxCall) -> Value:
    return c.elementwise([None, c.x(), 0], functions.WHERE, name="select")


@lowers("Resize", "Upsample")
def _resize(c: OnnxCall) -> Value:
    """Nearest-neighbour resizing by integer factors repeats elements, so all dims may be split.

    Otherwise, dims whose size changes are not split.
    """
    x = c.x()
    rank = len(x.shape)
    axes = c.axes(c.ints("axes") or list(range(rank)), rank)
    first = 1 if c.op == "Upsample" or c.version < 11 else 2
    scales = c.attribute("scales")
    factors: list[float] | None = [float(f) for f in scales.floats] if scales is not None else None
    sizes: list[int] | None = None
    if factors is None and (v := c.opt(first)) is not None and v.elements:
        if v.data is None:
            raise c.fail("its scales are computed from the model's data", fix="make them constants")
        factors = [float(f) for f in v.data.reshape(-1)]
    if not factors and c.opt(3) is not None:
        sizes = c.ints_of(3, "sizes")
    given = factors if sizes is None else sizes
    if given is None or len(given) != len(axes) or any(not 0 <= g < 2**40 for g in given):
        raise c.fail(f"it needs scales or sizes for {len(axes)} dims")
    policy = c.text("keep_aspect_ratio_policy", "stretch")
    if sizes is not None and policy != "stretch" and sizes:
        ratios = [size / x.shape[axis] for size, axis in zip(sizes, axes, strict=True)]
        scale = min(ratios) if policy == "not_larger" else max(ratios)
        sizes = [math.floor(scale * x.shape[axis] + 0.5) for axis in axes]
    shape = list(x.shape)
    for k, axis in enumerate(axes):
        shape[axis] = sizes[k] if sizes is not None else math.floor(x.shape[axis] * given[k])
    full = c.shape(shape)
    if full == x.shape:
        return x
    if math.prod(full) == 0 or x.elements == 0:
        return nothing(full, x.dtype)
    whole = all(t % s == 0 for s, t in zip(x.shape, full, strict=True))
    if whole and c.text("mode", "nearest") == "nearest":
        wide = [n for s, t in zip(x.shape, full, strict=True) for n in (s, t // s)]
        repeated = nests.broadcast(c.b, c.tensor(x), wide, [2 * i for i in range(rank)])
        return c.reshape(c.value(repeated), full)
    kept = [s == t for s, t in zip(x.shape, full, strict=True)]
    return c.value(nests.restrict(c.b, "resize", [c.tensor(x)], full, kept))


# Values that are known without data.


@lowers("Constant")
def _constant(c: OnnxCall) -> Value:
    from onnx import numpy_helper

    for key in ("value_int", "value_float", "value_ints", "value_floats"):
        if (a := c.attribute(key)) is not None:
            numbers = list(a.ints or a.floats) if key.endswith("s") else a.i if "int" in key else a.f
            data = np.array(numbers, np.int64 if "int" in key else np.float32)
            return c.low.constant(c, data.shape, str(data.dtype), data)
    a = c.attribute("value") or c.attribute("sparse_value")
    if a is None:
        raise c.fail("it is text, which pase cannot price, or has no value", fix="remove it from the model")
    if a.HasField("sparse_tensor"):
        values = a.sparse_tensor.values
        return c.low.constant(c, c.shape(a.sparse_tensor.dims), dtype_name(values.data_type, c.place), None)
    t = a.t
    dtype, shape = dtype_name(t.data_type, c.place), c.shape(t.dims)
    contents: np.ndarray | None = None
    if math.prod(shape) <= MOST_KNOWN and dtype != "string" and t.data_location != 1:
        try:
            contents = np.asarray(numpy_helper.to_array(t))
        except (ValueError, TypeError, KeyError, OverflowError) as e:
            raise c.fail(f"its value does not fit its shape {list(shape)}: {e}") from e
    return c.low.constant(c, shape, dtype, contents)


@lowers("Shape", "Size")
def _shape(c: OnnxCall) -> Value:
    x = c.x()
    if c.op == "Size":
        return known(np.array(x.elements, np.int64))
    rank = len(x.shape)
    start, end, _ = slice(c.integer("start"), c.integer("end", rank) if c.has("end") else None).indices(rank)
    return known(np.array(x.shape[start : max(start, end)], np.int64))


@lowers("ConstantOfShape")
def _constant_of_shape(c: OnnxCall) -> Value:
    """A constant. With a stored shape and a float value, it stands for a weight that the file leaves out."""
    shape = c.shape(c.ints_of(0, "shape"))
    t = c.attribute("value")
    dtype = "float32" if t is None else dtype_name(t.t.data_type, c.place)
    source = c.x()
    if source.note[:1] == ("initializer",) and "float" in dtype and c.low.apart is None:
        return c.low.stored(c.node.output[0], shape, dtype)
    if (
        math.prod(shape) > MOST_KNOWN
        or dtype in ("string", "bfloat16")
        or "float8" in dtype
        or "int4" in dtype
    ):
        return replace(nothing(shape, dtype), foldable=True)
    from onnx import numpy_helper

    fill = np.zeros(1, dtype) if t is None else np.asarray(numpy_helper.to_array(t.t)).reshape(-1)
    return known(np.full(shape, fill[0] if fill.size else 0, fill.dtype))


@lowers("Range")
def _range(c: OnnxCall) -> Value:
    data = [c.x(i).data for i in range(3)]
    if any(d is None or d.size != 1 for d in data):
        raise c.fail("its length is computed from the model's data", fix="make its limits constants")
    start, limit, delta = (float(d.reshape(())) for d in data)  # type: ignore[union-attr]
    return nothing(c.shape([max(math.ceil((limit - start) / delta), 0)]), c.x().dtype)


@lowers("MelWeightMatrix", "HannWindow", "HammingWindow", "BlackmanWindow")
def _table(c: OnnxCall) -> Value:
    sizes = c.ints_of(0, "size")
    dtype = c.dtype("output_datatype", "float32")
    if c.op != "MelWeightMatrix":
        return nothing(c.shape(sizes), dtype)
    return nothing(c.shape([c.ints_of(1, "length")[0] // 2 + 1, sizes[0]]), dtype)


# Sequences of tensors, which exist only while lowering.


def _sequence(items: Sequence[Value]) -> Value:
    return Value(shape=(), dtype=items[0].dtype if items else "float32", items=tuple(items))


def _items(c: OnnxCall) -> tuple[Value, ...]:
    v = c.opt(0)
    if v is None or v.items is None:
        raise c.fail("input 0 is not a sequence of tensors")
    return v.items


@lowers("SequenceConstruct", "SequenceEmpty")
def _construct(c: OnnxCall) -> Value:
    return _sequence([c.x(i) for i in range(len(c.ins))])


def _position(c: OnnxCall, i: int, n: int) -> int:
    at = c.ints_of(i, "position")[0]
    if not -n <= at < n:
        raise c.fail(f"position {at} is out of range for a sequence of {n} tensors")
    return at % n


@lowers("SequenceAt")
def _sequence_at(c: OnnxCall) -> Value:
    items = _items(c)
    return items[_position(c, 1, len(items))]


@lowers("SequenceLength")
def _len(c: OnnxCall) -> Value:
    return known(np.array(len(_items(c)), np.int64))


@lowers("SequenceInsert", "SequenceErase")
def _insert(c: OnnxCall) -> Value:
    items = list(_items(c))
    if c.op == "SequenceErase":
        items.pop(_position(c, 1, len(items)) if c.opt(1) is not None else -1)
    elif c.opt(2) is None:
        items.append(c.x(1))
    else:
        items.insert(_position(c, 2, len(items) + 1), c.x(1))
    return _sequence(items)


@lowers("SplitToSequence")
def _split_to(c: OnnxCall) -> Value:
    x = c.x()
    axis = c.axis(c.integer("axis"), len(x.shape))
    size = x.shape[axis]
    parts = [1] * min(size, MOST_KNOWN + 1) if c.opt(1) is None else c.ints_of(1, "parts")
    if c.opt(1) is not None and not c.x(1).shape and parts[0] > 0:
        parts = [parts[0]] * (size // parts[0]) + ([size % parts[0]] if size % parts[0] else [])
    if sum(parts) != size or any(p < 0 for p in parts) or len(parts) > MOST_KNOWN:
        raise c.fail(f"its parts {parts[:8]} do not match a dim of {size} elements")
    out, at = [], 0
    for p in parts:
        shape = [p if i == axis else s for i, s in enumerate(x.shape)]
        v = part(c, x, shape, [i != axis for i in range(len(shape))], "split", (axis, at, at + p))
        keep = c.integer("keepdims", 1) or c.opt(1) is not None
        out.append(v if keep else c.reshape(v, [s for i, s in enumerate(shape) if i != axis]))
        at += p
    return _sequence(out)


@lowers("ConcatFromSequence")
def _concat_from(c: OnnxCall) -> Value:
    items, axis = list(_items(c)), c.integer("axis")
    if c.integer("new_axis") and items:
        axis = c.axis(axis, len(items[0].shape) + 1)
        items = [c.reshape(v, (*v.shape[:axis], 1, *v.shape[axis:])) for v in items]
    return join(c, items, axis)
