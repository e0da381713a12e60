"""What the micro-batches of a PyTorch step pass on to each other: the numbers of an exported graph of the whole batch
beside those of a micro-batch's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.registry import NotInParts
from pase.frontends.torch_blocks import batch_size
from pase.frontends.torch_numbers import NumberUnknown, node_numbers, numbers_missing
from pase.frontends.torch_types import FxNode
from pase.frontends.torch_values import TorchOperand, arguments
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
    beside = _WholeAndPart(whole=whole, part=part, k=k)
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
    """The step on the whole batch beside that on a micro-batch."""

    whole: TracedTorch
    part: TracedTorch
    k: int

    def power(self, op: Op) -> int | None:
        """The power of k by which the number among an op's operands is larger on the whole batch; None: it is no power
        of it, or not known."""
        if any(self._constant_differs(a.tensor) for a in op.reads):
            return None
        wanted = numbers_missing(op)
        if not wanted:
            return 0
        at = op.eqn.path
        big, small = self._nodes[0].get(at), self._nodes[1].get(at)
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

    def _constant_differs(self, tensor: str) -> bool:
        """Whether a value that depends on no data has other numbers on the whole batch."""
        node = self._constants.get(tensor)
        left, seen = ([] if node is None else [node]), set()
        names = {n: at for at, n in self._nodes[1].items()}
        while left:
            n = left.pop()
            if n in seen:
                continue
            seen.add(n)
            left.extend(n.all_input_nodes)
            big = self._nodes[0].get(names.get(n, ""))
            if n.op == "call_function" and (big is None or _fills(big) != _fills(n)):
                return True
        return False

    @cached_property
    def _constants(self) -> Mapping[str, FxNode]:
        tensors = self.part.graph.tensors
        values = (v for scope in self.part.scope.scopes() for v in scope.values.items())
        made = ((v.tensor.name, n) for n, v in values if not isinstance(v, list) and v.tensor is not None)
        return {t: n for t, n in made if t in tensors and tensors[t].role == "constant"}

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


_FILL = ("fill_value", "value", "other", "self", "s", "exponent")


def _fills(n: FxNode) -> list[TorchOperand]:
    """The numbers that a constant is made of, not its sizes."""
    if not hasattr(n.target, "_schema"):
        return []
    given = arguments(n.target, n.args, n.kwargs)
    return [v for k, v in given.items() if k in _FILL and isinstance(v, (int, float))]
