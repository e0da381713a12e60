"""How the values of micro-batches combine into the value of the whole batch: as sums, as means, or as means by a count.

A micro-batch's loss is not always its share of a mean. A sum is simply added up. A mean over the labels that count
divides by a number that only the whole batch has; this number is summed over the micro-batches first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from pase.ir.batch_dims import BatchDims, batch_dims
from pase.ir.functions import ARGSORT, CAST, FLOOR_DIV, NEG, SORT
from pase.ir.places import Place, Scope
from pase.ir.types import LEAF, Access, Graph, Node, Op, is_floating

__all__ = ["BatchSums", "BothSizes", "ExamplesMeet", "batch_sums", "counting_ops"]


class ExamplesMeet(Exception):
    """Examples of the batch meet in an op, so that a step in micro-batches would give other numbers. The text names the
    op and its line."""


@dataclass(frozen=True, kw_only=True)
class BatchSums:
    """What the k micro-batches of a step must pass on to each other.

    A value of the whole batch is k ** -power times the sum of the micro-batches' values.

    totals: tensor -> power, for the sums over the batch that depend on no parameter. A micro-batch must read the whole
        batch's total.
    outputs: tensor -> power, for the results.
    counting: the ops that compute the totals, and the ops that they depend on.
    scaled: sums to which a micro-batch adds terms of different powers, such as a mean by a count and a mean over the
        examples: the tensor that is written -> for each operand, the power of k by which it is multiplied before.
    """

    totals: Mapping[str, int]
    outputs: Mapping[str, int]
    counting: frozenset[tuple[Place, str]]
    scaled: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def power(self) -> int:
        """That of the loss, which is the first result."""
        return next(iter(self.outputs.values()))

    @property
    def mean(self) -> bool:
        """Whether the loss is the mean of the micro-batches' own."""
        return not self.totals and not self.scaled and self.power == 1


@dataclass(frozen=True, kw_only=True)
class _OfBatch:
    """What is known about a tensor.

    summed: it is a sum, over the micro-batch's examples, of something that depends on parameters.
    trained: it depends on parameters.
    totalled: it depends on a total.
    power: the value in a step of one micro-batch is k ** -power times this value, or for a sum, times the sum of the
        values of all micro-batches.
    order: how its elements are ordered along the batch: "" as in the batch, a sort's name if that sort ordered it, None
        if it is the same everywhere along the batch.
    places: the name of a sort whose indices the values are: where the sort took its elements from, or, if the tensor
        itself is in the batch's order, where the sort put them.
    zero: it is zero as far as is known: a loop's carry before the first iteration, which may become a sum of any power.
    met: the op, with its line, that combined several examples in a way that is not a sum over them.
    """

    summed: bool = False
    trained: bool = False
    totalled: bool = False
    power: int = 0
    order: str | None = None
    places: str = ""
    zero: bool = False
    met: str = ""

    @property
    def share(self) -> int:
        """The power of the value as a term of a sum. A value that is equal in every micro-batch is added k times."""
        return self.power if self.summed else self.power + 1


_NONE = _OfBatch()
_NOT_LINEAR = (
    "which is not linear in the sums over all examples that it reads (if the loss allows it, compute it of each "
    "example's own sums, and take the mean of the results)"
)
_BY_COUNT = (
    "whose divisor is a sum over all examples that depends on parameters (for a mean by a count, as nanmean is, make "
    "the count of inputs alone: multiply by a mask of the labels, and divide by the mask's sum; otherwise divide each "
    "example's own sums, and take the mean of the ratios)"
)


class BothSizes(Protocol):
    """What a comparison with the program of the whole batch shows about the program of a micro-batch."""

    def power(self, op: Op) -> int | None:
        """For an op with a number among its operands: the power of k by which the number is larger in a step of one
        micro-batch. None if it is no power of k."""

    def begins_at_zero(self, op: Op) -> bool:
        """Whether a loop's carry is zero before the first iteration. op: the first op of the carry's node."""


