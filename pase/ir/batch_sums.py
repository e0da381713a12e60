"""How the values of micro-batches make up the value of the whole batch: means, sums, and means by a counted number.

A micro-batch's loss is not always its share of a mean. A sum is added up as it is; and a mean over the labels that
count divides by a number that only the whole batch has, which is summed over the micro-batches first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from pase.ir.maps import Walk
from pase.ir.names import dim_classes
from pase.ir.places import Place
from pase.ir.types import Graph, Node, Op

__all__ = ["BatchSums", "ExamplesMeet", "along_batch", "batch_sums"]


class ExamplesMeet(Exception):
    """Where examples of the batch meet so that a step in micro-batches would give other numbers: an op and its line."""


@dataclass(frozen=True, kw_only=True)
class BatchSums:
    """What the k micro-batches of a step have to pass on to each other.

    A value of the whole batch is k ** -power times the sum of the micro-batches' values. totals: tensor -> power, of
    the sums over the batch that depend on no parameter; a micro-batch has to read the whole batch's. outputs: tensor ->
    power, of the results. counting: the ops that make the totals
    and what they follow from.
    """

    totals: Mapping[str, int]
    outputs: Mapping[str, int]
    counting: frozenset[tuple[Place, str]]


@dataclass(frozen=True, kw_only=True)
class _OfBatch:
    """What is known of a tensor. summed: it is a sum over the micro-batch's examples of something that depends on
    parameters. trained: it depends on parameters. totalled: it depends on a total.

    power: the value in a step of one micro-batch is k ** -power times this one; of a sum, times all of them.
    """

    summed: bool = False
    trained: bool = False
    totalled: bool = False
    power: int = 0

    @property
    def share(self) -> int:
        """The power, if it is added to sums: a value that is the same in every micro-batch is then there k times."""
        return self.power if self.summed else self.power + 1


_NONE = _OfBatch()


def batch_sums(graph: Graph, cut: Collection[str], scaled: Callable[[Op], int | None] | None) -> BatchSums:
    """How a micro-batch's values make up those of the whole batch. graph: a micro-batch's, simplified.

    cut: paths of the inputs that are cut into micro-batches. scaled: for an op with a number among its operands, the
    power of k by which the number is larger in a step of one micro-batch; None: it is not a power of it. Without
    it powers are not looked at.

    Raises ExamplesMeet where a value over the whole batch is needed that no sum over micro-batches gives.
    """
    walk = _SumsWalk(graph=graph, cut=frozenset(cut), scaled=scaled)
    for n in graph.nodes:
        for op in n.ops:
            if not op.backward:  # gradients are always summed over the batch
                walk.take(n, op)
    read = {a.tensor for n in graph.nodes for op in n.ops for a in op.reads}
    totals = {t: power for t, power in walk.totals.items() if t in read}
    outputs = {t: walk.values.get(t, _NONE).share for t in graph.outputs}
    return BatchSums(totals=totals, outputs=outputs, counting=_counting(graph, totals))


@dataclass
class _SumsWalk:
    graph: Graph
    cut: frozenset[str]
    scaled: Callable[[Op], int | None] | None
    values: dict[str, _OfBatch] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.classes = dim_classes(self.graph)
        self.batch = {
            self.classes[n.name, d]
            for n in self.graph.nodes
            if n.kind == "input" and self.graph.tensors[n.ops[0].writes[0].tensor].path in self.cut
            for first in n.ops[0].writes[0].map.walks[:1]
            for d in first.dims[:1]
        }

        self._uncut()

    def _uncut(self) -> None:
        """Refuses views that take the batch apart (``view(2, -1)``, ``chunk(2)``): a micro-batch's examples then meet
        others than in the whole batch."""
        for e in self.graph.edges:
            src, dst = self.graph.node[e.src], self.graph.node[e.dst]
            _, write = src.write_of(e.tensor)
            for w, r in zip(write.map.walks, e.access.map.walks, strict=True):
                made, read = _factors(src, w), _factors(dst, r)
                if w.window or r.window or made[-1][2] != read[-1][2]:
                    continue
                for n, mine, others in ((src, made, read), (dst, read, made)):
                    for d, low, high in mine:
                        if self.classes.get((n.name, d)) in self.batch and any(
                            low < end < high for _, _, end in others
                        ):
                            raise ExamplesMeet(f"{dst.main.name} at {dst.main.source or dst.name}")

    def take(self, n: Node, op: Op) -> None:
        reads = [self.values.get(a.tensor, _NONE) for a in op.reads]
        own = {d for d in op.dims if self.classes[n.name, d] in self.batch}
        where = f"{op.name} at {op.source or n.name}"
        if op.kind in ("parameter", "input", "constant"):
            if op.kind == "parameter" and own:  # its rows tell examples by their places along the batch
                raise ExamplesMeet(where)
            state = any(o.kind == "carry" for o in n.ops)  # the last step's: it is no count of this batch
            made = _OfBatch(trained=op.kind == "parameter" or state)
        elif op.kind in ("carry", "output"):
            if op.kind == "carry" and any(v.summed or v.totalled for v in reads):
                raise ExamplesMeet(where)
            made = _OfBatch(trained=True)  # the loop's body, which comes after it, may make it so
        elif any(own - set(a.map.dims) for a in op.writes):
            made = self._sum(op, reads, own, where)
        elif any(v.summed for v in reads):
            if own:
                raise ExamplesMeet(where)
            made = self._of_sums(op, reads, where)
        else:
            if op.kind in ("sequential", "opaque") and along_batch(n, own) and not self._alone(op):
                raise ExamplesMeet(where)
            made = self._joined(op, reads, self._power(op, [v.power for v in reads], where))
        for a in op.writes:
            self.values[a.tensor] = made

    def _alone(self, op: Op) -> bool:
        """Whether it reads single numbers only: the state of a random generator."""
        return all(self.graph.tensors[a.tensor].elements == 1 for a in op.reads)

    def _joined(self, op: Op, reads: list[_OfBatch], power: int, summed: bool = False) -> _OfBatch:
        return _OfBatch(
            summed=summed,
            trained=any(v.trained for v in reads),
            totalled=any(v.totalled for v in reads),
            power=power,
        )

    def _sum(self, op: Op, reads: list[_OfBatch], own: set[str], where: str) -> _OfBatch:
        """A result without the batch's dim."""
        along = [v for v, a in zip(reads, op.reads, strict=True) if own & set(a.map.dims)]
        if not (op.kind == "matmul" or _adds(op)) or not along or any(v.summed for v in reads):
            raise ExamplesMeet(where)
        if self._scale(op) != 0:  # a constant that differs with the batch
            raise ExamplesMeet(where)
        made = self._joined(op, reads, sum(v.power for v in reads), summed=True)
        if made.trained:
            return made
        if made.totalled or len(op.writes) != 1:
            raise ExamplesMeet(where)  # a total of what already reads one would need one more pass
        self.totals[op.writes[0].tensor] = made.power
        return _OfBatch(totalled=True)

    def _of_sums(self, op: Op, reads: list[_OfBatch], where: str) -> _OfBatch:
        """A value of sums, and of what is the same in every micro-batch: linear in the sums."""
        sums = [v for v in reads if v.summed]
        product = op.function.name in ("mul", "div")
        if product and len(sums) == 1 and (op.function.name == "mul" or reads[0].summed):
            return self._joined(op, reads, self._power(op, [v.power for v in reads], where), summed=True)
        if not op.function.linear or self._scale(op) != 0:
            raise ExamplesMeet(where)
        powers = {v.share for v in reads}
        if len(op.reads) == 1 and op.function.name in ("add", "sub"):
            powers.add(_NONE.share)  # the number that it adds
        if len(powers) > 1 and self.scaled is not None:  # a sum and a mean: they are not added up alike
            raise ExamplesMeet(where)
        return self._joined(op, reads, max(powers), summed=True)

    def _scale(self, op: Op) -> int | None:
        return 0 if self.scaled is None else self.scaled(op)

    def _power(self, op: Op, powers: list[int], where: str) -> int:
        if not powers or self.scaled is None:
            return 0
        by = self.scaled(op)
        if by is None:
            raise ExamplesMeet(where)
        if op.function.name in ("mul", "div"):
            sign = -1 if op.function.name == "mul" else 1
            first, *rest = powers
            return first - sign * sum(rest) + sign * by
        if by:
            raise ExamplesMeet(where)
        if not any(powers):
            return 0
        if op.kind in ("matmul", "conv"):
            return sum(powers)
        if not (op.function.linear or op.kind in ("view", "copy")) or len(set(powers)) > 1:
            raise ExamplesMeet(where)
        return powers[0]


