"""What the micro-batches of a PyTorch step pass on to each other: the numbers of an exported graph of the whole batch
beside those of a micro-batch's."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.registry import NotInParts
from pase.frontends.torch_blocks import batch_size
from pase.frontends.torch_numbers import NumberUnknown, node_numbers, numbers_missing, op_name
from pase.frontends.torch_types import FxNode
from pase.frontends.torch_values import TorchOperand, arguments
from pase.frontends.values import Value
from pase.ir import Graph, Op
from pase.ir.batch_sums import BatchSums, ExamplesMeet, batch_sums

if TYPE_CHECKING:
    from pase.frontends.from_torch import TracedTorch

__all__ = ["examples_meet", "micro_sums"]


def examples_meet(traced: TracedTorch, graph: Graph) -> str | None:
    """Where the examples of a batch meet, so that micro-batches would give other numbers; None: nowhere.

    graph: the simplified one. Means that the model writes with the batch's size are looked at in ``micro_sums``.
    """
    try:
        batch_sums(graph, _cut(traced), None)
    except ExamplesMeet as e:
        return str(e)
    return None


def micro_sums(whole: TracedTorch, part: TracedTorch, graph: Graph, k: int) -> BatchSums:
    """What the k micro-batches of a step pass on to each other. part: the model on one of them; graph: its simplified
    graph.

    Raises NotInParts if a step in micro-batches would give other numbers.
    """
    data = frozenset(a.tensor for n in graph.nodes for op in n.ops for a in op.writes)
    beside = _WholeAndPart(whole=whole, part=part, k=k, data=data)
    try:
        return batch_sums(graph, _cut(whole), beside.power)
    except ExamplesMeet as e:
        raise NotInParts(
            f"a step in {k} micro-batches would give other numbers: examples of the batch meet in {e}"
        ) from None


def _cut(traced: TracedTorch) -> frozenset[str]:
    """Paths of the inputs that have the batch's dim."""
    try:
        size = batch_size(traced)
    except PaseError:
        return frozenset()  # no batch, which who divides it says
    batch = set(traced.program.inputs.values())
    inputs = (t for t in traced.graph.tensors.values() if t.role == "input" and t.path in batch)
    return frozenset(t.path for t in inputs if t.shape[:1] == (size,))


