"""Rules for ATen ops that move or make data: views, slices, joins, padding, indexing, constants."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pase.frontends.common.slicing import join, one_dim, part, spread, take, take_along
from pase.frontends.common.values import Value
from pase.frontends.torch.rules import lowers
from pase.frontends.torch.values import TorchCall
from pase.ir import functions
from pase.ir.parameters import Iota, Pad, Slice
from pase.ops import indexed, nests

__all__: list[str] = []


@lowers(
    "view",
    "_unsafe_view",
    "reshape",
    "unsqueeze",
    "squeeze",
    "flatten",
    "unflatten",
    "alias",
    "clone",
    "contiguous",
    "lift_fresh_copy",
    "view_copy",
    "_reshape_alias",
    "copy",
    "resolve_conj",
    "resolve_neg",
    "broadcast_to",
    "expand",
    "expand_copy",
    "expand_as",
    "as_strided_copy",
)
def _view(c: TorchCall) -> Value:
    """The same elements in another shape. Dims of one element may be broadcast."""
    x, (shape, dtype) = c.x("src" if c.op == "copy" else "self"), c.out()
    if x.note == ("filled",):
        return c.filled(shape, dtype, x.number if x.dtype == dtype else None)
    x = x if x.dtype == dtype else c.elementwise([x], functions.CAST, dtype=dtype)
    return c.reshape(x, shape) if math.prod(shape) == x.elements else _repeated(c, x, shape)


def _repeated(c: TorchCall, x: Value, shape: Sequence[int]) -> Value:
    """A broadcast. Of heads [batch, groups, 1, positions, width], it is made when something other than attention reads
    it; see ``shared_heads``."""
    of_heads = len(x.shape) == 5 and tuple(shape) == (*x.shape[:2], shape[2], *x.shape[3:])
    if not of_heads or (x.tensor is None and x.make is None):
        return spread(c, x, shape)
    heads = c.reshape(x, (*x.shape[:2], *x.shape[3:]))
    return c.later(shape, x.dtype, lambda: c.tensor(spread(c, x, shape)), ("repeated", heads))


@lowers("permute", "transpose", "t", "movedim", "swapaxes", "numpy_T", "permute_copy", "adjoint", "mT")
def _permute(c: TorchCall) -> Value:
    x = c.x()
    rank = len(x.shape)
    order = list(range(rank))
    if c.op.startswith("permute"):
        order = c.axes(c.arg("dims"), rank)
    elif c.op == "transpose":
        i, j = c.axis(c.arg("dim0"), max(rank, 1)), c.axis(c.arg("dim1"), max(rank, 1))
        if rank:
            order[i], order[j] = j, i
    elif c.op == "movedim":
        src, dst = c.axes(c.ints("source", 1), rank), c.axes(c.ints("destination", 1), rank)
        order = [i for i in order if i not in src]
        for at, i in sorted(zip(dst, src, strict=True)):
            order.insert(at, i)
    elif c.op in ("t", "numpy_T"):
        order.reverse()
    elif rank > 1:
        order[-2:] = order[:-3:-1]
    if x.note == ("filled",):
        return c.filled(c.shape_out, x.dtype, x.number)
    return c.transpose(x, order)


def _cut(
    c: TorchCall, x: Value, axis: int, start: int, stop: int, step: int = 1, name: str = "slice"
) -> Value:
    """The elements of x from start to stop along a dim."""
    size = len(range(start, stop, step))
    if size == x.shape[axis]:
        return x
    shape = [size if i == axis else s for i, s in enumerate(x.shape)]
    if x.note == ("filled",):
        return c.filled(shape, x.dtype, x.number)
    note = (axis, start, stop) if step == 1 else ()
    kept = [i != axis for i in range(len(shape))]
    return part(c, x, shape, kept, name, note, one_dim(x.shape, axis, start, step))


@lowers("slice", "narrow", "slice_copy")
def _slice(c: TorchCall) -> Value:
    x = c.x()
    axis = c.axis(c.arg("dim", 0), len(x.shape))
    if c.op == "narrow":
        start = c.arg("start") % x.shape[axis]
        return _cut(c, x, axis, start, start + c.arg("length"))
    at = slice(c.arg("start"), c.arg("end"), c.arg("step", 1)).indices(x.shape[axis])
    return _cut(c, x, axis, *at)


@lowers("select", "select_copy")
def _select(c: TorchCall) -> Value:
    x = c.x()
    axis = c.axis(c.arg("dim"), len(x.shape))
    at = c.arg("index") % x.shape[axis]
    return c.reshape(_cut(c, x, axis, at, at + 1), c.shape_out)


@lowers(
    "split",
    "split_with_sizes",
    "chunk",
    "unbind",
    "tensor_split",
    "unsafe_split",
    "split_with_sizes_copy",
    "unsafe_chunk",
)
def _split(c: TorchCall) -> Sequence[Value]:
    x = c.x()
    axis = c.axis(c.arg("dim", 0), len(x.shape))
    out, at = [], 0
    for i in range(len(c.outs)):
        shape = c.out(i)[0]
        size = 1 if c.op == "unbind" else shape[axis]
        out.append(c.reshape(_cut(c, x, axis, at, at + size, name="split"), shape))
        at += size
    return out


@lowers("cat", "concat", "stack")
def _cat(c: TorchCall) -> Value:
    values = [v for v in c.values if v.shape != (0,)]
    shape, dtype = c.out()
    axis = c.axis(c.arg("dim", 0), len(shape))
    if c.op == "stack":
        values = [c.reshape(v, (*v.shape[:axis], 1, *v.shape[axis:])) for v in values]
    if all(v.note == ("filled",) for v in values):
        return c.filled(shape, dtype)
    return join(c, values, axis)


@lowers("repeat", "tile")
def _repeat(c: TorchCall) -> Value:
    x, shape = c.x(), c.shape_out
    if x.note == ("filled",):
        return c.filled(shape, x.dtype)
    x = c.reshape(x, (*[1] * (len(shape) - len(x.shape)), *x.shape))
    if all(s in (1, t) for s, t in zip(x.shape, shape, strict=True)):
        return spread(c, x, shape)
    if not c.low.folds:
        apart = [part for s, t in zip(x.shape, shape, strict=True) for part in (t // s, s)]
        one = c.reshape(x, [part for s in x.shape for part in (1, s)])
        return c.reshape(spread(c, one, apart), shape)
    kept = [s == t for s, t in zip(x.shape, shape, strict=True)]
    return c.value(nests.restrict(c.b, "tile", [c.tensor(x)], shape, kept))


@lowers("repeat_interleave")
def _interleave(c: TorchCall) -> Value:
    """Repeats each element along a dim, or without one along the flattened operand, a number of times."""
    x, shape, dim = c.x(), c.shape_out, c.arg("dim")
    times = c.arg("repeats")
    if not isinstance(times, int):
        raise c.fail("pase reads only a single number of repeats")
    if dim is None:
        x, dim = c.reshape(x, (math.prod(x.shape),)), 0
    axis = c.axis(dim, len(x.shape))
    x = c.reshape(x, (*x.shape[: axis + 1], 1, *x.shape[axis + 1 :]))
    return c.reshape(_repeated(c, x, (*x.shape[: axis + 1], times, *x.shape[axis + 2 :])), shape)


@lowers(
    "pad",
    "constant_pad_nd",
    "reflection_pad1d",
    "reflection_pad2d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
    "flip",
    "roll",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_linear1d",
    "upsample_trilinear3d",
    "_upsample_bilinear2d_aa",
    "upsample_nearest3d",
    "_upsample_bicubic2d_aa",
)
def _restrict(c: TorchCall) -> Value:
    """Ops that change or reorder some dims. These dims are not split."""
    x, shape = c.values[0], c.shape_out
    changed = c.axes(c.ints("dims", 1), len(shape)) if c.op in ("flip", "roll") else ()
    kept = [s == t and i not in changed for i, (s, t) in enumerate(zip(x.shape, shape, strict=True))]
    if all(kept):
        return x
    if x.note == ("filled",):
        return c.filled(shape, x.dtype)
    parameters: Slice | Pad | None = None
    if c.op == "flip":
        parameters = Slice(
            start=tuple(s - 1 if i in changed else 0 for i, s in enumerate(shape)),
            step=tuple(-1 if i in changed else 1 for i in range(len(shape))),
        )
    elif c.op == "constant_pad_nd" or (c.op == "pad" and c.arg("mode", "constant") == "constant"):
        ends = list(c.arg("pad"))
        before = [0] * (len(shape) - len(ends) // 2) + ends[-2::-2]
        parameters = Pad(before=tuple(before), interior=(0,) * len(shape), value=c.arg("value", 0.0))
    return c.value(nests.restrict(c.b, c.op.strip("_"), [c.tensor(x)], shape, kept, parameters))


@lowers("slice_scatter", "select_scatter")
def _written(c: TorchCall) -> Value:
    """x with a part of it replaced."""
    x, new = c.x(), c.x("src")
    axis = c.axis(c.arg("dim", 0), len(x.shape))
    if c.op == "select_scatter":
        new = c.reshape(new, (*x.shape[:axis], 1, *x.shape[axis + 1 :]))
    if new.shape == x.shape:
        return new
    kept = [i != axis for i in range(len(x.shape))]
    return c.value(nests.restrict(c.b, "dynamic_update_slice", c.tensors(x, new), x.shape, kept))


# Indices.


@lowers("index_select")
def _index_select(c: TorchCall) -> Value:
    return take(c, c.x(), c.x("index"), c.arg("dim"))


@lowers("gather")
def _gather(c: TorchCall) -> Value:
    return take_along(c, c.x(), c.x("index"), c.arg("dim"))


def _indices(c: TorchCall, rank: int) -> tuple[list[int], list[Value]]:
    """The indexed dims, and their indices broadcast to a common shape."""
    given = {i: v for i, v in enumerate(c.arg("indices")) if v is not None}
    shape = c.broadcast(*(v.shape for v in given.values()))
    return list(given), [_wide(c, v, shape) for v in given.values()]


def _wide(c: TorchCall, v: Value, shape: Sequence[int]) -> Value:
    return c.filled(shape, v.dtype, v.number) if v.note == ("filled",) else spread(c, v, shape)


def _together(c: TorchCall, ids: Sequence[Value]) -> Value:
    """The indices as vectors: [..., one index per indexed dim]."""
    each = [c.reshape(v, (*v.shape, 1)) for v in ids]
    return join(c, each, len(each[0].shape) - 1) if len(each) > 1 else each[0]


@lowers("index", "_unsafe_index")
def _index(c: TorchCall) -> Value:
    """x[i, :, j]. The indices' shape replaces the indexed dims if these are adjacent; otherwise it comes first."""
    x = c.x()
    at, ids = _indices(c, len(x.shape))
    if len(at) == 1:
        return take(c, x, ids[0], at[0])
    first = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    n = len(ids[0].shape)
    made = indexed.gather(
        c.b,
        "gather",
        c.tensor(x),
        c.tensor(_together(c, ids)),
        c.shape_out,
        indexed.IndexedDims(
            window=[i for i in range(len(c.shape_out)) if not first <= i < first + n],
            dropped=at,
            indexed=at,
        ),
    )
    return c.value(made)


