"""Convolutions and pools in Mesh-TensorFlow, whose own ops need unsplit rows and columns, and channels in one dim.

If the plan splits rows (or columns), they become blocks, one block per device, and the index of the block becomes a
batch dim. The rows that a window reads from neighbouring blocks are exchanged first (``ops.halo``). Channels that are
split over two axes are two dims, which the convolution in ``runtime_ops`` accepts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pase.backends.mesh_tf.lower import refuse, squeezed
from pase.backends.mesh_tf.names import MeshTfDim, TensorDims, flat
from pase.backends.mesh_tf.program import MeshTfProgram, MeshTfValue
from pase.ir import Node, Op, Window
from pase.tables.layouts import concrete_size

__all__ = ["conv2d", "pool2d"]


def _windows(op: Op) -> dict[int, Window]:
    """The dims of the operand that are rows and columns -> their windows. If only one dim is under a window, another
    one counts as rows or columns under windows of one element."""
    walks, made = op.reads[0].map.walks, set(op.writes[0].map.dims)
    found = {i: w.window for i, w in enumerate(walks) if w.window is not None}
    if len(found) == 1:
        free = [i for i, w in enumerate(walks) if i not in found and set(w.dims) <= made]
        found |= {i: Window(extent=1) for i in free[1:2]}
    if len(found) != 2 or len(walks) != 4:
        raise refuse(op, "only windows over the rows and columns of images can be expressed")
    return dict(sorted(found.items()))


def _extents(node: Node, op: Op) -> list[int]:
    """The result's numbers of rows and columns."""
    dims = (op.reads[0].map.walks[i].dims for i in _windows(op))
    return [concrete_size(node.space[d[0]].size, op.name) if d else 1 for d in dims]


def _padding(window: Window, size: int, made: int) -> tuple[int, int]:
    """The elements in front of a dim and after it that its windows read. made: the extent of the result."""
    return window.before, max(0, (made - 1) * window.stride + window.extent - size - window.before)


def _placed(x: MeshTfValue, places: Sequence[int | None]) -> MeshTfValue:
    """The value with its tensor dims in this order. None: a dim of one element."""
    return replace(x, dims=tuple(() if i is None else x.dims[i] for i in places))


def _made(op: Op, y: MeshTfValue, roles: Mapping[str, int]) -> MeshTfValue:
    """The result with its tensor dims in the graph's order. roles: iteration dim -> the dim of y that it walks."""
    return _placed(y, [roles[w.dims[0]] if w.dims else None for w in op.writes[0].map.walks])


def _operands(
    p: MeshTfProgram, node: Node, op: Op
) -> tuple[MeshTfValue, MeshTfValue, list[Window], dict[str, int]]:
    """(images [batch, rows, columns, channels], filters [rows, columns, channels, out channels], the windows over rows
    and columns, iteration dim -> the dim of the result [batch, rows, columns, channels] that it walks)."""
    read, filters = op.reads[0].map.walks, op.reads[1].map.walks
    made, slides = set(op.writes[0].map.dims), _windows(op)
    if made & set(op.reads[0].map.dims) & set(op.reads[1].map.dims):
        raise refuse(op, "Mesh-TensorFlow's convolutions have no groups")
    batch = next((i for i, w in enumerate(read) if i not in slides and w.dims and set(w.dims) <= made), None)
    channels = next((i for i, w in enumerate(read) if i not in slides and set(w.dims) - made), None)
    taps = iter([j for j, w in enumerate(filters) if any(node.space[d].kind == "window" for d in w.dims)])
    over = set(read[channels].dims) if channels is not None else set()
    places = [
        *(next(taps, None) if window.extent > 1 else None for window in slides.values()),
        next((j for j, w in enumerate(filters) if w.dims and set(w.dims) <= over), None),
        next((j for j, w in enumerate(filters) if w.dims and set(w.dims) <= made), None),
    ]
    x = _placed(p.read(node, op.reads[0]), (batch, *slides, channels))
    w = _placed(p.read(node, op.reads[1]), places)
    if [window.extent for window in slides.values()] != list(w.shape[:2]):
        raise refuse(op, "Mesh-TensorFlow's convolutions have no dilation")
    roles = {d: k for k, i in enumerate((batch, *slides)) if i is not None for d in read[i].dims}
    return x, w, list(slides.values()), dict.fromkeys(made, 3) | roles