@dataclass(frozen=True, kw_only=True)
class _WholeAndPart:
    """The step on the whole batch beside that on a micro-batch. data: tensors that depend on data."""

    whole: TracedTorch
    part: TracedTorch
    k: int
    data: frozenset[str]

    def power(self, op: Op) -> int | None:
        """The power of k by which the number among an op's operands is larger on the whole batch; None: it is no power
        of it, or not known."""
        at = op.eqn.path
        big, small = self._nodes[0].get(at), self._nodes[1].get(at)
        if small is not None and any(map(self._constant_differs, self._constants(small))):
            return None
        wanted = numbers_missing(op)
        if not wanted:
            return 0
        if big is None or small is None or str(big.target) != str(small.target):
            return None
        every = self._ops.get(at, [])
        mine = next((i for i, o in enumerate(every) if o.writes[0].tensor == op.writes[0].tensor), 0)
        first = sum(numbers_missing(o) for o in every[:mine])
        try:
            one, other = ([*node_numbers(n)][first : first + wanted] for n in (big, small))
        except NumberUnknown:
            one, other = [], []
        if len(one) == wanted == len(other):
            return self._ratio(one, other)
        if len(every) > 1 and op.function.name in ("mul", "div") and self._whole_shape(op):
            return None  # a count that follows from shapes, maybe
        return self._ratio(_numbers(big), _numbers(small))

    def _whole_shape(self, op: Op) -> bool:
        """Whether an op's result has no batch."""
        t = op.writes[0].tensor
        big, small = (x.graph.tensors.get(t) for x in (self.whole, self.part))
        return big is None or small is None or big.shape == small.shape

    def _ratio(self, big: Sequence[float], small: Sequence[float]) -> int | None:
        differ = (
            [(a, b) for a, b in zip(big, small, strict=True) if a != b] if len(big) == len(small) else None
        )
        if differ is None or len(differ) > 1:
            return None
        for a, b in differ:
            powers = (p for p in (1, -1, 2, -2) if math.isclose(a, b * self.k**p, rel_tol=1e-12))
            return next(powers, None)
        return 0

    def _constants(self, n: FxNode) -> list[FxNode]:
        """The operands of a node that depend on no data, but for its shape. Whole numbers that are written to places
        that data say (the inverse of a permutation) are not looked at."""
        if op_name(n) in ("index_put", "scatter") and not _floating(n):
            return []
        return [m for m in map(self._outside, n.all_input_nodes) if self._settled(m)]

    def _outside(self, n: FxNode) -> FxNode:
        """Of a decomposed op's placeholder the node that it stands for."""
        while n in self._leaves:
            n = self._leaves[n]
        return n

    def _settled(self, n: FxNode) -> bool:
        found = self._values.get(n)
        while isinstance(found, Value) and found.note[:1] in (("view",), ("transposed",)):
            found = found.note[1]
        if not isinstance(found, Value):
            return False
        return found.make is None if found.tensor is None else found.tensor.name not in self.data

    def _constant_differs(self, n: FxNode) -> bool:
        """Whether a value that depends on no data may tell the examples of a batch from each other, or has other
        numbers on the whole batch."""
        if n not in self._differing:
            self._differing[n] = False  # of a node within itself there is none
            big = self._nodes[0].get(self._places.get(n, ""))
            self._differing[n] = big is None or self._differs(n, big)
        return self._differing[n]

    def _differs(self, n: FxNode, big: FxNode) -> bool:
        call, _, place = self._places.get(n, "").rpartition(".")
        if n.op == "placeholder" and call in self._nodes[1]:  # of a loop's or a branch's body
            other, given = (_operands(nodes[call])[int(place)] for nodes in self._nodes)
            return self._constant_differs(self._outside(given)) if hasattr(given, "op") else given != other
        if n.op != "call_function":
            return not _same_constant(self.part, n, self.whole, big)
        if n.target is operator.getitem:
            return n.args[1] != big.args[1] or self._constant_differs(self._outside(n.args[0]))
        if str(n.target) != str(big.target) or not hasattr(n.target, "_schema"):
            return True
        if _tagged(n, "nondeterministic_seeded"):  # of what is random there is no one value
            return False
        own, other = (arguments(m.target, m.args, m.kwargs) for m in (n, big))
        if op_name(n) == "fill":  # of what it fills only the shape matters
            value = own["value"]
            return (
                self._constant_differs(self._outside(value))
                if hasattr(value, "op")
                else value != other["value"]
            )
        if op_name(n).startswith(_FILLING):
            return _plain(own, _FILL) != _plain(other, _FILL)
        if op_name(n) in ("index", "_unsafe_index"):
            return self._index_differs(own, other)
        if any(map(self._constant_differs, map(self._outside, n.all_input_nodes))):
            return True
        if op_name(n) == "repeat":
            return self._repeat_differs(own, other)
        every = zip((n, *n.all_input_nodes), (big, *big.all_input_nodes), strict=True)
        shapes = [(_shape(a), _shape(b)) for a, b in every]
        if op_name(n) in _MOVED and any(a != b for a, b in shapes):  # only sizes may differ
            return False
        if _plain(own) != _plain(other):
            return True
        if all(a == b for a, b in shapes) or _pointwise(n):
            return False
        along = (-2, -1) if op_name(n) in ("tril", "triu") else own.get("dim")
        dims = [along] if isinstance(along, int) else list(along or ())
        return not dims or any(a[0][d] != b[0][d] for a, b in shapes[1:] for d in dims)

    def _repeat_differs(self, own: Mapping[str, TorchOperand], other: Mapping[str, TorchOperand]) -> bool:
        """Of what is repeated along a dim: if each example gets the whole of it, they are alike."""
        times, many, sizes = own["repeats"], other["repeats"], tuple(own["self"].meta["val"].shape)
        b, all_of_them = batch_size(self.part), batch_size(self.whole)
        return any(
            t != m and size != 1 and (t % b or m % all_of_them)
            for t, m, size in zip(times, many, (1,) * (len(times) - len(sizes)) + sizes, strict=True)
        )

    def _index_differs(self, own: Mapping[str, TorchOperand], other: Mapping[str, TorchOperand]) -> bool:
        """Of a lookup: along a dim whose size differs all places are alike, if the table does not differ."""
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
        """Node of the model on a micro-batch -> what it was lowered to."""
        return {n: v for scope in self.part.scope.scopes() for n, v in scope.values.items()}

    @cached_property
    def _leaves(self) -> Mapping[FxNode, FxNode]:
        return {n: m for scope in self.part.scope.scopes() for n, m in scope.leaves.items()}

    @cached_property
    def _places(self) -> Mapping[FxNode, str]:
        return {n: at for at, n in self._nodes[1].items()}

    @cached_property
    def _nodes(self) -> tuple[dict[str, FxNode], dict[str, FxNode]]:
        """Place -> the node there, on the whole batch and on a micro-batch."""
        whole, part = ({at: n for n, at in t.scope.every()} for t in (self.whole, self.part))
        return whole, part

    @cached_property
    def _ops(self) -> Mapping[str, list[Op]]:
        """Place -> its ops, in the order in which they were traced."""
        found: dict[str, list[Op]] = {}
        for n in self.part.graph.nodes:
            for op in n.ops:
                if op.reads:
                    found.setdefault(op.eqn.path, []).append(op)
        return found