def _counting(graph: Graph, totals: Collection[str]) -> frozenset[tuple[Place, str]]:
    """The ops on the way from the inputs to the totals: (place, what it writes)."""
    makers = {a.tensor: op for n in graph.nodes for op in n.ops for a in op.writes}
    found: dict[str, Op] = {}
    left = list(totals)
    while left:
        t = left.pop()
        if t not in found and (op := makers.get(t)) is not None:
            found[t] = op
            left.extend(a.tensor for a in op.reads)
    return frozenset((op.eqn, t) for t, op in found.items())


def along_batch(node: Node, batch: Collection[str]) -> bool:
    """Whether a sequential op runs along the batch: example by example it may be split over it. batch: the dims of the
    op that are the batch's."""
    return any(node.space[d].kind != "parallel" for d in batch)


def _factors(n: Node, walk: Walk) -> list[tuple[str, int, int]]:
    """(dim, stride, stride of the next) of the dims that walk a tensor's dim, minor first; the last one ends at the
    tensor's extent."""
    found, stride = [("", 1, 1)], 1
    for d in reversed([d for d in walk.dims if n.space[d].kind != "ring"]):
        found.append((d, stride, stride := stride * int(n.space[d].size)))
    return found


def _adds(op: Op) -> bool:
    return op.kind == "reduce" and op.function.name == "reduce_sum"
