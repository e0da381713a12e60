"""Loop nests whose indices are known only at run time (lookups, scattered updates, sparse products), and bodies that
the user wrote for one device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pase.errors import PaseError
from pase.ir import AccessMap, DimKind, Size, Tensor, Walk
from pase.ir.functions import SCATTER, SCATTER_ADD, Function
from pase.ir.sizes import is_one, quotient
from pase.ops.builder import Computes, Dims, GraphBuilder, Read, Write

__all__ = ["IndexedDims", "columns", "gather", "manual", "scatter"]


@dataclass(frozen=True, kw_only=True)
class IndexedDims:
    """How dims of x, of the indices and of a part of x belong together, by XLA's numbers. The part is a gather's result
    or a scatter's updates.

    window: dims of the part that lie along dims of x, in x's order. dropped: dims of x that the part lacks, because it
    has one element of each. indexed: dims of x that the index vector names. x_batch, ids_batch: dims of x and of ids
    that are walked together.
    """

    window: Sequence[int]
    dropped: Sequence[int]
    indexed: Sequence[int]
    x_batch: Sequence[int] = ()
    ids_batch: Sequence[int] = ()


@dataclass(frozen=True)
class _IndexedMaps:
    """The dims of a gather or a scatter, and the maps of its three tensors."""

    dims: Dims
    x: AccessMap
    ids: AccessMap
    part: AccessMap


def _indexed_maps(
    x: Tensor,
    ids: Tensor,
    part: Sequence[Size],
    at: IndexedDims,
    kinds: Sequence[DimKind],
    dropped: DimKind,
    letter: str,
) -> _IndexedMaps:
    """Return the maps.

    part: the part's shape. kinds: those of the dims of ids. dropped: the kind of a dropped dim. letter: what the names
    of the part's own dims begin with.
    """
    dims: Dims = {}
    walks_x: list[Walk] = [Walk()] * len(x.shape)
    walks_i: list[Walk] = [Walk()] * len(ids.shape)
    walks_p: list[Walk] = [Walk()] * len(part)

    def dim(name: str, size: Size, kind: DimKind = "parallel") -> Walk:
        if is_one(size):
            return Walk()
        dims[name] = (size, kind)
        return Walk((name,))

    by_index = [p for p in range(len(part)) if p not in at.window]
    for i, p in zip(range(len(ids.shape) - 1), by_index, strict=True):
        walks_i[i] = walks_p[p] = dim(f"i{i}", ids.shape[i], kinds[i])
    if not is_one(ids.shape[-1]):
        walks_i[-1] = dim("iv", ids.shape[-1], "replicated")
    for xd, idd in zip(at.x_batch, at.ids_batch, strict=True):
        walks_x[xd] = walks_i[idd]
    kept = [d for d in range(len(x.shape)) if d not in at.dropped and d not in at.x_batch]
    for p, d in zip(at.window, kept, strict=True):
        if part[p] == x.shape[d] and d not in at.indexed:
            walks_x[d] = walks_p[p] = dim(f"x{d}", x.shape[d])
        else:
            walks_x[d] = dim(f"x{d}", x.shape[d], "replicated")
            walks_p[p] = dim(f"{letter}{p}", part[p], "replicated")
    for d in at.dropped:
        walks_x[d] = dim(f"x{d}", x.shape[d], dropped)
    maps = (AccessMap(tuple(walks)) for walks in (walks_x, walks_i, walks_p))
    return _IndexedMaps(dims, *maps)


def gather(
    b: GraphBuilder,
    name: str,
    x: Tensor,
    ids: Tensor,
    shape: Sequence[Size],
    at: IndexedDims,
) -> Tensor:
    """XLA's gather; the last dim of ids is the index vector. An indexed dim that is read one element at a time may be
    split: each shard looks up the rows that it has, and the results are summed."""
    of = _indexed_maps(x, ids, shape, at, ["parallel"] * len(ids.shape), "reduction", "o")
    reads = [Read(x, of.x, sparse=True), Read(ids, of.ids)]
    return b.nest(name, "gather", reads, [Write(tuple(shape), x.dtype, of.part)], of.dims, over=of.part.dims)[
        0
    ]


def scatter(
    b: GraphBuilder,
    name: str,
    x: Tensor,
    ids: Tensor,
    updates: Tensor,
    at: IndexedDims,
    *,
    combines: bool = True,
    function: Function | None = None,
) -> Tensor:
    """XLA's scatter.

    combines: whether updates combine (by a sum or a maximum), so that shards of them give partial results.
    function: how updates combine; None: they are added, or replace what was there if they do not combine.
    """
    function = function or (SCATTER_ADD if combines else SCATTER)
    own: DimKind = "reduction" if combines else "replicated"
    kinds: list[DimKind] = ["parallel" if i in at.ids_batch else own for i in range(len(ids.shape))]
    of = _indexed_maps(x, ids, updates.shape, at, kinds, "parallel", "u")
    reads = [Read(x, of.x), Read(ids, of.ids), Read(updates, of.part)]
    write = Write(tuple(x.shape), x.dtype, of.x)
    return b.nest(name, "scatter", reads, [write], of.dims, Computes(function=function), over=of.part.dims)[0]


def columns(
    b: GraphBuilder,
    name: str,
    sparse: Sequence[Tensor],
    dense: Tensor,
    free: Sequence[int],
    shape: Sequence[Size],
    dtype: str,
    first: int,
) -> Tensor:
    """A sparse matrix (its elements and their indices) times a dense one.

    Dim ``free[k]`` of the dense matrix is dim ``first + k`` of the result, and may be split. The FLOPs are two per
    element and column.
    """
    dims: Dims = {}

    def walk(key: str, size: Size, kind: DimKind) -> Walk:
        if is_one(size):
            return Walk()
        dims[key] = (size, kind)
        return Walk((key,))

    def of_element(t: Tensor) -> AccessMap:
        return AccessMap(tuple(walk(f"i{i}" if i else "e", s, "replicated") for i, s in enumerate(t.shape)))

    at = {i: f"n{k}" for k, i in enumerate(free)}
    whole = AccessMap(
        tuple(
            walk(at[i], s, "parallel") if i in at else walk(f"k{i}", s, "replicated")
            for i, s in enumerate(dense.shape)
        )
    )
    reads = [*(Read(t, of_element(t)) for t in sparse), Read(dense, whole)]
    rows = [walk(f"m{i}", s, "replicated") for i, s in enumerate(shape[:first])]
    out = AccessMap((*rows, *(walk(f"n{k}", s, "parallel") for k, s in enumerate(shape[first:]))))
    over = [d for d, (_, kind) in dims.items() if d == "e" or kind == "parallel"]
    return b.nest(name, "opaque", reads, [Write(tuple(shape), dtype, out)], dims, flops=2.0, over=over)[0]


def manual(
    b: GraphBuilder,
    name: str,
    inputs: Sequence[tuple[Tensor, Sequence[Sequence[str]]]],
    outs: Sequence[tuple[tuple[Size, ...], str, Sequence[Sequence[str]]]],
    axes: Mapping[str, int],
    *,
    flops: float,
) -> tuple[Tensor, ...]:
    """A body that the user wrote for one device of their own mesh (shard_map).

    inputs, outs: each with the mesh axes that split it, per tensor dim.
    axes: the sizes of the mesh's axes. Each axis is a dim that may be split; if it is split less, one device runs
        several of its parts.
    flops: FLOPs of one device.
    """
    dims: Dims = {f"x{i}": (size, "parallel") for i, size in enumerate(axes.values()) if size > 1}
    at = {axis: f"x{i}" for i, axis in enumerate(axes)}
    work = tuple(dims)

    def walks(shape: Sequence[Size], split: Sequence[Sequence[str]], prefix: str) -> AccessMap:
        found = []
        for i, size in enumerate(shape):
            over = [a for a in (split[i] if i < len(split) else ()) if axes[a] > 1]
            rest = quotient(size, math.prod(axes[a] for a in over))
            if rest is None:
                raise PaseError(
                    f"a dim of size {size} cannot be split evenly over {', '.join(over)}",
                    where=f"{name} at {b.source}",
                    fix="pad the dim, or split it over fewer axes",
                )
            inner = () if is_one(rest) else (f"{prefix}_{i}",)
            dims.update({d: (rest, "replicated") for d in inner})
            found.append(Walk((*(at[a] for a in over), *inner)))
        return AccessMap(tuple(found))

    reads = [Read(t, walks(t.shape, split, f"r{k}")) for k, (t, split) in enumerate(inputs)]
    writes = [Write(tuple(s), d, walks(s, split, f"w{k}")) for k, (s, d, split) in enumerate(outs)]
    return b.nest(name, "opaque", reads, writes, dims, flops=flops, over=work)