def _numbers(n: FxNode) -> list[float]:
    """All plain numbers of a call, in the order of the op's schema."""
    return [float(v) for v in arguments(n.target, n.args, n.kwargs).values() if isinstance(v, (int, float))]


_FILL = ("fill_value", "value")
_FILLING = (
    "full",
    "ones",
    "zeros",
    "empty",
    "new_full",
    "new_ones",
    "new_zeros",
    "new_empty",
    "scalar_tensor",
)
"""How the names of ops begin that make one number at every place, or none; of their operands only shapes matter."""
_MOVED = frozenset(
    (
        *(
            "alias",
            "clone",
            "contiguous",
            "detach",
            "expand",
            "expand_as",
            "lift_fresh_copy",
            "permute",
            "reshape",
        ),
        *("squeeze", "t", "transpose", "unsqueeze", "view", "view_as", "_to_copy", "_unsafe_view", "to"),
    )
)
"""Ops that move a constant's numbers, and change none."""


def _plain(given: Mapping[str, TorchOperand], names: Sequence[str] | None = None) -> list[TorchOperand]:
    """The operands that are numbers, words, or lists of them."""
    import torch

    flat = torch.utils._pytree.tree_leaves
    every = (v for k, v in given.items() if names is None or k in names)
    return [x for v in every for x in flat(v) if not isinstance(x, torch.fx.Node)]


def _operands(call: FxNode) -> list[TorchOperand]:
    """What a loop or a branch gives to its body, in the order of the body's placeholders."""
    import torch

    flat = torch.utils._pytree.tree_leaves
    return [x for given in call.args if isinstance(given, (list, tuple)) for x in flat(given)]


def _tagged(n: FxNode, tag: str) -> bool:
    import torch

    return getattr(torch.Tag, tag) in getattr(n.target, "tags", ())


def _pointwise(n: FxNode) -> bool:
    return _tagged(n, "pointwise") or op_name(n) in ("__and__", "__or__", "__xor__", "where")


def _floating(n: FxNode) -> bool:
    return bool(n.meta["val"].is_floating_point())


def _shape(n: FxNode) -> TorchOperand:
    import torch

    return [tuple(t.shape) for t in torch.utils._pytree.tree_leaves(n.meta.get("val")) if hasattr(t, "shape")]


def _same_constant(part: TracedTorch, n: FxNode, whole: TracedTorch, big: FxNode) -> bool:
    """Whether two constants that no op makes are the same: buffers of one name, or tensors of the same numbers."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if n.op == "get_attr":
        return bool(n.target == big.target)
    a, b = (t.program.buffers.get(m.name) for t, m in ((part, n), (whole, big)))
    one, other = part.program.constants.get(a or ""), whole.program.constants.get(b or "")
    if one is None or other is None or isinstance(one, FakeTensor):
        return a is not None and a == b
    return one.shape == other.shape and bool(torch.equal(one, other))
