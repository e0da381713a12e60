"""Convolutions and pools in Mesh-TensorFlow, whose own ops need unsplit rows and columns, and channels in one dim.

If the plan splits rows (or columns), they become blocks, one block per device, and the index of the block becomes a
batch dim. The rows that a window reads from neighbouring blocks are exchanged first (``ops.halo``). Channels that are
split over two axes are two dims, which the convolution in ``runtime_ops`` accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pase.backends.mesh_tf.lower import refuse, squeezed
from pase.backends.mesh_tf.names import MeshTfDim, TensorDims, flat
from pase.backends.mesh_tf.program import MeshTfProgram, MeshTfValue, SourceOp

__all__ = ["conv2d", "pool2d"]


def conv2d(
    p: MeshTfProgram,
    op: SourceOp,
    x: MeshTfValue,
    w: MeshTfValue,
    shape: Sequence[int],
    *,
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> MeshTfValue:
    """x: [b, h, w, c], w: [h, w, c, n], shape: of the result, [b, h, w, n]. These orders need not be the source's."""
    extents = w.shape[:2]
    w = _one_dim(p, w, (0, 1, 2, 3))
    x = _one_dim(p, x, (1, 2, 3))
    if set(x.dims[3]) != set(w.dims[2]):
        x = p.to(x, (*x.dims[:3], w.dims[2]))
    pads = [(int(low), int(high)) for low, high in padding]
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
    return squeezed(p, p.let(code, order, dims, x.dtype))


def pool2d(
    p: MeshTfProgram,
    op: SourceOp,
    x: MeshTfValue,
    kind: str,
    shape: Sequence[int],
    *,
    window: Sequence[int],
    strides: Sequence[int],
    padding: str,
) -> MeshTfValue:
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
        f'strides={tuple(strides)}, padding="{padding}")'
    )
    dims = (x.dims[0], (*blocks[0], rows[0]), (*blocks[1], rows[1]), x.dims[3])
    return squeezed(p, p.let(code, (*batch, *rows, *x.dims[3]), dims, x.dtype))


def _crooked(op: SourceOp, k: int, axis: str | None) -> Exception:
    return refuse(
        op,
        f"the plan splits its {'rows' if k == 1 else 'columns'} over mesh axis {axis}, and its windows cannot be "
        f"computed from a device's own block and the rows that its neighbours send",
        "compile for a mesh in which the batch or the channels use that axis (--mesh)",
    )


def _apart(
    p: MeshTfProgram, op: SourceOp, x: MeshTfValue, k: int
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