def conv2d(p: MeshTfProgram, node: Node, op: Op) -> MeshTfValue:
    """Translate a convolution over rows and columns."""
    x, w, slides, roles = _operands(p, node, op)
    extents, strides = w.shape[:2], [window.stride for window in slides]
    shape = [0, *_extents(node, op)]
    pads = [_padding(v, x.shape[k], shape[k]) for k, v in enumerate(slides, 1)]
    w = _one_dim(p, w, (0, 1, 2, 3))
    x = _one_dim(p, x, (1, 2, 3))
    if set(x.dims[3]) != set(w.dims[2]):
        x = p.to(x, (*x.dims[:3], w.dims[2]))
    blocks: list[tuple[MeshTfDim, ...]] = []
    rows: list[MeshTfDim] = []
    for k in (1, 2):
        low = pads[k - 1][0]
        x, block, d = _apart(p, op, x, k)
        if block:
            reach = extents[k - 1] - strides[k - 1] - low
            if shape[k] * strides[k - 1] != d.size * block[0].size or reach < 0 or max(low, reach) > d.size:
                raise _crooked(op, k, block[0].axis)
            code = f"ops.halo({x.code}, {p.dim(block[0])}, {p.dim(d)}, {low}, {reach})"
            wide = replace(d, size=d.size + low + reach)
            x = p.let(
                code,
                tuple(wide if e == d else e for e in x.order),
                tuple((*block, wide) if i == k else g for i, g in enumerate(x.dims)),
                x.dtype,
            )
            pads[k - 1] = (0, 0)
            d = replace(d, size=shape[k] // block[0].size)
        else:
            d = replace(d, size=shape[k])
        blocks.append(block)
        rows.append(d)
    batch = (*x.dims[0], *blocks[0], *blocks[1])
    x = p.ordered(x, (*batch, x.dims[1][-1], x.dims[2][-1], *w.dims[2]))
    w = p.ordered(w, flat(w.dims))
    order = (*batch, *rows, *w.dims[3])
    code = (
        f"ops.conv2d({x.code}, {w.code}, over={p.shape(w.dims[2])}, strides={tuple(strides)}, padding={pads})"
    )
    dims = (x.dims[0], (*blocks[0], rows[0]), (*blocks[1], rows[1]), w.dims[3])
    return _made(op, squeezed(p, p.let(code, order, dims, x.dtype)), roles)


def pool2d(p: MeshTfProgram, node: Node, op: Op) -> MeshTfValue:
    """Translate the sum or the maximum over windows of rows and columns."""
    read, slides = op.reads[0].map.walks, _windows(op)
    kind = {"reduce_window_max": "MAX", "reduce_window_sum": "SUM"}.get(op.function.name)
    if kind is None or op.parameters is not None:
        raise refuse(op, "only sums and maxima over windows without dilation can be expressed")
    first, last = (i for i in range(4) if i not in slides)
    x = _placed(p.read(node, op.reads[0]), (first, *slides, last))
    window, strides = ([getattr(v, key) for v in slides.values()] for key in ("extent", "stride"))
    shape = [0, *_extents(node, op)]
    padding = [_padding(v, x.shape[k], shape[k]) for k, v in enumerate(slides.values(), 1)]
    roles = {d: k for k, i in enumerate((first, *slides, last)) for d in read[i].dims}
    x = _one_dim(p, x, (1, 2, 3))
    blocks: list[tuple[MeshTfDim, ...]] = []
    rows: list[MeshTfDim] = []
    for k in (1, 2):
        x, block, d = _apart(p, op, x, k)
        ways = block[0].size if block else 1
        if block and (window[k - 1] != strides[k - 1] or shape[k] * strides[k - 1] != d.size * ways):
            raise _crooked(op, k, block[0].axis)
        blocks.append(block)
        rows.append(replace(d, size=shape[k] // ways))
    batch = (*x.dims[0], *blocks[0], *blocks[1])
    x = p.ordered(x, (*batch, x.dims[1][-1], x.dims[2][-1], *x.dims[3]))
    code = (
        f'ops.pool2d({x.code}, "{kind}", {p.shape((x.dims[1][-1], x.dims[2][-1]))}, window={tuple(window)}, '
        f"strides={tuple(strides)}, padding={padding})"
    )
    dims = (x.dims[0], (*blocks[0], rows[0]), (*blocks[1], rows[1]), x.dims[3])
    return _made(op, squeezed(p, p.let(code, (*batch, *rows, *x.dims[3]), dims, x.dtype)), roles)


def _crooked(op: Op, k: int, axis: str | None) -> Exception:
    return refuse(
        op,
        f"the plan splits its {'rows' if k == 1 else 'columns'} over mesh axis {axis}, and its windows cannot be "
        f"computed from a device's own block and the rows that its neighbours send",
        "compile for a mesh in which the batch or the channels use that axis (--mesh)",
    )


def _apart(
    p: MeshTfProgram, op: Op, x: MeshTfValue, k: int
) -> tuple[MeshTfValue, tuple[MeshTfDim, ...], MeshTfDim]:
    """(the value, the dim of blocks if dim k is split, the dim of rows within a block)."""
    group = x.dims[k]
    axes = [d.axis for d in group if d.axis is not None]
    if not axes and len(group) == 1:
        return x, (), group[0]
    if len(axes) > 1 or (axes and group[0].axis is None):
        raise refuse(op, f"the plan splits its rows or columns over several mesh axes ({', '.join(axes)})")
    extent = x.shape[k]
    ways = p.names.axes[axes[0]] if axes else 1
    base = group[0].base
    block = (MeshTfDim(f"{base}_blocks", ways, axes[0]),) if axes else ()
    own = MeshTfDim(f"{base}_rows", extent // ways)
    return p.to(x, tuple((*block, own) if i == k else g for i, g in enumerate(x.dims))), block, own


def _one_dim(p: MeshTfProgram, x: MeshTfValue, where: Sequence[int]) -> MeshTfValue:
    """The value with an explicit dim of size 1 at each of these positions where it has none."""
    dims: TensorDims = tuple(g if g or i not in where else (p.names.fresh(1),) for i, g in enumerate(x.dims))
    if dims == x.dims:
        return x
    x = p.ordered(x, flat(x.dims))
    return p.let(f"mtf.reshape({x.code}, {p.shape(flat(dims))})", flat(dims), dims, x.dtype)
