"""Merged products as ranks of tensor parallelism have them: each rank has its own columns of every part.

A product with one weight for queries, keys and values, or for gate and up, is cut into parts. Under tensor parallelism
each part's own columns are split over the ranks, and a rank's columns of all parts lie together in its weight: that is
how a framework stores them (Megatron-Core, ``linear_qkv`` and ``linear_fc1``). Which column of the weight is which does
not change a price. Thus the columns are taken to lie so that equal shares of all parts follow one another, and a cut
takes its share of each, [share, rest of the columns] -> [share, rest of the part], instead of neighbouring columns.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from pase.ir import Access, AccessMap, Dim, Graph, IterationSpace, Node, Op
from pase.ir.maps import Walk
from pase.ir.parameters import EqualPart, Slice
from pase.tables.layouts import concrete_size

__all__ = ["with_own_columns"]

Columns: TypeAlias = tuple[object, ...]
"""What the columns of a tensor's dim are: the tensors that products with weights made, and how the dim was made of
them. Empty for a weight itself."""


@dataclass(frozen=True, kw_only=True)
class _ColumnCut:
    """An op that takes some of the columns of a dim: elements of ``axis`` of its operand."""

    node: str
    axis: int
    taken: range


def with_own_columns(raw: Graph, ranks: int) -> Graph:
    """Return a traced graph, one op for each node, in which cuts of merged products take a share for each rank.

    Cuts that overlap, or whose columns cannot be divided so, stay as they are.
    """
    columns, cuts = _found(raw)
    changed: dict[str, Node] = {}
    for of, found in cuts.items():
        taken = {c.taken for c in found}
        if any(set(a) & set(b) for a, b in itertools.combinations(taken, 2)):
            continue
        if math.gcd(*map(len, taken), _width(raw, found[0])) % ranks == 0:
            changed |= {c.node: _in_shares(raw, c, ranks) for c in found}
        elif all(len(r) == 1 for r in taken):
            changed |= {n.name: _parts_last(raw, n, axis) for n, axis in _apart(raw, columns, of)}
    return replace(raw, nodes=tuple(changed.get(n.name, n) for n in raw.nodes)) if changed else raw


def _found(raw: Graph) -> tuple[Mapping[tuple[str, int], Columns], Mapping[Columns, list[_ColumnCut]]]:
    """Return what the columns of each dim of a tensor are, for products with weights and what is made of them element
    by element; and the cuts of each."""
    columns: dict[tuple[str, int], Columns] = {}
    cuts: dict[Columns, list[_ColumnCut]] = defaultdict(list)
    for n in raw.nodes:
        for op in n.ops:
            cut = _cut_of(raw, n, op)
            for a in op.writes:
                for i, walk in enumerate(a.map.walks):
                    if cut is not None and cut.axis == i:
                        of = columns.get((op.reads[0].tensor, i))
                        if of:
                            cuts[of].append(cut)
                            columns[a.tensor, i] = (of, a.tensor)
                    elif walk.dims and (made := _made(n, op, a, walk, columns)) is not None:
                        columns[a.tensor, i] = made
    return columns, cuts


def _made(
    n: Node, op: Op, write: Access, walk: Walk, columns: Mapping[tuple[str, int], Columns]
) -> Columns | None:
    """Return what the columns of a dim of a result are; None if they are no product's."""
    if op.kind in ("parameter", "constant", "generate"):  # these can lie in any order
        return ()
    if op.kind == "matmul" and not op.backward:
        weights = [a for a in op.factors if all(columns.get((a.tensor, i)) == () for i, _ in _walked(a))]
        if len(weights) != 1 or walk not in weights[0].map.walks:
            return None
        beside = {d for a in op.factors if a is not weights[0] for d in a.map.dims}
        return None if beside & {*walk.dims} else (write.tensor,)
    if op.kind not in ("elementwise", "view", "reduce", "gather") or walk.window is not None:
        return None
    if op.kind == "gather" and walk not in op.reads[0].map.walks:  # which rows, not columns of a row
        return None
    found: dict[object, None] = {}
    for a in op.reads:
        if not {*walk.dims} & {*a.map.dims}:
            continue
        read = next(((i, w) for i, w in _walked(a) if w.dims[: len(walk.dims)] == walk.dims), None)
        if read is None or read[1].window is not None or (of := columns.get((a.tensor, read[0]))) is None:
            return None
        rest = math.prod(concrete_size(n.space[d].size, n.name) for d in read[1].dims[len(walk.dims) :])
        found |= dict.fromkeys(of if rest == 1 else (of, rest))
    return tuple(found)  # if it is broadcast along the dim, any order does


