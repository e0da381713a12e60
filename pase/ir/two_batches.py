"""Compares one program on two sizes of batch: its graph for the whole batch with its graph for a micro-batch.

The two must be the same but for sizes, and but for numbers that are larger by a power of the sizes' ratio, such as the
number by which a mean divides. Whatever else differs, and whatever the graphs do not say, is refused or left unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest

from pase.ir.batch_dims import BatchDims, batch_dims
from pase.ir.constants import Constant, OpOnBoth, derived, number_power, of_contents, periods_along, power_of
from pase.ir.functions import CAST, COPY, MOVE, RANDOM
from pase.ir.parameters import Iota
from pase.ir.places import Place, SourceLine
from pase.ir.types import LEAF, Graph, Node, Op

__all__ = ["FullGraph", "Otherwise", "PowersInGraph", "TwoBatches", "depends_on_data"]


class Otherwise(Exception):
    """The two programs differ in more than sizes. The text says in what, and on which line."""


@dataclass(frozen=True, kw_only=True)
class FullGraph:
    """A raw graph in which nothing that is known without data was computed beforehand, and what the graph leaves out.

    contents: constant -> its number, its array, or a name of what is stored elsewhere. A constant that is missing is
        not known.
    attributes: place of an op -> what the program says about the op, for ops that the graph does not determine.
    """

    graph: Graph
    contents: Mapping[str, object] = field(default_factory=dict)
    attributes: Mapping[Place, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TwoBatches:
    """The programs of a whole batch and of a micro-batch, which is k times smaller.

    Raises Otherwise if the programs differ in more than sizes and numbers.
    """

    whole: FullGraph
    part: FullGraph
    k: int
    powers: dict[str, int | None] = field(default_factory=dict, init=False)
    """First result of an op of the micro-batch -> the power by which the op's numbers are larger on the whole batch.
    None if it is not known. Ops whose numbers are the same are left out."""
    constants: dict[str, Constant | None] = field(default_factory=dict, init=False)
    """Value of the micro-batch's program that depends on no data -> how it compares; None if it may differ in any
    way."""
    same: dict[str, str] = field(default_factory=dict, init=False)
    """Tensor of the micro-batch's graph -> that of the whole batch's."""
    zero: set[str] = field(default_factory=set, init=False)
    """Loop carries that are zero before the first iteration."""

    def __post_init__(self) -> None:
        _BothGraphs(self).run()

    @property
    def cut(self) -> frozenset[str]:
        """The paths of the inputs that have the batch's dim."""
        return _cut(self)


def _cut(both: TwoBatches) -> frozenset[str]:
    big, small = (
        {t.path: t.shape for t in g.graph.tensors.values() if t.role == "input"}
        for g in (both.whole, both.part)
    )
    return frozenset(path for path, shape in small.items() if big.get(path) != shape)


def depends_on(graph: Graph, tensors: Collection[str]) -> set[str]:
    """These tensors and all that depend on them, also through a loop's carry."""
    found, before = set(tensors), -1
    while len(found) > before:
        before = len(found)
        for n in graph.nodes:
            of_node = any(a.tensor in found for op in n.ops for a in op.reads)
            for op in n.ops:
                carried = (
                    op.kind == "carry" and of_node
                )  # what the last iteration passes on is read by another op
                if carried or any(a.tensor in found for a in op.reads):
                    found.update(a.tensor for a in op.writes)
    return found


def depends_on_data(graph: Graph) -> set[str]:
    """The tensors that depend on a parameter, an input, a loop's carry or random numbers."""
    found: set[str] = set()
    for n in graph.nodes:
        for op in n.ops:
            drawn = op.function is RANDOM and not op.reads
            if (
                op.kind in ("parameter", "input", "carry")
                or drawn
                or any(a.tensor in found for a in op.reads)
            ):
                found.update(a.tensor for a in op.writes)
    return found


