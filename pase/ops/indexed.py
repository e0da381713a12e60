"""Loop nests of lookups and scattered updates, in XLA's form; what is gathered by an index may be split."""

from __future__ import annotations

from collections.abc import Sequence

from pase.ir import AccessMap, DimKind, Size, Tensor, Walk
from pase.ir.sizes import is_one
from pase.ops.builder import GraphBuilder, Read, Write
from pase.ops.nests import Dims

__all__ = ["gather", "scatter"]


def gather(
    b: GraphBuilder, name: str, x: Tensor, ids: Tensor, shape: Sequence[Size], *, offset_dims: Sequence[int],
    collapsed: Sequence[int], indexed: Sequence[int], slice_sizes: Sequence[Size],
    x_batch: Sequence[int] = (), ids_batch: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """XLA's gather; ids' last dim is the index vector. An indexed dim taken one element at a time may be
    split: each shard looks up what it has, and the rows are summed."""
    dims: Dims = {}
    walks_x: list[Walk] = [Walk()] * len(x.shape)
    walks_i: list[Walk] = [Walk()] * len(ids.shape)
    walks_o: list[Walk] = [Walk()] * len(shape)

    def dim(name: str, size: Size, kind: DimKind = "parallel") -> Walk:
        if is_one(size):
            return Walk()
        dims[name] = (size, kind)
        return Walk((name,))

    batch_out = [i for i in range(len(shape)) if i not in offset_dims]
    for i, o in zip(range(len(ids.shape) - 1), batch_out, strict=True):
        walks_i[i] = walks_o[o] = dim(f"i{i}", ids.shape[i])
    if not is_one(ids.shape[-1]):
        walks_i[-1] = dim("iv", ids.shape[-1], "replicated")
    for xd, idd in zip(x_batch, ids_batch, strict=True):
        walks_x[xd] = walks_i[idd]
    kept = [d for d in range(len(x.shape)) if d not in collapsed and d not in x_batch]
    for o, d in zip(offset_dims, kept, strict=True):
        if slice_sizes[d] == x.shape[d] and d not in indexed:
            walks_x[d] = walks_o[o] = dim(f"x{d}", x.shape[d])
        else:
            walks_x[d] = dim(f"x{d}", x.shape[d], "replicated")
            walks_o[o] = dim(f"o{o}", shape[o], "replicated")
    for d in collapsed:
        walks_x[d] = dim(f"x{d}", x.shape[d], "reduction")
    out = AccessMap(tuple(walks_o))
    reads = [Read(x, AccessMap(tuple(walks_x)), sparse=True), Read(ids, AccessMap(tuple(walks_i)))]
    return b.nest(name, "gather", reads, [Write(tuple(shape), x.dtype, out)], dims, over=out.dims)[0]


def scatter(
    b: GraphBuilder, name: str, x: Tensor, ids: Tensor, updates: Tensor, *, window_dims: Sequence[int],
    inserted: Sequence[int], indexed: Sequence[int], x_batch: Sequence[int] = (), ids_batch: Sequence[int] = (),
    combines: bool = True,
) -> Tensor:  # fmt: skip
    """XLA's scatter. combines: updates add up (or take a maximum), so that shards of them give partial results."""
    dims: Dims = {}
    walks_x: list[Walk] = [Walk()] * len(x.shape)
    walks_i: list[Walk] = [Walk()] * len(ids.shape)
    walks_u: list[Walk] = [Walk()] * len(updates.shape)

    def dim(name: str, size: Size, kind: DimKind = "parallel") -> Walk:
        if is_one(size):
            return Walk()
        dims[name] = (size, kind)
        return Walk((name,))

    batch_u = [i for i in range(len(updates.shape)) if i not in window_dims]
    for i, u in zip(range(len(ids.shape) - 1), batch_u, strict=True):
        kind: DimKind = "parallel" if i in ids_batch else "reduction" if combines else "replicated"
        walks_i[i] = walks_u[u] = dim(f"i{i}", ids.shape[i], kind)
    if not is_one(ids.shape[-1]):
        walks_i[-1] = dim("iv", ids.shape[-1], "replicated")
    for xd, idd in zip(x_batch, ids_batch, strict=True):
        walks_x[xd] = walks_i[idd]
    kept = [d for d in range(len(x.shape)) if d not in inserted and d not in x_batch]
    for u, d in zip(window_dims, kept, strict=True):
        if updates.shape[u] == x.shape[d] and d not in indexed:
            walks_x[d] = walks_u[u] = dim(f"x{d}", x.shape[d])
        else:
            walks_x[d] = dim(f"x{d}", x.shape[d], "replicated")
            walks_u[u] = dim(f"u{u}", updates.shape[u], "replicated")
    for d in inserted:
        walks_x[d] = dim(f"x{d}", x.shape[d])
    access = AccessMap(tuple(walks_x))
    reads = [Read(x, access), Read(ids, AccessMap(tuple(walks_i))), Read(updates, AccessMap(tuple(walks_u)))]
    over = AccessMap(tuple(walks_u)).dims
    return b.nest(name, "scatter", reads, [Write(tuple(x.shape), x.dtype, access)], dims, over=over)[0]
