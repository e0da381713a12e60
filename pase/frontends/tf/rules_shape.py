"""Rules for TensorFlow ops that move data: reshapes, slices, joins, lookups, scatters, cumulative ops."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np

from pase.frontends.common.slicing import join, one_dim
from pase.frontends.common.values import Value, known
from pase.frontends.tf.rules import lowers, opaque
from pase.frontends.tf.slices import positions
from pase.frontends.tf.values import Handle, TfCall, TfResult, elements
from pase.ir import Tensor, functions
from pase.ir.functions import FUNCTIONS
from pase.ir.literals import literal
from pase.ir.parameters import Pad, Parameters, Slice, Take
from pase.ops import indexed, nests

__all__ = ["pack", "take"]


@lowers("Reshape")
def _reshape(c: TfCall) -> Sequence[TfResult]:
    shape = c.shape_of(0)
    wanted = c.numbers(1, "shape")
    rest = elements(s for s in wanted if s != -1)
    if wanted.count(-1) > 1 or (-1 in wanted and (not rest or elements(shape) % rest)):
        raise c.fail(f"shape {shape} cannot be reshaped to {wanted}")
    return [c.reshape(c.v(0), [elements(shape) // rest if s == -1 else s for s in wanted])]


@lowers("Squeeze")
def _squeeze(c: TfCall) -> Sequence[TfResult]:
    shape = c.shape_of(0)
    axes = {c.axis(i, len(shape)) for i in c.wholes("squeeze_dims")}
    if any(shape[i] != 1 for i in axes):
        raise c.fail(f"its dims {sorted(axes)} of shape {shape} do not all have one element")
    out = [s for i, s in enumerate(shape) if i not in (axes or {k for k, n in enumerate(shape) if n == 1})]
    return [nests.reshape(c.b, c.x(0), out)]


@lowers("ExpandDims")
def _expand(c: TfCall) -> Sequence[TfResult]:
    shape = list(c.shape_of(0))
    shape.insert(c.axis_at(1, len(shape) + 1), 1)
    return [nests.reshape(c.b, c.x(0), shape)]


@lowers("Transpose", "ConjugateTranspose")
def _transpose(c: TfCall) -> Sequence[TfResult]:
    rank = len(c.shape_of(0))
    perm = [c.axis(i, rank) for i in c.numbers(1, "permutation")]
    if sorted(perm) != list(range(rank)):
        raise c.fail(f"{perm} is not a permutation of {rank} dims")
    return [nests.transpose(c.b, c.x(0), perm)]


@lowers("BroadcastTo")
def _broadcast_to(c: TfCall) -> Sequence[TfResult]:
    shape, out = c.shape_of(0), c.shape(c.numbers(1, "shape"))
    if c.broadcast(*[shape, out]) != out:
        raise c.fail(f"shape {shape} does not broadcast to {out}")
    return [nests.broadcast(c.b, c.x(0), out, range(len(out) - len(shape), len(out)))]


@lowers("Fill")
def _fill(c: TfCall) -> Sequence[TfResult]:
    shape = c.shape(c.numbers(0, "dims"))
    if (number := c.known(1)) is not None:
        return [c.b.constant(shape, c.dtype(1), contents=number)]
    return [nests.broadcast(c.b, c.x(1), shape, ())]


@lowers("Range", "LinSpace", "XlaIota")
def _range(c: TfCall) -> Sequence[TfResult]:
    """A constant. This rule gets only ranges that are too long to be known values."""
    if c.node.op == "LinSpace":
        ends = [c.known(i) for i in range(2)]
        n, told = c.number(2, "number of points"), all(e is not None for e in ends)
        contents = partial(np.linspace, *(e.reshape(()) for e in ends if e is not None), n) if told else None
        return [c.b.constant(c.shape([n]), c.dtype(0), contents=contents)]
    ends = [c.known(i) for i in range(3)]
    if any(e is None or e.size != 1 for e in ends):
        raise c.fail("its limits are computed from data", fix="make them constants or functions of shapes")
    start, limit, delta = (float(e.reshape(())) for e in ends if e is not None)
    if not delta or not np.isfinite([start, limit, delta]).all():
        raise c.fail(f"its range from {start} to {limit} in steps of {delta} does not end")
    return [
        c.b.constant(
            c.shape([int(np.ceil((limit - start) / delta))]),
            c.type("Tidx"),
            contents=partial(np.arange, start, limit, delta),
        )
    ]


@lowers("Pack")
def _pack(c: TfCall) -> Sequence[TfResult]:
    rank = len(c.shape_of(0)) + 1  # raises if there is no operand
    return [pack(c, [c.x(i) for i in range(len(c.ins))], c.axis(c.whole("axis", 0), rank))]


def pack(c: TfCall, xs: Sequence[Tensor], axis: int) -> Tensor:
    """Tensors of one shape, stacked along a new dim that may not be split."""
    shape = xs[0].shape
    if any(x.shape != shape for x in xs):
        raise c.fail(f"tensors of shapes {', '.join(str(x.shape) for x in xs[:5])} cannot be stacked")
    one = [*shape[:axis], 1, *shape[axis:]]
    parts = [nests.reshape(c.b, x, one) for x in xs]
    return parts[0] if len(parts) == 1 else nests.concat(c.b, parts, axis)


@lowers("Unpack")
def _unpack(c: TfCall) -> Sequence[TfResult]:
    x, shape = c.x(), c.shape_of(0)
    axis = c.axis(c.whole("axis", 0), len(shape))
    return [take(c, x, axis, k) for k in range(shape[axis])]


def take(c: TfCall, x: Tensor, axis: int, index: int) -> Tensor:
    """x at one index of a dim, without that dim. The dim may not be split."""
    at = one_dim(c.shape(x.shape), axis, index)  # type: ignore[arg-type]
    one = [*x.shape[:axis], 1, *x.shape[axis + 1 :]]
    kept = [i != axis for i in range(len(one))]
    part = x if x.shape[axis] == 1 else nests.restrict(c.b, c.node.op, [x], one, kept, at)
    return nests.reshape(c.b, part, [s for s, k in zip(one, kept, strict=True) if k])


@lowers("ConcatV2", "Concat")
def _concat(c: TfCall) -> Sequence[TfResult]:
    last = c.node.op == "ConcatV2"
    at = len(c.ins) - 1 if last else 0
    ids = range(len(c.ins) - 1) if last else range(1, len(c.ins))
    rank = len(c.shape_of(ids[0])) if ids else 0
    if not rank:
        raise c.fail("it has nothing to concatenate, or its operands are scalars")
    return [join(c, [c.v(i) for i in ids], c.axis_at(at, rank))]


@lowers("Split", "SplitV")
def _split(c: TfCall) -> Sequence[TfResult]:
    which = 1 if c.node.op == "Split" else 0
    shape = c.shape_of(which)
    axis = c.axis_at(0 if which else 2, len(shape))
    if which:
        parts = c.whole("num_split")
        if parts < 1 or shape[axis] % parts:
            raise c.fail(f"a dim of {shape[axis]} elements cannot be split into {parts} parts")
        sizes = [shape[axis] // parts] * parts
    else:
        sizes = c.numbers(1, "sizes")
        if sizes.count(-1) == 1:
            sizes[sizes.index(-1)] = shape[axis] - sum(s for s in sizes if s != -1)
        if sum(sizes) != shape[axis]:
            raise c.fail(f"a dim of {shape[axis]} elements cannot be split into parts of {sizes}")
    if len(sizes) == 1:
        return [c.x(which)]
    kept = [i != axis for i in range(len(shape))]
    x = c.x(which)
    wide = [c.shape([*shape[:axis], s, *shape[axis + 1 :]]) for s in sizes]
    starts = itertools.accumulate(sizes, initial=0)
    return [
        nests.restrict(c.b, "split", [x], s, kept, one_dim(shape, axis, at))
        for s, at in zip(wide, starts, strict=False)
    ]


@lowers("Slice")
def _slice(c: TfCall) -> Sequence[TfResult]:
    """A slice. Its start may be known only at run time; its size must be known."""
    shape, size = c.shape_of(0), c.numbers(2, "size")
    if len(size) != len(shape):
        raise c.fail(f"its size {size} does not match shape {shape}")
    begin = c.known(1)
    starts = [None] * len(shape) if begin is None else [int(i) for i in begin.reshape(-1)]
    if len(starts) != len(shape):
        raise c.fail(f"its start {starts} does not match shape {shape}")
    out: list[int] = []
    for n, start, s in zip(shape, starts, size, strict=True):
        if s == -1 and start is None:
            raise c.fail(
                "its size depends on its start, which is computed from data", fix="give a constant size"
            )
        take_n = n - start if s == -1 and start is not None else s
        if take_n > n or (start is not None and not 0 <= start <= n - take_n):
            raise c.fail(f"it takes {take_n} elements from position {start} of a dim of {n} elements")
        out.append(take_n)
    where = tuple(s for s in starts if s is not None)
    parameters = Slice(start=where, step=(1,) * len(out)) if len(where) == len(out) else None
    return [_part(c, c.shape(out), [n == s for n, s in zip(shape, out, strict=True)], parameters)]


def _part(
    c: TfCall, shape: Sequence[int], kept: Sequence[bool], parameters: Parameters | None = None
) -> Tensor:
    x = c.x(0)
    if all(kept):
        return x
    return nests.restrict(c.b, c.node.op, [x], shape, kept, parameters)


@lowers("StridedSlice")
def _strided(c: TfCall) -> Sequence[TfResult]:
    strides, shape = c.numbers(3, "strides"), c.shape_of(0)
    begin, end = c.known(1), c.known(2)
    try:
        picks = positions(
            c.node,
            shape,
            None if begin is None else begin.reshape(-1),
            None if end is None else end.reshape(-1),
            strides,
        )
    except ValueError as e:
        raise c.fail(f"its slice of shape {shape} is invalid: {e}") from None
    old = [p for p in picks if p is None or not p.fresh]
    part = c.shape([n if p is None else len(p.picked) for n, p in zip(shape, old, strict=True)])
    where = [range(n) if p is None else p.picked for n, p in zip(shape, old, strict=True)]
    parameters = Slice(start=tuple(r.start for r in where), step=tuple(r.step for r in where))
    dynamic = any(p is not None and p.dynamic for p in old)
    kept = [p is None or n == 1 for n, p in zip(shape, old, strict=True)]
    x = _part(c, part, kept, None if dynamic else parameters)
    sizes = iter(part)
    out = []
    for p in picks:
        size = 1 if p is not None and p.fresh else next(sizes)
        if not (p is not None and p.shrink):
            out.append(size)
    return [x if tuple(out) == x.shape else nests.reshape(c.b, x, out)]


@lowers("Pad", "PadV2", "MirrorPad")
def _pad(c: TfCall) -> Sequence[TfResult]:
    shape, pads = c.shape_of(0), c.numbers(1, "paddings")
    if len(pads) != 2 * len(shape) or min(pads, default=0) < 0:
        raise c.fail(f"its paddings {pads} do not match shape {shape}")
    added = [pads[2 * i] + pads[2 * i + 1] for i in range(len(shape))]
    out = c.shape([s + a for s, a in zip(shape, added, strict=True)])
    value = 0.0 if c.node.op == "Pad" else c.known(2) if c.node.op == "PadV2" else None
    pad = None
    if value is not None:
        before = tuple(pads[2 * i] for i in range(len(shape)))
        pad = Pad(before=before, interior=(0,) * len(shape), value=literal(value))
    return [_part(c, out, [a == 0 for a in added], pad)]


@lowers("Tile")
def _tile(c: TfCall) -> Sequence[TfResult]:
    """Repeats. A dim of one element is broadcast; any other dim that is repeated may not be split."""
    shape, reps = c.shape_of(0), c.numbers(1, "multiples")
    if len(reps) != len(shape):
        raise c.fail(f"its multiples {reps} do not match shape {shape}")
    out = c.shape([s * r for s, r in zip(shape, reps, strict=True)])
    if all(s == 1 or r == 1 for s, r in zip(shape, reps, strict=True)):
        return [nests.broadcast(c.b, c.x(0), out, range(len(out)))]
    return [_part(c, out, [r == 1 for r in reps])]


@lowers("ReverseV2", "Reverse", "Roll", "ReverseSequence", "RandomShuffle")
def _reverse(c: TfCall) -> Sequence[TfResult]:
    x, op = c.x(), c.node.op
    rank = len(x.shape)
    if op == "ReverseSequence":
        axes = {c.axis(c.whole("seq_dim"), rank)}
    elif op == "RandomShuffle":
        axes = {0}
    elif op == "Reverse":
        flags = c.known(1)
        axes = set(range(rank)) if flags is None else {i for i, f in enumerate(flags.reshape(-1)) if f}
    else:
        axes = set(c.axes_at(2 if op == "Roll" else 1, rank))
    return [nests.restrict(c.b, op, [x], x.shape, [i not in axes for i in range(rank)])]


@lowers(
    "MatrixBandPart",
    "MatrixDiagPartV3",
    "MatrixDiagPart",
    "MatrixDiag",
    "MatrixDiagV3",
    "MatrixSetDiagV3",
    "MatrixSetDiag",
    "DiagPart",
    "Diag",
)
def _matrix_part(c: TfCall) -> Sequence[TfResult]:
    """A triangle or a diagonal of a matrix. If the shape changes, the dims of the matrix are not split."""
    x, shape, op = c.x(), c.shape_of(0), c.node.op
    if op == "MatrixBandPart" or op.startswith("MatrixSetDiag"):
        return nests.elementwise(c.b, functions.WHERE, [None, x, 0], [x.dtype], name=op)
    if op in ("Diag", "DiagPart"):
        n = len(shape)
        out = (*shape, *shape) if op == "Diag" else shape[: n // 2]
        return opaque(c, [(c.shape(out), x.dtype)])
    if op.endswith("V3") and (c.known(1) is None or c.numbers(1, "diagonals") not in ([0], [0, 0])):
        return opaque(c, [(c.hinted(), x.dtype)])
    tail = (shape[-1], shape[-1]) if op.startswith("MatrixDiag") and "Part" not in op else (min(shape[-2:]),)
    lead = shape[:-2] if "Part" in op else shape[:-1]
    return nests.batched(c.b, op, [x], [((*lead, *tail), x.dtype)], len(lead), flops=float(elements(tail)))


@lowers("OneHot")
def _one_hot(c: TfCall) -> Sequence[TfResult]:
    """One-hot: compares ids with 0, 1, …. Every dim may be split."""
    shape, depth = c.shape_of(0), c.number(1, "depth")
    axis = c.whole("axis", -1)
    axis = len(shape) if axis == -1 else c.axis(axis, len(shape) + 1)
    out = c.shape([*shape[:axis], depth, *shape[axis:]])
    ids = nests.reshape(c.b, c.x(0), [*shape[:axis], 1, *shape[axis:]])
    dtype = c.type("T") if "T" in c.node.attr else c.dtype(2)
    plain = all((v := c.known(i)) is not None and v.reshape(-1).tolist() == [w] for i, w in ((2, 1), (3, 0)))
    wide = [depth if i == axis else 1 for i in range(len(out))]
    classes = c.b.constant(wide, ids.dtype, contents=partial(_classes, wide)) if plain else None
    return nests.elementwise(c.b, functions.EQUAL, [ids, classes], [dtype], name="OneHot", shape=out)


def _classes(shape: Sequence[int]) -> np.ndarray:
    """0, 1, … in this shape."""
    return np.arange(elements(shape)).reshape(shape)


def _check_rows(c: TfCall, at: int, *sizes: int) -> None:
    """Raises PaseError if operand ``at`` has known indices, and one of them lies outside of its dim: TensorFlow raises
    an error on CPUs, and reads zeros or writes nothing on GPUs.

    sizes: of the dim that all of them index; of several, if the last dim of the indices has one of each.
    """
    policy = c.node.attr["bad_indices_policy"].s if "bad_indices_policy" in c.node.attr else b""
    ids = c.known(at)
    if ids is None or not ids.size or policy == b"IGNORE":
        return
    for i, size in enumerate(sizes):
        each = ids[..., i] if len(sizes) > 1 else ids
        least, most = int(each.min()), int(each.max())
        if least < 0 or most >= size:
            raise c.fail(
                f"its index {least if least < 0 else most} is not in a dim of {size} elements",
                fix="give an index from 0 on: TensorFlow counts no negative ones from the end here, raises an error on "
                "CPUs, and takes zeros on GPUs",
            )


@lowers("GatherV2", "Gather", "ResourceGather")
def _gather(c: TfCall) -> Sequence[TfResult]:
    """Rows of a table. Known indices are a slice of a dim that is not split; others are a lookup in one that may be."""
    x, shape, ids = c.x(0), c.shape_of(0), c.shape_of(1)
    axis = c.axis_at(2, len(shape)) if len(c.ins) > 2 else 0
    batch = c.whole("batch_dims", 0)
    batch = batch % (len(ids) + 1) if batch < 0 else batch
    if c.node.op == "ResourceGather" and "batch_dims" not in c.node.attr:
        batch = 0
    axis = max(axis, batch)
    if not shape or batch > len(ids) or axis >= len(shape) or shape[:batch] != ids[:batch]:
        raise c.fail(
            f"its indices of shape {ids} do not fit dim {axis} of shape {shape} with {batch} batch dims"
        )
    _check_rows(c, 1, shape[axis])
    out = c.shape([*shape[:axis], *ids[batch:], *shape[axis + 1 :]])
    if (known_ids := c.known(1)) is not None and len(ids) < 2 and not batch:
        part = [*shape[:axis], *(ids or (1,)), *shape[axis + 1 :]]
        kept = [i != axis for i in range(len(shape))]
        places = Take(axis=axis, index=tuple(map(int, known_ids.reshape(-1))))
        return [nests.reshape(c.b, nests.restrict(c.b, "gather", [x], part, kept, places), out)]
    offset = [i for i in range(len(out)) if batch <= i < axis or i >= axis + len(ids) - batch]
    return [
        indexed.gather(
            c.b,
            "gather",
            x,
            nests.reshape(c.b, c.x(1), (*ids, 1)),
            out,
            indexed.IndexedDims(
                window=offset,
                dropped=(axis,),
                indexed=(axis,),
                x_batch=range(batch),
                ids_batch=range(batch),
            ),
        )
    ]


@lowers("GatherNd", "ResourceGatherNd")
def _gather_nd(c: TfCall) -> Sequence[TfResult]:
    x, shape, ids = c.x(0), c.shape_of(0), c.shape_of(1)
    n = ids[-1] if ids else 0
    if not 1 <= n <= len(shape):
        raise c.fail(f"its indices of shape {ids} do not fit shape {shape}")
    _check_rows(c, 1, *shape[:n])
    out = c.shape([*ids[:-1], *shape[n:]])
    return [
        indexed.gather(
            c.b,
            "gather",
            x,
            c.x(1),
            out,
            indexed.IndexedDims(
                window=range(len(ids) - 1, len(out)),
                dropped=range(n),
                indexed=range(n),
            ),
        )
    ]


@lowers(
    "ScatterNd",
    "TensorScatterUpdate",
    "TensorScatterAdd",
    "TensorScatterSub",
    "TensorScatterMax",
    "TensorScatterMin",
)
def _scatter(c: TfCall) -> Sequence[TfResult]:
    fresh = c.node.op == "ScatterNd"
    at, of = (0, 1) if fresh else (1, 2)
    ids, updates = c.shape_of(at), c.shape_of(of)
    shape = c.shape(c.numbers(2, "shape")) if fresh else c.shape_of(0)
    n = ids[-1] if ids else 0
    if not 1 <= n <= len(shape) or updates != (*ids[:-1], *shape[n:]):
        raise c.fail(f"its updates of shape {updates} at indices of shape {ids} do not fit shape {shape}")
    _check_rows(c, at, *shape[:n])
    x = c.b.constant(shape, c.dtype(of)) if fresh else c.x(0)
    exact = ("ScatterNd", "TensorScatterUpdate", "TensorScatterAdd")
    with c.b.undetermined(unless=c.node.op in exact):
        made = indexed.scatter(
            c.b,
            c.node.op,
            x,
            c.x(at),
            c.x(of),
            indexed.IndexedDims(window=range(len(ids) - 1, len(updates)), dropped=range(n), indexed=range(n)),
            combines=c.node.op != "TensorScatterUpdate",
        )
    return [made]


@lowers(
    "UnsortedSegmentSum",
    "SegmentSum",
    "SegmentMean",
    "UnsortedSegmentMax",
    "UnsortedSegmentMin",
    "SegmentMax",
    "SegmentSumV2",
)
def _segment(c: TfCall) -> Sequence[TfResult]:
    """Sums or extrema of rows per segment."""
    shape, ids = c.shape_of(0), c.shape_of(1)
    if shape[: len(ids)] != ids or not ids:
        raise c.fail(f"its segments of shape {ids} do not fit shape {shape}")
    count = c.number(2, "number of segments") if len(c.ins) > 2 else c.hinted()[0]
    x = c.b.constant(c.shape([count, *shape[len(ids) :]]), c.dtype(0))
    rows = nests.reshape(c.b, c.x(1), (*ids, 1))
    with c.b.undetermined(unless="Sum" in c.node.op):
        made = indexed.scatter(
            c.b,
            c.node.op,
            x,
            rows,
            c.x(0),
            indexed.IndexedDims(window=range(len(ids), len(shape)), dropped=(0,), indexed=(0,)),
        )
    return [made]


@lowers("Cumsum", "Cumprod", "CumulativeLogsumexp")
def _cumulative(c: TfCall) -> Sequence[TfResult]:
    x = c.x()
    function = FUNCTIONS[{"CumulativeLogsumexp": "cumlogsumexp"}.get(c.node.op, c.node.op.lower())]
    return nests.sequential(
        c.b, function, [x], c.axis_at(1, len(x.shape)), [(x.shape, x.dtype)], name=c.node.op
    )


@lowers("TopK", "TopKV2")
def _top_k(c: TfCall) -> Sequence[TfResult]:
    x, shape = c.x(), c.shape_of(0)
    k = c.number(1, "number of entries") if len(c.ins) > 1 else c.whole("k")
    if not shape or k > shape[-1]:
        raise c.fail(f"it takes the {k} largest elements, but its operand has shape {shape}")
    out = c.shape([*shape[:-1], k])
    index = c.type("index_type") if "index_type" in c.node.attr else "int32"
    return nests.sequential(c.b, functions.TOP_K, [x], len(shape) - 1, [(out, x.dtype), (out, index)])


@lowers("SpaceToDepth", "DepthToSpace")
def _blocks(c: TfCall) -> Sequence[TfResult]:
    """Turns blocks of pixels into channels, or back: a reshape, a transpose and a reshape."""
    n, h, w, d = c.rank(0, 4)
    size = c.whole("block_size")
    if c.text("data_format", "NHWC") != "NHWC" or size < 1:
        raise c.fail("pase supports only data_format NHWC with a block_size of at least 1")
    x = c.x()
    if c.node.op == "SpaceToDepth":
        if h % size or w % size:
            raise c.fail(f"{h} by {w} pixels cannot be divided into blocks of {size}")
        x = nests.reshape(c.b, x, (n, h // size, size, w // size, size, d))
        x = nests.transpose(c.b, x, (0, 1, 3, 2, 4, 5))
        return [nests.reshape(c.b, x, (n, h // size, w // size, size * size * d))]
    if d % (size * size):
        raise c.fail(f"{d} channels cannot be divided into blocks of {size}")
    x = nests.reshape(c.b, x, (n, h, w, size, size, d // size**2))
    x = nests.transpose(c.b, x, (0, 1, 3, 2, 4, 5))
    return [nests.reshape(c.b, x, (n, h * size, w * size, d // size**2))]


@lowers("SpaceToBatchND", "BatchToSpaceND", "SpaceToBatch", "BatchToSpace")
def _batch_blocks(c: TfCall) -> Sequence[TfResult]:
    """Turns blocks of space into batch elements, or back, for dilated convolutions. Unchanged dims may be split."""
    shape, blocks, pads = list(c.shape_of(0)), c.numbers(1, "block shape"), c.numbers(2, "paddings")
    times = elements(blocks)
    if len(pads) != 2 * len(blocks) or len(blocks) >= len(shape) or min(blocks) < 1:
        raise c.fail(f"its blocks {blocks} with paddings {pads} do not match shape {tuple(shape)}")
    grow = c.node.op.startswith("BatchToSpace")
    for i, s in enumerate(blocks, 1):
        pad = pads[2 * i - 2] + pads[2 * i - 1]
        shape[i] = shape[i] * s - pad if grow else (shape[i] + pad) // s
    shape[0] = shape[0] // times if grow else shape[0] * times
    kept = [i > len(blocks) for i in range(len(shape))]
    return [_part(c, c.shape(shape), kept)]


@lowers("Bitcast")
def _bitcast(c: TfCall) -> Sequence[TfResult]:
    from pase.ir.types import itemsize

    x, to = c.x(), c.type("type")
    if itemsize(to) == x.itemsize:
        return nests.elementwise(c.b, FUNCTIONS["bitcast"], [x], [to], name="Bitcast")
    return opaque(c, [(c.hinted(), to)])


@lowers("Merge", "RefMerge")
def _merge(c: TfCall) -> Sequence[TfResult]:
    """The end of a version 1 conditional. Both branches are priced."""
    values = [c.operand(i) for i in range(max(len(c.ins), 1))]
    if all(isinstance(v, (Value, Handle)) for v in values):
        shape = c.broadcast(*[c.shape_of(i) for i in range(len(values))])
        xs = [c.x(i) for i in range(len(values))]
        out = nests.elementwise(c.b, functions.ADD, [*xs, None], [xs[0].dtype], name="Merge", shape=shape)
        return [*out, known(np.array(0, np.int32))]
    return [values[0], known(np.array(0, np.int32))]