@lowers("index_put", "_unsafe_index_put")
def _index_put(c: TorchCall) -> Value:
    x, new = c.x(), c.x("values")
    at, ids = _indices(c, len(x.shape))
    first = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    n = len(ids[0].shape)
    kept = [s for i, s in enumerate(x.shape) if i not in at]
    shape = (*kept[:first], *ids[0].shape, *kept[first:])
    made = indexed.scatter(
        c.b,
        "scatter",
        c.tensor(x),
        c.tensor(_together(c, ids)),
        c.tensor(_wide(c, new, shape)),
        indexed.IndexedDims(
            window=[i for i in range(len(shape)) if not first <= i < first + n], dropped=at, indexed=at
        ),
        combines=bool(c.arg("accumulate", False)),
    )
    return c.value(made)


@lowers("index_add", "index_copy")
def _index_add(c: TorchCall) -> Value:
    x, ids, new = c.x(), c.x("index"), c.x("source")
    axis = c.axis(c.arg("dim"), len(x.shape))
    made = indexed.scatter(
        c.b,
        "scatter",
        c.tensor(x),
        c.tensor(c.reshape(ids, (ids.elements, 1))),
        c.tensor(new),
        indexed.IndexedDims(
            window=[i for i in range(len(new.shape)) if i != axis], dropped=[axis], indexed=[axis]
        ),
        combines=c.op == "index_add",
    )
    return c.value(made)


