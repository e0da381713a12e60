"""Finds what the micro-batches of a PyTorch step must pass on to each other.

The step is exported on the whole batch and on one micro-batch, and the numbers in the two graphs are compared.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.common.values import Value
from pase.frontends.registry import NotInParts
from pase.frontends.torch.blocks import batch_size
from pase.frontends.torch.control import loop_operands
from pase.frontends.torch.rules import POINTWISE, RULES
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import TorchOperand, arguments, op_name, specs_of
from pase.ir import Graph, Op, Place, named, simplify
from pase.ir.batch_sums import BatchSums, ExamplesMeet, batch_sums, counting_ops
from pase.ir.literals import Number

if TYPE_CHECKING:
    from pase.frontends.torch.frontend import TracedTorch

__all__ = ["examples_meet", "micro_sums"]


def examples_meet(traced: TracedTorch, graph: Graph) -> str | None:
    """The op in which the examples of a batch meet; None if there is none.

    If examples meet, a step in micro-batches would give other results.
    graph: the simplified graph. ``micro_sums`` handles means for which the model itself divides by the batch size.
    """
    try:
        batch_sums(graph, _cut(traced), None, state_of_whole=True)
    except ExamplesMeet as e:
        return str(e)
    return None


def micro_sums(whole: TracedTorch, part: TracedTorch, graph: Graph, k: int) -> BatchSums:
    """What the k micro-batches of a step pass on to each other.

    whole, part: the model traced on the whole batch and on one micro-batch. graph: the simplified graph of ``part``.
    Raises NotInParts if a step in micro-batches would give other results.
    """
    try:
        if batch_size(whole) != k:
            return batch_sums(graph, _cut(whole), _compared(whole, part, graph, k), state_of_whole=True)
        # The graph of a single example has no batch dim, so the whole batch's graph is analyzed instead.
        every = named(simplify(whole.graph))
        both = _compared(part, whole, every, 1 / k)
        return _of_part(batch_sums(every, _cut(whole), both, state_of_whole=True), whole, part, graph)
    except ExamplesMeet as e:
        raise NotInParts(
            f"a step in {k} micro-batches would give other numbers: examples of the batch meet in {e}"
        ) from None


def _compared(whole: TracedTorch, part: TracedTorch, graph: Graph, k: float) -> _WholeAndPart:
    data = frozenset(a.tensor for n in graph.nodes for op in n.ops for a in op.writes)
    return _WholeAndPart(whole=whole, part=part, k=k, data=data)


def _of_part(sums: BatchSums, whole: TracedTorch, part: TracedTorch, graph: Graph) -> BatchSums:
    """The sums found in the whole batch's graph, for the tensors of the micro-batch's simplified graph."""
    one = {place: t for t, place in _places(part).items()}
    every = _places(whole)
    if missing := next((t for t in sums.totals if every[t] not in one), None):
        raise ExamplesMeet(
            f"{every[missing][1]} at {every[missing][0]}, which the graph of one example does not have"
        )
    totals = {one[every[t]]: power for t, power in sums.totals.items()}
    outputs = zip(part.graph.outputs, sums.outputs.values(), strict=True)
    return BatchSums(totals=totals, outputs=dict(outputs), counting=counting_ops(graph, totals))


def _places(traced: TracedTorch) -> dict[str, tuple[Place, str, int]]:
    """Tensor -> place and name of the op that writes it, and the number of earlier tensors with both the same."""
    found: dict[str, tuple[Place, str, int]] = {}
    before: Counter[tuple[Place, str]] = Counter()
    for n in traced.graph.nodes:
        for op in n.ops:
            for a in op.writes:
                found[a.tensor] = (op.eqn, op.name, before[op.eqn, op.name])
                before[op.eqn, op.name] += 1
    return found


def _cut(traced: TracedTorch) -> frozenset[str]:
    """Paths of the inputs that have the batch dim."""
    try:
        size = batch_size(traced)
    except PaseError:
        return frozenset()  # there is no batch; whatever divides the batch reports it
    batch = set(traced.program.inputs.values())
    inputs = (t for t in traced.graph.tensors.values() if t.role == "input" and t.path in batch)
    return frozenset(t.path for t in inputs if t.shape[:1] == (size,))


@dataclass(frozen=True, kw_only=True)
class _WholeAndPart:
    """The step on the whole batch, and the step on a micro-batch. data: tensors that depend on data.

    k: the ratio of the sizes of the two batches.
    """

    whole: TracedTorch
    part: TracedTorch
    k: float
    data: frozenset[str]

    def power(self, op: Op) -> int | None:
        """The power of k by which the number among an op's operands is larger on the whole batch.

        None if the ratio is no power of k, or is not known.
        """
        at = op.eqn.path
        big, small = self._nodes[0].get(at), self._nodes[1].get(at)
        if small is not None and any(map(self._constant_differs, self._constants(small))):
            return None
        if op.literals == () or op.kind != "elementwise":
            return 0
        if big is None or small is None or str(big.target) != str(small.target):
            return None
        wholes, parts = (ops.get(at, []) for ops in self._ops)
        mine = next((i for i, o in enumerate(parts) if o.writes[0].tensor == op.writes[0].tensor), 0)
        if op.literals is not None and len(wholes) == len(parts):
            other = wholes[mine]
            same = other.function == op.function and other.literals is not None
            return self._ratio(other.literals, op.literals) if same and other.literals else None
        if len(parts) > 1 and op.function.name in ("mul", "div") and self._whole_shape(op):
            return None  # the number may be a count that follows from shapes
        return self._ratio(_numbers(big), _numbers(small))

    def begins_at_zero(self, op: Op) -> bool:
        """Whether a carry starts at zero, for ``batch_sums``."""
        call = self._nodes[1].get(op.eqn.path)
        if call is None or op.eqn.part != "carry":
            return False
        init = loop_operands(call)[1][op.eqn.index[0]]
        return init.op == "call_function" and op_name(init) in ("zeros", "zeros_like", "new_zeros")

    def _whole_shape(self, op: Op) -> bool:
        """Whether an op's result has no batch dim: it has the same shape on both batches."""
        t = op.writes[0].tensor
        big, small = (x.graph.tensors.get(t) for x in (self.whole, self.part))
        return big is None or small is None or big.shape == small.shape

    def _ratio(self, big: Sequence[Number | None], small: Sequence[Number | None]) -> int | None:
        if len(big) != len(small):
            return None
        differ = [(a, b) for a, b in zip(big, small, strict=True) if a is not b and a != b]
        if len(differ) > 1:
            return None
        for a, b in differ:
            if not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
                return None
            powers = (p for p in (1, -1, 2, -2) if math.isclose(a, b * self.k**p, rel_tol=1e-12))
            return next(powers, None)
        return 0

    def _constants(self, n: FxNode) -> list[FxNode]:
        """The operands of a node that depend on no data except its shape.

        Integers that are written at places given by data (the inverse of a permutation) are ignored.
        """
        if op_name(n) in ("index_put", "scatter") and not _floating(n):
            return []
        return [m for m in map(self._outside, n.all_input_nodes) if self._foldable(m)]

    def _outside(self, n: FxNode) -> FxNode:
        """The node that a placeholder of a decomposed op stands for; other nodes are returned unchanged."""
        while n in self._leaves:
            n = self._leaves[n]
        return n

    def _foldable(self, n: FxNode) -> bool:
        found = self._values.get(n)
        while isinstance(found, Value) and found.note[:1] in (("view",), ("transposed",)):
            found = found.note[1]
        if not isinstance(found, Value):
            return False
        return found.make is None if found.tensor is None else found.tensor.name not in self.data

    def _constant_differs(self, n: FxNode) -> bool:
        """Whether a value that depends on no data may differ between examples, or differs on the whole batch."""
        if n not in self._differing:
            self._differing[n] = False  # ends the recursion if a node is reached again from itself
            big = self._nodes[0].get(self._places.get(n, ""))
            self._differing[n] = big is None or self._differs(n, big)
        return self._differing[n]

    def _differs(self, n: FxNode, big: FxNode) -> bool:
        call, _, place = self._places.get(n, "").rpartition(".")
        if n.op == "placeholder" and call in self._nodes[1]:  # in the body of a loop or a branch
            lists = ([v for v in nodes[call].args if isinstance(v, (list, tuple))] for nodes in self._nodes)
            other, given = (_flat(v)[int(place)] for v in lists)
            return self._operand_differs(given, other)
        if n.op != "call_function":
            return not _same_constant(self.part, n, self.whole, big)
        if n.target is operator.getitem:
            return n.args[1] != big.args[1] or self._constant_differs(self._outside(n.args[0]))
        if str(n.target) != str(big.target) or not hasattr(n.target, "_schema"):
            return True
        if _tagged(n, "nondeterministic_seeded"):  # random values cannot be compared
            return False
        own, other = (arguments(m.target, m.args, m.kwargs) for m in (n, big))
        if _fills(n):  # only the shape of its tensor operand matters
            return any(self._operand_differs(own[k], other[k]) for k in _FILL if k in own)
        if op_name(n) in ("index", "_unsafe_index"):
            return self._index_differs(own, other)
        if any(map(self._constant_differs, map(self._outside, n.all_input_nodes))):
            return True
        if op_name(n) == "repeat":
            return self._repeat_differs(own, other)
        every = zip((n, *n.all_input_nodes), (big, *big.all_input_nodes), strict=True)
        shapes = [(_shape(a), _shape(b)) for a, b in every]
        if _moves(n) and any(a != b for a, b in shapes):  # the op only rearranges, so only its sizes differ
            return False
        if _plain(own) != _plain(other):
            return True
        if all(a == b for a, b in shapes) or _pointwise(n):
            return False
        along = (-2, -1) if op_name(n) in ("tril", "triu") else own.get("dim")
        dims = [along] if isinstance(along, int) else list(along or ())
        return not dims or any(a[0][d] != b[0][d] for a, b in shapes[1:] for d in dims)

    def _operand_differs(self, own: TorchOperand, other: TorchOperand) -> bool:
        return self._constant_differs(self._outside(own)) if hasattr(own, "op") else bool(own != other)

    def _repeat_differs(self, own: Mapping[str, TorchOperand], other: Mapping[str, TorchOperand]) -> bool:
        """Whether a repeat gives examples different values. It does not if each example gets whole repetitions."""
        times, many, sizes = own["repeats"], other["repeats"], tuple(own["self"].meta["val"].shape)
        b, all_of_them = batch_size(self.part), batch_size(self.whole)
        return any(
            t != m and size != 1 and (t % b or m % all_of_them)
            for t, m, size in zip(times, many, (1,) * (len(times) - len(sizes)) + sizes, strict=True)
        )

    def _index_differs(self, own: Mapping[str, TorchOperand], other: Mapping[str, TorchOperand]) -> bool:
        """Whether a lookup differs. Along a dim whose size differs, all entries of an equal table are alike."""
        if self._constant_differs(self._outside(own["self"])):
            return True
        sizes = zip(own["self"].meta["val"].shape, other["self"].meta["val"].shape, strict=True)
        return any(
            same == there and ids is not None and self._constant_differs(self._outside(ids))
            for ids, (same, there) in zip(own["indices"], sizes, strict=False)
        )

    @cached_property
    def _differing(self) -> dict[FxNode, bool]:
        return {}

    @cached_property
    def _values(self) -> Mapping[FxNode, object]:
        """Node of the micro-batch's step -> what it was lowered to."""
        return {n: v for scope in self.part.scope.scopes() for n, v in scope.values.items()}

    @cached_property
    def _leaves(self) -> Mapping[FxNode, FxNode]:
        return {n: m for scope in self.part.scope.scopes() for n, m in scope.leaves.items()}

    @cached_property
    def _places(self) -> Mapping[FxNode, str]:
        return {n: at for at, n in self._nodes[1].items()}

    @cached_property
    def _nodes(self) -> tuple[dict[str, FxNode], dict[str, FxNode]]:
        """Place -> the node there, for the whole batch and for a micro-batch."""
        whole, part = ({at: n for n, at in t.scope.every()} for t in (self.whole, self.part))
        return whole, part

    @cached_property
    def _ops(self) -> tuple[dict[str, list[Op]], dict[str, list[Op]]]:
        """Place -> the ops there, in the order in which they were traced, for the whole batch and for a micro-batch."""
        return _ops_at(self.whole), _ops_at(self.part)