@dataclass(frozen=True, kw_only=True)
class PowersInGraph:
    """What a comparison shows about the ops of a graph that was simplified, for ``batch_sums``.

    graph: the raw graph that was simplified. It may lack ops of the micro-batch's full graph that depend on no data.
    """

    both: TwoBatches
    graph: Graph

    def power(self, op: Op) -> int | None:
        """The power by which the numbers of an op are larger on the whole batch; None if it is not known."""
        full = self._names.get(op.writes[0].tensor)
        if full is None:  # an op that simplification added, or one that has no counterpart
            return 0 if op.kind == "copy" else None
        return self.both.powers.get(full, 0)

    def begins_at_zero(self, op: Op) -> bool:
        """Whether a loop's carry is zero before the first iteration."""
        return self._names.get(op.writes[0].tensor) in self.both.zero

    @cached_property
    def _names(self) -> Mapping[str, str]:
        """Tensor of ``graph`` -> the same tensor of the full graph. They are found by their ops' places."""
        if self.graph is self.both.part.graph:
            return {t: t for t in self.graph.tensors}
        own, full = _by_place(self.graph), _by_place(self.both.part.graph)
        alike = (zip(ts, full[at], strict=True) for at, ts in own.items() if len(full.get(at, ())) == len(ts))
        return dict(pair for pairs in alike for pair in pairs)


def _by_place(graph: Graph) -> dict[tuple[object, ...], list[str]]:
    """(place, kind, function) -> what these ops write from data, in order."""
    data, found = depends_on_data(graph), dict[tuple[object, ...], list[str]]()
    for n in graph.nodes:
        for op in n.ops:
            for w in op.writes:
                if w.tensor in data:
                    found.setdefault((op.eqn, op.kind, op.function), []).append(w.tensor)
    return found