def batch_sums(
    graph: Graph,
    cut: Collection[str],
    both: BothSizes | None,
    *,
    state_of_whole: bool,
    of_loops: bool = False,
) -> BatchSums:
    """Determines how a micro-batch's values combine into those of the whole batch.

    graph: the simplified graph of one micro-batch.
    cut: paths of the inputs that are cut into micro-batches.
    both: the comparison with the whole batch's program; without it, powers are not considered.
    state_of_whole: the next step's state must be the one that a step of the whole batch computes; otherwise each
        micro-batch passes its own state on to the next.
    of_loops: a total may be what a loop returns, such as a count that it carries. Inside the loop, each micro-batch
        then reads its own.

    Raises ExamplesMeet if a value over the whole batch is needed that no sum over micro-batches gives. The ends of the
    groups of a product's rows are not checked: they are assumed to follow from the sort that ordered the rows.
    """
    if of_loops:
        try:
            return _batch_sums(graph, cut, both, state_of_whole, True)
        except ExamplesMeet:
            pass  # a micro-batch may need the whole batch's total inside of the loop
    return _batch_sums(graph, cut, both, state_of_whole, False)


def _batch_sums(
    graph: Graph, cut: Collection[str], both: BothSizes | None, state_of_whole: bool, of_loops: bool
) -> BatchSums:
    dims, carried = batch_dims(graph, cut), dict[str, _OfBatch]()
    while True:
        walk = _SumsWalk(graph=graph, batch=dims, both=both, carried=carried, of_loops=of_loops)
        for n in graph.nodes:
            for op in n.ops:
                if not op.backward:  # gradients are always summed over the batch
                    walk.take(n, op)
        # What the body does to a carry is known only after the body, so the walk repeats until nothing new is found.
        if not (new := walk.closed()):
            break
        carried = carried | new
    if state_of_whole:
        walk.check_state()
    if of_loops:
        walk.check_readers()
    made = {t: walk.values.get(t, _NONE) for t in graph.outputs}
    if met := next((v.met for v in made.values() if v.met), ""):
        raise ExamplesMeet(met)
    read = {a.tensor for n in graph.nodes for op in n.ops for a in op.reads}
    totals = {t: power for t, power in walk.totals.items() if t in read}
    outputs = {t: v.share for t, v in made.items()}
    return BatchSums(
        totals=totals, outputs=outputs, counting=counting_ops(graph, totals), scaled=dict(walk.scaled)
    )


