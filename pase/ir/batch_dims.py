"""Finds the batch in a graph: which iteration dims walk it, alone or merged with other dims."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pase.ir.dims import Conflict, DimTable
from pase.ir.maps import AccessMap, Walk
from pase.ir.sizes import Size, is_one, product
from pase.ir.types import Edge, Graph, Node, Op

__all__ = ["BatchDims", "batch_dims"]

_BatchDigits = tuple[Hashable, ...]
_NodeDim = tuple[str, str]
"""(node, dim)"""


@dataclass(frozen=True, kw_only=True)
class BatchDims:
    """Where the batch lies in a graph.

    digits: the batch, major to minor: one digit, or several if a view factors it.
    held: dim -> the digits of the batch in it. Such a dim may contain other digits as well.
    trailing: for a dim in which the whole batch comes first, the elements that each example has in it.
    walked: dim -> all its digits, each with its size.
    recut: reads that regroup the batch with a dim that it is merged with, as (node, tensor, map).
    """

    digits: _BatchDigits
    held: Mapping[_NodeDim, _BatchDigits]
    trailing: Mapping[_NodeDim, Size]
    walked: Mapping[_NodeDim, tuple[tuple[Hashable, Size], ...]]
    recut: frozenset[tuple[str, str, AccessMap]]

    def of(self, n: Node, op: Op) -> frozenset[str]:
        """The dims of an op that contain the batch."""
        return frozenset(d for d in op.dims if (n.name, d) in self.held)

    def apart(self, n: Node, op: Op) -> bool:
        """Whether a tensor of the op has the batch in an unusual form: not whole in one of its dims, or twice. A tensor
        without the batch does not count."""
        if any((n.name, a.tensor, a.map) in self.recut for a in op.reads):
            return True
        walks = ([self._in(n, w) for w in a.map.walks] for a in (*op.reads, *op.writes))
        return any([x for x in each if x] not in ([], [self.digits]) for each in walks)

    def inner(self, n: Node, walk: Walk) -> int | None:
        """The elements that come after the batch in a tensor's dim; None if the batch is not whole in it."""
        every = [x for d in walk.dims for x in self.walked.get((n.name, d), ())]
        at = next((i for i, (x, _) in enumerate(every) if x in self.digits), 0)
        stop = at + len(self.digits)
        if not self.digits or tuple(x for x, _ in every[at:stop]) != self.digits or walk.window:
            return None
        size = product(size for _, size in every[stop:])
        return size if isinstance(size, int) else None

    def _in(self, n: Node, walk: Walk) -> _BatchDigits:
        return tuple(x for d in walk.dims for x in self.held.get((n.name, d), ()))

    def pairs(self, n: Node, op: Op) -> bool:
        """Whether an op walks the batch twice, that is, works on every pair of examples."""
        return sum(len(self.held[n.name, d]) for d in self.of(n, op)) > len(self.digits)


def batch_dims(graph: Graph, cut: Collection[str]) -> BatchDims:
    """Finds the batch: the first dim of the inputs with the paths in ``cut``.

    Dims of two nodes that walk one tensor are unified, and split if the other node has them split. A dim that walks
    both the batch and the positions therefore has both as its digits.
    """
    table = DimTable()
    for n in graph.nodes:
        for d in n.space:
            table.add((n.name, d.name), d.size, d.kind)
    inputs = [n for n in graph.nodes if n.kind == "input"]
    firsts = [
        [(n.name, d) for d in walk.dims]
        for n in inputs
        if graph.tensors[n.ops[0].writes[0].tensor].path in cut
        for walk in n.ops[0].writes[0].map.walks[:1]
    ]
    shared = [(e, made, read) for e in graph.edges for made, read in _walked(graph, e)]
    moved = [pair for n in graph.nodes for op in n.ops if op.kind == "scatter" for pair in _moved(n, op)]
    alike = [(firsts[0], f) for f in firsts[1:]] + [(made, read) for _, made, read in shared]
    for one, other in (*alike, *moved):
        with suppress(Conflict):  # dims that were unified before the conflict stay unified
            table.unify(one, other)

    def digits(dims: Sequence[_NodeDim]) -> list[Hashable]:
        return [x for d in dims for x in table.resolve(d) if not is_one(table.size(x))]

    batch = tuple(digits(firsts[0])) if firsts else ()
    walked = {(n.name, d.name): digits([(n.name, d.name)]) for n in graph.nodes for d in n.space}
    held = {d: tuple(x for x in xs if x in batch) for d, xs in walked.items()}
    first = {d: xs for d, xs in walked.items() if batch and tuple(xs[: len(batch)]) == batch}
    recut = (e for e, made, read in shared if set(batch) & _apart(digits(made), digits(read)))
    return BatchDims(
        digits=batch,
        held={d: found for d, found in held.items() if found},
        trailing={d: product(table.size(x) for x in xs[len(batch) :]) for d, xs in first.items()},
        walked={d: tuple((x, table.size(x)) for x in xs) for d, xs in walked.items()},
        recut=frozenset((e.dst, e.tensor, e.access.map) for e in recut),
    )


def _walked(graph: Graph, e: Edge) -> Iterator[tuple[list[_NodeDim], list[_NodeDim]]]:
    """For each dim of an edge's tensor, yields the dims that write it and the dims that read it. If either side walks
    it through a window, the reading dims are empty."""
    src, dst = graph.node[e.src], graph.node[e.dst]
    _, write = src.write_of(e.tensor)
    for w, r in zip(write.map.walks, e.access.map.walks, strict=True):
        made, read = (
            [(n.name, d) for d in walk.dims if n.space[d].kind != "ring"] for walk, n in ((w, src), (r, dst))
        )
        yield made, [] if w.window or r.window else read


def _moved(n: Node, op: Op) -> Iterator[tuple[list[_NodeDim], list[_NodeDim]]]:
    """If a scatter reorders a dim, yields the dim that it writes and each dim of the same size that it reads from."""
    into, others = (set(a.map.dims) for a in (op.writes[0], op.reads[1]))
    for d in into - others - set(op.reads[2].map.dims):
        yield from (
            ([(n.name, d)], [(n.name, x)]) for x in others - into if n.space[x].size == n.space[d].size
        )


def _apart(one: list[Hashable], other: list[Hashable]) -> set[Hashable]:
    """What remains of two lists of digits of one dim without their common prefix and their common suffix."""
    while one and other and one[0] == other[0]:
        one, other = one[1:], other[1:]
    while one and other and one[-1] == other[-1]:
        one, other = one[:-1], other[:-1]
    return {*one, *other}