@lowers("scatter", "scatter_add", "scatter_reduce")
def _scatter(c: TorchCall) -> Value:
    """Writes elements at indices of a dim. Any other dim may be split if it has the same size in all operands."""
    x, ids = c.x(), c.x("index")
    new = c.opt("src")
    axis = c.axis(c.arg("dim"), len(x.shape))
    reads = [x, ids] if new is None or new.note == ("filled",) else [x, new, ids]
    alike = [len({v.shape[i] for v in reads}) == 1 for i in range(len(x.shape))]
    kept = [i != axis and same for i, same in enumerate(alike)]
    return c.value(nests.restrict(c.b, "scatter", c.tensors(*reads), x.shape, kept))


@lowers("one_hot")
def _one_hot(c: TorchCall) -> Value:
    shape, dtype = c.out()
    ids = c.reshape(c.x(), (*c.x().shape, 1))
    (out,) = nests.elementwise(
        c.b, functions.EQUAL, [c.tensor(ids), None], [dtype], name="one_hot", shape=shape
    )
    return c.value(out)


# Tensors that are made without operands.


@lowers("arange", "linspace")
def _arange(c: TorchCall) -> Value:
    shape, dtype = c.out()
    start, step = c.arg("start", 0), c.arg("step", 1)
    known = c.op == "arange" and all(isinstance(v, (int, float)) for v in (start, step))
    parameters = Iota(axis=0, start=start, step=step) if known else None
    return c.value(nests.generate(c.b, functions.IOTA, shape, dtype, parameters=parameters))