@dataclass(frozen=True, kw_only=True)
class _SumsWalk:
    """One walk over the graph.

    carried: what is known about loops' carries, by the tensor that the body reads. A carry that is missing has what is
        known about its initial value.
    of_loops: a sum inside of a loop that depends on no parameter becomes a total where it is read outside of it.
    """

    graph: Graph
    batch: BatchDims
    both: BothSizes | None
    carried: Mapping[str, _OfBatch]
    of_loops: bool
    values: dict[str, _OfBatch] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    scaled: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def closed(self) -> dict[str, _OfBatch]:
        """Carries for which an iteration of the body changes what is known, and what is then known."""
        out, conditions = dict[str, _OfBatch](), self._conditions()
        for n in self.graph.nodes:
            first = n.ops[0]
            if first.kind != "carry" or first.backward:
                continue
            ((t, known),) = ((a.tensor, self.values[a.tensor]) for a in first.writes)
            for op in n.ops[1:]:
                if op.kind != "carry" or op.backward:
                    continue
                made = self.values.get(op.reads[0].tensor, _NONE)
                met = next((conditions[s] for s in op.scope if s in conditions), "")
                new = self._round(n, first, known, replace(made, met=met or made.met))
                if new != known:
                    out[t] = known = new
        return out

    def check_state(self) -> None:
        """Raises ExamplesMeet if the next step's state is computed from several examples of this batch: each
        micro-batch would compute a different one."""
        for n in self.graph.nodes:
            for op in n.ops:
                if op.kind == "carry" and not op.writes and n.ops[0].kind in LEAF:
                    made = self.values.get(op.reads[0].tensor, _NONE)
                    if made.met or made.summed or made.totalled:
                        path = self.graph.tensors[n.ops[0].writes[0].tensor].path
                        raise ExamplesMeet(made.met or f"the next value of '{path}'")

    def check_readers(self) -> None:
        """Raises ExamplesMeet if another loop than the one that carries a total reads it. It would read the whole
        batch's, but its own values are those of the micro-batch."""
        makers = {a.tensor: op for n in self.graph.nodes for op in n.ops for a in op.writes}
        for n in self.graph.nodes:
            for op in n.ops:
                for t in (a.tensor for a in op.reads if a.tensor in self.totals and _in_loop(op)):
                    inside = {s.path for s in op.scope}
                    if makers[t].kind != "carry" or f"{makers[t].eqn.path}." not in inside:
                        raise ExamplesMeet(f"{op.name} at {op.source or n.name}")

    def _conditions(self) -> dict[Scope, str]:
        """Loops whose condition depends on several examples of the batch together -> where these meet. No op reads a
        loop's condition."""
        read = {a.tensor for n in self.graph.nodes for op in n.ops for a in op.reads} | set(
            self.graph.outputs
        )
        out = dict[Scope, str]()
        for n in self.graph.nodes:
            for op in n.ops:
                if not op.writes or op.writes[-1].tensor in read or op.backward:
                    continue
                t = self.graph.tensors[op.writes[-1].tensor]
                v = self.values.get(t.name, _NONE)
                if t.dtype == "bool" and (v.met or v.summed or v.totalled):
                    out.update((s, v.met or f"{op.name} at {op.source or n.name}") for s in op.scope[-1:])
        return out

    def _round(self, n: Node, first: Op, known: _OfBatch, made: _OfBatch) -> _OfBatch:
        """What is known about a carry that was ``known`` before an iteration which turned it into ``made``."""
        where = f"what the loop at {first.source or n.name} carries"
        if known.met or made.met or made.order or made.places or made.totalled:
            return _OfBatch(met=known.met or made.met or where)
        trained = known.trained or made.trained
        if known.zero and not made.zero:
            return replace(known, zero=False, summed=made.summed, power=made.power, trained=trained)
        if self.both is None or made.zero or made.share == known.share:
            return replace(known, summed=known.summed or made.summed, trained=trained)
        return _OfBatch(met=where)

    def take(self, n: Node, op: Op) -> None:
        """Records what an op makes. If examples meet in it, values that depend on it are not examined further."""
        reads = [self._read(op, a.tensor) for a in op.factors]
        where = f"{op.name} at {op.source or n.name}"
        try:
            if met := next((v.met for v in reads if v.met), ""):
                raise ExamplesMeet(met)
            made = self._made(n, op, reads, where)
        except ExamplesMeet as e:
            if op.kind == "output":
                raise
            made = [_OfBatch(met=str(e))] * len(op.writes)
        self.values.update(zip((a.tensor for a in op.writes), made, strict=True))

    def _read(self, op: Op, tensor: str) -> _OfBatch:
        """What is known about a tensor where an op reads it."""
        v = self.values.get(tensor, _NONE)
        if not v.summed or v.trained or v.met or op.kind == "output" or _in_loop(op):
            return v
        self.totals[tensor] = v.power
        return _OfBatch(totalled=True)

    def _made(self, n: Node, op: Op, reads: Sequence[_OfBatch], where: str) -> Sequence[_OfBatch]:
        own = self.batch.of(n, op)
        if op.kind in LEAF:
            if (
                op.kind == "parameter" and own
            ):  # its rows distinguish examples by their positions in the batch
                raise ExamplesMeet(where)
            state = any(
                o.kind == "carry" for o in n.ops
            )  # from the last step, so it is no count of this batch
            made = _OfBatch(trained=op.kind == "parameter" or state, order="")
            return [made] * len(op.writes)
        if self.batch.apart(n, op):
            raise ExamplesMeet(where)
        if op.kind == "output" or not op.writes:
            if any(v.order or v.places for v in reads):
                raise ExamplesMeet(where)
            return []
        if op.kind == "carry":
            known = self.carried.get(op.writes[0].tensor)
            if known is None:
                (init,) = reads
                zero = self.both is not None and self.both.begins_at_zero(op)
                # The body may make it depend on parameters; ``_round`` finds it out if totals of loops are asked for.
                known = replace(init, trained=init.trained or not self.of_loops, order="", zero=zero)
                if init.order or init.places or init.totalled:
                    known = _OfBatch(met=where)
            return [known]
        along = any(n.space[d].kind != "parallel" for d in own)
        lost = any(own - set(a.map.dims) for a in op.writes)
        if op.function in (SORT, ARGSORT) and along:
            return self._sorted(op, own, reads, where)
        if op.kind in ("gather", "scatter") and lost:
            return [self._moved(op, own, reads, where)]
        if self.batch.pairs(n, op):
            raise ExamplesMeet(where)
        order = self._order(op, own, reads, where)
        if op.kind == "matmul" and own and not order and (len(op.reads) > 2 or (along and not lost)):
            raise ExamplesMeet(where)  # the group of a row depends on its position
        if lost:
            made = self._sum(op, reads, own, where)
        elif any(v.summed for v in reads):
            if own:
                raise ExamplesMeet(where)
            made = self._of_sums(op, reads, where)
        else:
            ordered = op.kind in ("sequential", "opaque", "gather", "scatter")
            if along and (ordered or _reorders(op)) and not self._alone(op):
                raise ExamplesMeet(where)
            made = self._joined(op, reads, self._power(op, [v.power for v in reads], where), order=order)
        kept = op.kind in ("view", "copy") or op.function in (CAST, NEG)
        zero = kept and bool(reads) and all(v.zero for v in reads)
        return [replace(made, places=self._places(op, reads, where), zero=zero)] * len(op.writes)

    def _alone(self, op: Op) -> bool:
        """Whether the op reads single numbers only, such as the state of a random generator."""
        return all(self.graph.tensors[a.tensor].elements == 1 for a in op.reads)

    def _constant(self, a: Access) -> bool:
        return self.graph.tensors[a.tensor].role == "constant"

    def _order(self, op: Op, own: Collection[str], reads: Sequence[_OfBatch], where: str) -> str | None:
        """The order in which an op reads what lies along the batch. All its operands must have the same order."""
        found = {v.order for v, a in zip(reads, op.factors, strict=True) if set(own) & set(a.map.dims)} - {
            None
        }
        if len(found) > 1:
            raise ExamplesMeet(where)
        return next(iter(found), None)

    def _places(self, op: Op, reads: Sequence[_OfBatch], where: str) -> str:
        """Indices of a sort stay indices if they are moved, cast, or divided by an example's number of choices."""
        told = next((v for v in reads if v.places), _NONE)
        kept = op.kind in ("view", "copy") or op.function is CAST or (op.function is FLOOR_DIV and told.order)
        if told.places and not (kept and len(reads) == 1):
            raise ExamplesMeet(where)
        return told.places

    def _sorted(
        self, op: Op, own: Collection[str], reads: Sequence[_OfBatch], where: str
    ) -> Sequence[_OfBatch]:
        """A sort of the batch by one whole number per element, such as a token's expert.

        If there are several results, the last one holds the place that each element came from. If such places are
        themselves sorted, it holds the place that each element went to.
        """
        keys = [(a, v) for a, v in zip(op.reads, reads, strict=True) if not self._constant(a)]
        told = op.function is ARGSORT or len(op.writes) > 1
        ((a, v),) = keys if len(keys) == 1 and own == set(op.dims) else [(op.reads[0], _OfBatch(met=where))]
        back = v.places and v.order == v.places and told
        if v.met or is_floating(self.graph.tensors[a.tensor].dtype) or not (back or v.order == ""):
            raise ExamplesMeet(where)
        sort = v.places or op.writes[0].tensor
        last = self._joined(op, reads, 0, order="" if back else sort, places=sort)
        first = _OfBatch(met=where) if back else replace(last, places="")
        return [*[first] * (len(op.writes) - told), *[last] * told]

    def _moved(self, op: Op, own: Collection[str], reads: Sequence[_OfBatch], where: str) -> _OfBatch:
        """A lookup in the batch at the places of a sort: it brings the batch into the sort's order, or back."""
        x, ids, *new = reads
        held = set(own) & set(op.reads[1].map.dims) and set(own) & set(op.writes[0].map.dims)
        if not held or not ids.places or any(v.summed for v in reads):
            raise ExamplesMeet(where)
        power, forward = self._power(op, [v.power for v in reads], where), ids.order == ids.places
        if op.kind == "gather" and not x.places and x.order == ("" if forward else ids.places):
            return self._joined(op, reads, power, order=ids.order)
        if op.kind == "scatter" and forward and not x.order:
            if self._constant(
                op.reads[2]
            ):  # scattered numbers of the places themselves: the inverse permutation
                return self._joined(op, reads, power, order="", places=ids.places)
            if new[0].order == ids.places and not new[0].places:
                return self._joined(op, reads, power, order="")
        raise ExamplesMeet(where)

    def _joined(
        self,
        op: Op,
        reads: Sequence[_OfBatch],
        power: int,
        *,
        summed: bool = False,
        order: str | None = None,
        places: str = "",
    ) -> _OfBatch:
        return _OfBatch(
            summed=summed,
            trained=any(v.trained for v in reads),
            totalled=any(v.totalled for v in reads),
            power=power,
            order=order,
            places=places,
        )

    def _sum(self, op: Op, reads: Sequence[_OfBatch], own: Collection[str], where: str) -> _OfBatch:
        """The result of a reduction over the batch's dim."""
        along = [v for v, a in zip(reads, op.factors, strict=True) if set(own) & set(a.map.dims)]
        if not (op.kind == "matmul" or _adds(op)) or not along or any(v.summed for v in reads):
            raise ExamplesMeet(where)
        if self._scale(op) != 0:  # it contains a number that depends on the size of the batch
            raise ExamplesMeet(where)
        made = self._joined(op, reads, sum(v.power for v in reads), summed=True)
        if made.trained:
            return made
        if made.totalled or len(op.writes) != 1:
            raise ExamplesMeet(where)  # a total that depends on another total would need one more pass
        if self.of_loops and _in_loop(op):
            return made
        self.totals[op.writes[0].tensor] = made.power
        return _OfBatch(totalled=True)

    def _of_sums(self, op: Op, reads: Sequence[_OfBatch], where: str) -> _OfBatch:
        """A value computed from sums and from values that are equal in every micro-batch. It must be linear in the
        sums."""
        sums = [v for v in reads if v.summed]
        product = op.function.name in ("mul", "div")
        if product and len(sums) == 1 and (op.function.name == "mul" or reads[0].summed):
            return self._joined(op, reads, self._power(op, [v.power for v in reads], where), summed=True)
        if not op.function.linear:
            counted = op.function.name == "div" and len(reads) == 2 and reads[1].summed
            raise ExamplesMeet(f"{where}, {_BY_COUNT if counted else _NOT_LINEAR}")
        if self._scale(op) != 0:
            raise ExamplesMeet(where)
        powers = {v.share for v in reads if not v.zero}
        number = len(op.reads) == 1 and op.function.name in (
            "add",
            "sub",
        )  # the other operand is a plain number
        if number:
            powers.add(_NONE.share)
        power = _NONE.share if number else min(powers)
        if len(powers) > 1 and self.both is not None:
            if op.kind != "elementwise" or op.function.name not in ("add", "sub") or op.scope:
                raise ExamplesMeet(where)
            self.scaled[op.writes[0].tensor] = tuple(0 if v.zero else power - v.share for v in reads)
        return self._joined(op, reads, power, summed=True)

    def _scale(self, op: Op) -> int | None:
        return 0 if self.both is None else self.both.power(op)

    def _power(self, op: Op, powers: Sequence[int], where: str) -> int:
        if not powers or self.both is None:
            return 0
        by = self.both.power(op)
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


def counting_ops(graph: Graph, totals: Collection[str]) -> frozenset[tuple[Place, str]]:
    """The ops on the way from the inputs to the totals, as (place, written tensor)."""
    makers = {a.tensor: op for n in graph.nodes for op in n.ops for a in op.writes}
    found: dict[str, Op] = {}
    left = list(totals)
    while left:
        t = left.pop()
        if t not in found and (op := makers.get(t)) is not None:
            found[t] = op
            left.extend(a.tensor for a in op.reads)
    return frozenset((op.eqn, t) for t, op in found.items())


def _in_loop(op: Op) -> bool:
    return any(s.kind == "loop" for s in op.scope)


def _reorders(op: Op) -> bool:
    """Whether the op is a slice, roll or similar, whose changed dims may not be split. A pure view has no work."""
    return op.kind == "view" and op.flops_per_point > 0


def _adds(op: Op) -> bool:
    return op.kind == "reduce" and op.function.name == "reduce_sum"
