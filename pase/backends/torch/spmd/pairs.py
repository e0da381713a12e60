"""The ops of one node of an exported graph, each paired with its form in the local program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pase.backends.torch.spmd.values import ReorderStep, ReshapeStep, Steps
from pase.ir import Op
from pase.local.types import LocalOp

__all__ = ["Anchor", "OpPair", "made_by", "order_of", "partitioned"]


class OpPair(NamedTuple):
    """An op as traced, and as the program splits it."""

    op: Op
    local: LocalOp

    @property
    def reads(self) -> tuple[str, ...]:
        """The tensors that it reads."""
        return tuple(a.tensor for a in self.op.reads)

    @property
    def makes(self) -> str:
        """The first tensor that it makes."""
        return self.op.writes[0].tensor

    @property
    def is_view(self) -> bool:
        """Whether the result has the same elements in another shape or order."""
        return self.op.kind == "view" and self.op.name in ("reshape", "transpose")

    @property
    def as_steps(self) -> Steps:
        """The steps of a view."""
        if self.op.name == "reshape":
            return (ReshapeStep(self.local.operands[0].shape, self.local.results[0].shape),)
        return (ReorderStep(order_of(self.op)),)


def order_of(op: Op) -> tuple[int, ...]:
    """The order in which a transpose has the dims of its operand."""
    read, order = op.reads[0].map.walks, list[int]()
    for w in op.writes[0].map.walks:
        order.append(next(i for i, v in enumerate(read) if v == w and i not in order))
    return tuple(order)


Anchor = tuple[str, Steps]
"""A tensor that the work computes, and the views from it to a result of the node."""


def partitioned(pairs: Sequence[OpPair]) -> tuple[list[OpPair], list[OpPair], list[OpPair]]:
    """Split the ops of a node into (views of its inputs, the work, views of the results)."""
    own = made_by(pairs)
    before: list[OpPair] = []
    for pair in pairs:
        if pair.is_view and not {*pair.reads} & own - made_by(before):
            before.append(pair)
    rest = [pair for pair in pairs if pair not in before]
    after: list[OpPair] = []
    for pair in reversed(rest):
        readers = {r for p in rest if p is not pair and p not in after for r in p.reads}
        if pair.is_view and not made_by([pair]) & readers:
            after.insert(0, pair)
    return before, [p for p in rest if p not in after], after


def made_by(pairs: Sequence[OpPair]) -> set[str]:
    return {w.tensor for pair in pairs for w in pair.op.writes}