@lowers(
    "full",
    "full_like",
    "zeros",
    "zeros_like",
    "ones",
    "ones_like",
    "empty",
    "empty_like",
    "new_full",
    "new_zeros",
    "new_ones",
    "new_empty",
    "scalar_tensor",
    "fill",
    "empty_strided",
    "new_empty_strided",
    "eye",
    "empty_permuted",
)
def _filled(c: TorchCall) -> Value:
    if c.op == "eye":
        return c.nothing(*c.out()) if c.low.folds else c.filled(*c.out())
    known = {"zeros": 0, "ones": 1}.get(c.op.removeprefix("new_").removesuffix("_like"))
    known = 0 if known is None and "empty" in c.op and not c.low.folds else known  # its contents do not count
    told = next((c.given[k] for k in ("fill_value", "value", "s") if k in c.given), known)
    if isinstance(told, Value) and not c.low.folds:
        return spread(c, told, c.shape_out)
    return c.filled(*c.out(), told.scalar if isinstance(told, Value) else told)


@lowers("histc", "bincount")
def _histogram(c: TorchCall) -> Value:
    """The number of occurrences of each value: a few integers."""
    x = c.x()
    made = nests.opaque(c.b, c.op, [c.tensor(x)], [c.out()], flops=2.0 * x.elements, differentiable=False)
    return c.value(made[0])


@lowers("searchsorted", "bucketize")
def _places_in_order(c: TorchCall) -> Value:
    """The place of each value in its sorted row. Rows may be split, and so may the values that share a single row."""
    row = c.x("sorted_sequence" if c.op == "searchsorted" else "boundaries")
    rank = len(row.shape) - 1
    rows = [row] if (order := c.opt("sorter")) is None else [row, order]
    values = [] if (x := c.opt("self")) is None else [x]
    made = nests.batched(
        c.b,
        c.op,
        c.tensors(*(rows if rank else []), *values),
        [c.out()],
        rank or len(c.shape_out),
        flops=math.ceil(math.log2(row.shape[-1] + 1)) * (float(c.shape_out[-1]) if rank else 1.0),
        whole=c.tensors(*([] if rank else rows)),
        function=functions.BISECT,
    )
    return c.value(made[0])