def _walked(a: Access) -> Iterable[tuple[int, Walk]]:
    """Return the dims of an operand that are walked, with their walks."""
    return [(i, w) for i, w in enumerate(a.map.walks) if w.dims]


def _cut_of(raw: Graph, n: Node, op: Op) -> _ColumnCut | None:
    """Return the cut that an op is; None if it is none, or cuts several dims."""
    p = op.parameters
    if op.kind != "view" or len(op.reads) != 1 or len(n.ops) != 1 or not isinstance(p, Slice | EqualPart):
        return None
    before, after = (
        [concrete_size(size, n.name) for size in raw.tensors[a.tensor].shape]
        for a in (op.reads[0], op.writes[0])
    )
    axes = [i for i, (was, size) in enumerate(zip(before, after, strict=True)) if was != size]
    if len(axes) != 1:
        return None
    (axis,) = axes
    size = after[axis]
    start, step = (p.index * size, 1) if isinstance(p, EqualPart) else (p.start[axis], p.step[axis])
    return _ColumnCut(node=n.name, axis=axis, taken=range(start, start + size * step, step))


def _width(raw: Graph, cut: _ColumnCut) -> int:
    """Return the number of columns of which a cut takes some."""
    (op,) = raw.node[cut.node].ops
    return concrete_size(raw.tensors[op.reads[0].tensor].shape[cut.axis], cut.node)


def _in_shares(raw: Graph, cut: _ColumnCut, share: int) -> Node:
    """Return the node of a cut as [share, rest of the columns] -> [share, rest of the part]."""
    n = raw.node[cut.node]
    (op,) = n.ops
    read, write = op.reads[0], op.writes[0]
    gone = {d for a in (read, write) for d in a.map.walks[cut.axis].dims}
    kept = tuple(d for d in n.space if d.name not in gone)
    names = (name for i in itertools.count() if (name := f"c{i}") not in {d.name for d in kept})
    own = Dim(name=next(names), size=share)
    rests = [
        Dim(name=next(names), size=size // share, kind="replicated")
        for size in (_width(raw, cut), len(cut.taken))
    ]

    def walked(a: Access, rest: Dim) -> Access:
        walk = Walk((own.name, rest.name) if rest.size != 1 else (own.name,))
        return replace(a, map=_with_walk(a.map, cut.axis, walk))

    reads, writes = (walked(read, rests[0]),), (walked(write, rests[1]),)
    space = IterationSpace((*kept, own, *(d for d in rests if d.size != 1)))
    return replace(n, space=space, ops=(replace(op, reads=reads, writes=writes, over=writes[0].map.dims),))


def _apart(raw: Graph, columns: Mapping[tuple[str, int], Columns], of: Columns) -> Iterable[tuple[Node, int]]:
    """Yield the nodes that view columns as [parts, columns of a part], with the result's dim of parts."""
    for n in raw.nodes:
        for op in n.ops:
            if op.kind == "view" and op.parameters is None and len(n.ops) == 1 and len(op.reads) == 1:
                for i, walk in _walked(op.writes[0]):
                    inside = any({*walk.dims} < {*w.dims} for _, w in _walked(op.reads[0]))
                    if inside and columns.get((op.writes[0].tensor, i)) == of:
                        yield n, i


def _parts_last(raw: Graph, n: Node, axis: int) -> Node:
    """Return the node with the number of the part as the minor digit of a column."""
    (op,) = n.ops
    read, parts = op.reads[0], op.writes[0].map.walks[axis].dims
    at, walk = next((i, w) for i, w in _walked(read) if w.dims[: len(parts)] == parts)
    turned = Walk((*walk.dims[len(parts) :], *parts))
    return replace(n, ops=(replace(op, reads=(replace(read, map=_with_walk(read.map, at, turned)),)),))


def _with_walk(m: AccessMap, axis: int, walk: Walk) -> AccessMap:
    """Return a map with another walk of one dim."""
    return AccessMap(tuple(walk if i == axis else w for i, w in enumerate(m.walks)))
