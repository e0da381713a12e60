"""The ops of one node of an exported graph, each paired with its form in the local program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pase.backends.torch.spmd.values import ReorderStep, ReshapeStep, Steps
from pase.ir import Op
from pase.local.types import LocalOp

__all__ = ["Anchor", "OpPair", "made_by", "partitioned"]


class OpPair(NamedTuple):
    """An op as traced, and as the program splits it."""

    op: Op
    local: LocalOp

    @property
    def is_view(self) -> bool:
        """Whether the result has the same elements in another shape or order."""
        return self.op.kind == "view" and self.op.name in ("reshape", "transpose")

    @property
    def as_steps(self) -> Steps:
        """The steps of a view."""
        read, written = self.op.reads[0].map.walks, self.op.writes[0].map.walks
        if self.op.name == "reshape":
            return (ReshapeStep(self.local.operands[0].shape, self.local.results[0].shape),)
        left, order = list(range(len(read))), []
        for w in written:
            order.append(next(i for i in left if read[i] == w))
            left.remove(order[-1])
        return (ReorderStep(tuple(order)),)


Anchor = tuple[str, Steps]
"""A tensor that the work computes, and the views from it to a result of the node."""


def partitioned(pairs: Sequence[OpPair]) -> tuple[list[OpPair], list[OpPair], list[OpPair]]:
    """Split the ops of a node into (views of its inputs, the work, views of the results)."""
    own = made_by(pairs)
    before: list[OpPair] = []
    for pair in pairs:
        if pair.is_view and not {r.tensor for r in pair.op.reads} & own - made_by(before):
            before.append(pair)
    rest = [pair for pair in pairs if pair not in before]
    after: list[OpPair] = []
    for pair in reversed(rest):
        readers = {r.tensor for p in rest if p is not pair and p not in after for r in p.op.reads}
        if pair.is_view and not made_by([pair]) & readers:
            after.insert(0, pair)
    return before, [p for p in rest if p not in after], after


def made_by(pairs: Sequence[OpPair]) -> set[str]:
    return {w.tensor for pair in pairs for w in pair.op.writes}
