"""How often the light ops of a node read each tensor.

One kernel reads its operands once and computes all light ops of a node. If one of them needs the result of a reduction,
however, the kernel must have seen all elements that are reduced. A short row stays within a compute unit, as in softmax
or a layer norm. Otherwise the reduction is a pass of its own, and what comes after it reads the operands again: a batch
norm reads its input for the mean, for the variance, and to normalize it; softmax over a vocabulary reads it for the
maximum, for the sum, and to divide.
"""

from __future__ import annotations

import math

from pase.ir import Access, Node, Op
from pase.tables.layouts import concrete_size

__all__ = ["HEAVY", "LONGEST_ROW", "LightReads"]

HEAVY = ("matmul", "conv", "attention", "gather", "scatter")
"""Kinds of ops that are kernels of their own: they read their operands from memory, and write their results there."""

LONGEST_ROW = 32_768
"""Elements of a row that a compute unit holds (128 KiB in float32). XLA on an H100: softmax over 16,384 columns is one
kernel that takes two passes, over 50,257 columns five kernels that take four."""


class LightReads:
    """What the light ops of a node read. It goes through the node's ops in their order."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._read: set[tuple[str, int]] = set()
        self._stage: dict[str, int] = {}  # tensor made in the node -> the pass in which it is first known
        self._from: dict[
            str, dict[str, Access]
        ] = {}  # the same -> the outside tensors from which it is made again

    def of(self, op: Op) -> dict[str, Access]:
        """The outside tensors that a light op reads and that no op before it has read in the same pass."""
        if op.kind in HEAVY:
            for a in op.writes:
                self._stage[a.tensor], self._from[a.tensor] = 0, {}
            return {}
        now = max((self._stage.get(a.tensor, 0) for a in op.reads), default=0)
        needed: dict[str, Access] = {}
        sources: dict[str, Access] = {}
        for a in op.reads:
            made = self._stage.get(a.tensor)
            outside = {a.tensor: a} if made is None else self._from[a.tensor]
            sources |= outside
            if made is None or made < now:
                needed |= outside
        found = {t: a for t, a in needed.items() if (t, now) not in self._read}
        self._read |= {(t, now) for t in found}
        reduced = self._reduced(op)
        for a in op.writes:
            self._stage[a.tensor] = now + (reduced > LONGEST_ROW)
            self._from[a.tensor] = {} if reduced > 1 else sources  # what is left of a reduction is small
        return found

    def _reduced(self, op: Op) -> float:
        """The elements that make one of the result; infinite if they are not one row in memory."""
        kept = {d for a in op.writes for d in a.map.dims}
        gone = {d for a in op.reads for d in a.map.dims} - kept
        if not gone:
            return 1
        last = [set(a.map.walks[-1].dims) for a in op.reads if a.map.walks and gone & set(a.map.dims)]
        if not all(dims <= gone for dims in last):
            return math.inf
        return math.prod(concrete_size(self._node.space[d].size, self._node.name) for d in gone)