@dataclass(frozen=True)
class _BothGraphs:
    """One walk over both graphs."""

    both: TwoBatches
    data: set[str] = field(default_factory=set)
    counts: set[str] = field(default_factory=set)
    """Constants that are 0, 1, 2, … along their only dim. A scatter of these at the places of a sort inverts the
    sort."""

    def run(self) -> None:
        both = self.both
        self.data.update(depends_on_data(both.part.graph))
        dims = batch_dims(both.part.graph, _cut(both))
        later: list[tuple[Node, Node, Op, Op]] = []
        for n, m in zip_longest(_forward(both.whole.graph), _forward(both.part.graph)):
            if n is None or m is None:
                raise self._other("numbers of ops", *(x and x.name for x in (n, m)), at=(n or m).source)
            if len(n.ops) != len(m.ops):
                raise self._other(f"loops at {m.name}", len(n.ops), len(m.ops), at=m.source)
            self._op(n, m, n.ops[0], m.ops[0], dims)
            later += [(n, m, a, b) for a, b in zip(n.ops[1:], m.ops[1:], strict=True)]
        for n, m, a, b in later:
            self._closed(n, m, a, b)
        self._paired("results", both.whole.graph.outputs, both.part.graph.outputs, m.source)

    def _closed(self, n: Node, m: Node, a: Op, b: Op) -> None:
        """The op that hands a carry, or the next step's state, its next value."""
        self._paired("variables", [x.tensor for x in a.reads], [x.tensor for x in b.reads], b.source)
        trips = [(o.times, g.ops[0].times) for o, g in ((a, n), (b, m))]
        if trips[0][0] * trips[1][1] != trips[1][0] * trips[0][1]:
            raise self._other("trip counts of the loop", trips[0][0], trips[1][0], at=b.source or m.source)
        t = b.reads[0].tensor
        if t not in self.data and not _plain(self.both.constants.get(t)):
            raise self._other(f"values of what '{m.name}' carries", "one", "another", at=b.source or m.source)

    def _op(self, n: Node, m: Node, a: Op, b: Op, dims: BatchDims) -> None:
        both, at = self.both, b.source or m.source
        if (a.name, a.kind, a.function) != (b.name, b.kind, b.function):
            raise self._other("operations", a.name, b.name, at=at)
        if [s.kind for s in a.scope] != [s.kind for s in b.scope]:
            raise self._other(f"loops around {b.name}", len(a.scope), len(b.scope), at=at)
        self._paired(f"variables in {b.name}", [x.tensor for x in a.reads], [x.tensor for x in b.reads], at)
        if len(a.writes) != len(b.writes) or _read(a) != _read(b):
            raise self._other(f"operands of {b.name}", _read(a), _read(b), at=at)
        both.same.update((y.tensor, x.tensor) for x, y in zip(a.writes, b.writes, strict=True))
        for x, y in zip(a.writes, b.writes, strict=True):
            one, other = both.whole.graph.tensors[x.tensor], both.part.graph.tensors[y.tensor]
            if (one.dtype, one.role, len(one.shape)) != (other.dtype, other.role, len(other.shape)):
                raise self._other(f"types of {b.name}", one.dtype, other.dtype, at=at)
            if one.role in ("parameter", "input") and one.path != other.path:
                raise self._other("arguments", one.path, other.path, at=at)
        if b.kind in LEAF:
            self._leaf(a, b)
        elif not b.writes or any(w.tensor in self.data for w in b.writes):
            self._of_data(n, m, a, b, dims)
        else:
            made = (
                derived(self._pair(n, m, a, b), [c for c in self._reads(b) if c is not None])
                if self._known(b)
                else None
            )
            both.constants.update((w.tensor, made) for w in b.writes)
            if _counts(b) or ([x.tensor in self.counts for x in b.reads] == [True] and _keeps(m, b)):
                self.counts.add(b.writes[0].tensor)

    def _leaf(self, a: Op, b: Op) -> None:
        if b.kind != "constant":
            return
        (x,), (y,) = a.writes, b.writes
        one, other = self.both.whole.graph.tensors[x.tensor], self.both.part.graph.tensors[y.tensor]
        whole, part = (
            t.number if t.number is not None else side.contents.get(t.name)
            for side, t in ((self.both.whole, one), (self.both.part, other))
        )
        found = of_contents(whole, part, self.both.k)
        if found is not None and len(found.periods) != len(
            other.shape
        ):  # one number in all elements, or a name
            differ = tuple(int(s != r) for s, r in zip(one.shape, other.shape, strict=True))
            found = replace(found, periods=differ) if found.uniform or not any(differ) else None
        self.both.constants[y.tensor] = found

    def _of_data(self, n: Node, m: Node, a: Op, b: Op, dims: BatchDims) -> None:
        """Checks an op that depends on data, and finds the power of its numbers."""
        both, at = self.both, b.source or m.source
        pair = self._pair(n, m, a, b)
        if not pair.same:
            raise self._other(f"parameters of {b.name}", a.parameters, b.parameters, at=at)
        if [x.map for x in (*a.reads, *a.writes)] != [x.map for x in (*b.reads, *b.writes)]:
            raise self._other(f"shapes of {b.name}", a.einsum, b.einsum, at=at)
        for d in pair.op.dims:
            whole, part = pair.sizes(d)
            if whole != part and (whole != part * both.k or (m.name, d) not in dims.held):
                raise self._other(
                    f"sizes of {b.name} along a dim that is not the batch's", whole, part, at=at
                )
        reads = self._reads(b)
        if b.kind == "carry":
            self._begun(b)
        if b.kind == "carry" or not b.writes:
            return
        first, power = b.writes[0].tensor, None
        if self._known(b) and self._aligned(pair, reads, m, dims):
            by = number_power(a.numbers or (), b.numbers or (), both.k)
            if by is None:
                raise self._other(f"numbers in {b.name}", a.literals, b.literals, at=at)
            power = power_of(b, [0 if c is None else c.power for c in reads], by)
            power = -power if power and b.function.name == "div" else power
        if power != 0:
            both.powers[first] = power

    def _begun(self, carry: Op) -> None:
        """What a loop carries before the first iteration, if it depends on no data."""
        (t,), made = (a.tensor for a in carry.reads), [a.tensor for a in carry.writes]
        found = self.both.constants.get(t)
        if t in self.data:
            return
        if found is not None and found.zero:
            self.both.zero.update(made)
        if not _plain(found):
            self.both.constants.update(dict.fromkeys(made))
            self.data.difference_update(made)

    def _aligned(self, pair: OpOnBoth, reads: Sequence[Constant | None], m: Node, dims: BatchDims) -> bool:
        """Whether the constants among the operands are the same for every example, as the op reads them."""
        along = periods_along(pair, reads)
        return along is not None and all(
            p <= 1 or (dims.trailing.get((m.name, d), 0) % p == 0 and dims.trailing.get((m.name, d), 0) > 0)
            for d, p in along.items()
        )

    def _pair(self, n: Node, m: Node, a: Op, b: Op) -> OpOnBoth:
        told = [s.attributes.get(o.eqn) for s, o in ((self.both.whole, a), (self.both.part, b))]
        same = a.parameters == b.parameters and (not _open(m, b) or told[0] == told[1])
        return OpOnBoth(
            whole=a,
            op=b,
            whole_space=n.space,
            space=m.space,
            tensors=self.both.part.graph.tensors,
            k=self.both.k,
            same=same,
        )

    def _reads(self, op: Op) -> list[Constant | None]:
        """What is known about the op's operands that depend on no data; None for the others."""
        return [None if self._free(op, a.tensor) else self.both.constants.get(a.tensor) for a in op.reads]

    def _free(self, op: Op, t: str) -> bool:
        return t in self.data or (op.kind == "scatter" and t in self.counts)

    def _known(self, op: Op) -> bool:
        """Whether it is known how all operands compare that depend on no data."""
        return all(
            self._free(op, a.tensor) or self.both.constants.get(a.tensor) is not None for a in op.reads
        )

    def _paired(self, what: str, whole: Sequence[str], part: Sequence[str], at: SourceLine) -> None:
        """Raises Otherwise if these tensors of the two graphs do not stand for each other. A carry's next value may be
        written later."""
        for x, y in zip_longest(whole, part):
            if x is None or y is None or self.both.same.get(y, x) != x:
                raise self._other(what, x, y, at=at)

    def _other(self, what: str, whole: object, part: object, *, at: SourceLine) -> Otherwise:
        return Otherwise(f"other {what}, {whole} and {part}, at {at or 'an unknown line'}")