def _ops_at(traced: TracedTorch) -> dict[str, list[Op]]:
    found: dict[str, list[Op]] = {}
    for n in traced.graph.nodes:
        for op in n.ops:
            if op.reads:
                found.setdefault(op.eqn.path, []).append(op)
    return found


def _numbers(n: FxNode) -> list[float]:
    """All numbers among the arguments of a call, in the order of the op's schema."""
    return [float(v) for v in arguments(n.target, n.args, n.kwargs).values() if isinstance(v, (int, float))]


_FILL = ("fill_value", "value", "s")


def _plain(given: Mapping[str, TorchOperand]) -> list[TorchOperand]:
    """The operands that are no nodes (numbers, strings), including those in lists."""
    return [x for x in _flat(given.values()) if not hasattr(x, "op")]


def _flat(operands: Iterable[TorchOperand]) -> list[TorchOperand]:
    """The operands, with lists flattened."""
    return [x for v in operands for x in (v if isinstance(v, (list, tuple)) else (v,))]


def _fills(n: FxNode) -> bool:
    """Whether an op fills a tensor with one number, or leaves it uninitialized."""
    rule = RULES.get(op_name(n))
    return rule is not None and rule is RULES.get("full") and op_name(n) != "eye"


def _moves(n: FxNode) -> bool:
    """Whether an op only rearranges all elements of a tensor: a copy, or a view that leaves no element out."""
    made, moved = (
        n.meta["val"],
        n.target.is_view or _tagged(n, "view_copy") or op_name(n) in ("_to_copy", "_unsafe_view"),
    )
    return moved and hasattr(made, "numel") and made.numel() >= n.args[0].meta["val"].numel()


def _tagged(n: FxNode, tag: str) -> bool:
    import torch

    return getattr(torch.Tag, tag) in getattr(n.target, "tags", ())


def _pointwise(n: FxNode) -> bool:
    return _tagged(n, "pointwise") or op_name(n) in POINTWISE


def _floating(n: FxNode) -> bool:
    return bool(n.meta["val"].is_floating_point())


def _shape(n: FxNode) -> list[tuple[int, ...]]:
    return [spec[0] for spec in specs_of(n.meta.get("val"), str(n)) if spec is not None]


def _same_constant(part: TracedTorch, n: FxNode, whole: TracedTorch, big: FxNode) -> bool:
    """Whether two constants that no op makes are the same: buffers with the same path, or tensors with equal values."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if n.op == "get_attr":
        return bool(n.target == big.target)
    a, b = (t.program.buffers.get(m.name) for t, m in ((part, n), (whole, big)))
    one, other = part.program.constants.get(a or ""), whole.program.constants.get(b or "")
    if one is None or other is None or isinstance(one, FakeTensor):
        return a is not None and a == b
    return one.shape == other.shape and bool(torch.equal(one, other))