def _forward(graph: Graph) -> Iterator[Node]:
    """The nodes without those of derivative rules: gradients are always summed over the batch."""
    return (n for n in graph.nodes if not n.ops[0].backward)


def _read(op: Op) -> list[bool]:
    """For each operand, whether it is read rather than a number."""
    return [x is None for x in op.numbers or ()]


def _counts(op: Op) -> bool:
    """Whether the op makes the numbers 0, 1, 2, … along its only dim."""
    at = op.parameters
    return isinstance(at, Iota) and (at.start, at.step) == (0, 1) and len(op.writes[0].map.dims) == 1


def _keeps(n: Node, op: Op) -> bool:
    """Whether the op keeps all elements of its only operand in order, and adds none."""
    walked = {a.map.dims for a in (*op.reads, *op.writes)}
    same = len(walked) == 1 and all(n.space[d].kind == "parallel" for d in op.dims)
    return same and op.function in (CAST, COPY, MOVE)


def _plain(c: Constant | None) -> bool:
    """Whether a constant is the same on both batches, whatever the example."""
    return c is not None and c.power == 0 and not any(p > 1 for p in c.periods)


def _open(n: Node, op: Op) -> bool:
    """Whether the graph does not determine what the op computes."""
    read, written = ({d for a in side for d in a.map.dims} for side in (op.reads, op.writes))
    cut = (
        op.kind == "view"
        and op.name != "reshape"
        and any(n.space[d].kind == "replicated" for d in read ^ written)
    )
    free = op.kind in ("opaque", "sequential", "generate", "gather", "scatter", "window", "attention", "conv")
    drawn = op.function is RANDOM and not op.reads
    return op.literals is None or (op.parameters is None and (free or cut) and not drawn)
