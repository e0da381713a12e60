"""How often the light ops of a node read each tensor.

One kernel reads its operands once and computes all light ops of a node. If one of them needs the result of a reduction,
however, the kernel must have seen all elements that are reduced. A short row stays within a compute unit, as in softmax
or a layer norm. Otherwise the reduction is a pass of its own, and what comes after it reads the operands again: a batch
norm reads its input for the mean, for the variance, and to normalize it; softmax over a vocabulary reads it for the
maximum, for the sum, and to divide.

The gradient of a norm's scale is a sum over all rows, while the gradient of what is normalized has sums within each
row. No kernel does both, so backward reads the operand and the result's gradient twice (``ScaleGradient``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pase.ir import Access, Graph, Node, Op
from pase.ir.functions import MUL
from pase.tables.layouts import concrete_size

__all__ = ["HEAVY", "LONGEST_ROW", "LightReads", "ScaleGradient", "longest_row", "scale_gradients"]

HEAVY = ("matmul", "conv", "attention", "gather", "scatter")
"""Kinds of ops that are kernels of their own: they read their operands from memory, and write their results there."""

LONGEST_ROW = 32_768
"""Elements of a row that a compute unit holds (128 KiB in float32). XLA on an H100: softmax over 16,384 columns is one
kernel that takes two passes, over 50,257 columns five kernels that take four."""


class LightReads:
    """What the light ops of a node read, or those of them that backward runs. It goes through all ops of the node in
    their order."""

    def __init__(self, node: Node, longest: float = LONGEST_ROW) -> None:
        """longest: the longest row whose sum does not end a pass (``longest_row``)."""
        self._node, self._longest = node, longest
        self._read: set[tuple[str, int]] = set()
        self._stage: dict[str, int] = {}  # tensor made in the node -> the pass in which it is first known
        self._from: dict[
            str, dict[str, Access]
        ] = {}  # the same -> the outside tensors from which it is made again
        self._of_sums: set[str] = set()  # the same, if it depends on a reduction

    def of(self, op: Op, counts: bool = True) -> dict[str, Access]:
        """The outside tensors that a light op reads and that no op that counts has read before in the same pass."""
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
        if counts:
            self._read |= {(t, now) for t in found}
        reduced = self._reduced(op)
        if reduced > 1 or any(a.tensor in self._of_sums for a in op.reads):
            self._of_sums |= {a.tensor for a in op.writes}
        for a in op.writes:
            self._stage[a.tensor] = now + (reduced > self._longest)
            self._from[a.tensor] = {} if reduced > 1 else sources  # what is left of a reduction is small
        return found

    def remade(self, op: Op) -> bool:
        """Whether a kernel that reads single elements of a light op's results computes just these again, so that the
        results are not written. The op and those before it have been seen."""
        return not any(a.tensor in self._of_sums for a in op.writes)

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


def longest_row(graph: Graph, node: Node) -> float:
    """The longest row that a kernel of the node keeps within a compute unit, to read it once although it needs its sum.

    XLA makes such kernels of what is written of a row's sums: softmax, norms. If nothing but sums leaves the node, as
    of a loss that takes the logarithm of a sum of exponentials, each sum is a kernel of its own (BERT and NNX's decoder
    with vocabularies of 30,522 and 32,000, compiled for an H100).
    """
    for_light = {a.tensor for op in node.ops if op.kind not in HEAVY for a in op.reads}
    rows: set[str] = set()
    of_sums: set[str] = set()
    for op in node.ops:
        kept = {d for a in op.writes for d in a.map.dims}
        gone = {d for a in op.reads for d in a.map.dims} - kept
        if op.kind in HEAVY or not (gone or any(a.tensor in of_sums for a in op.reads)):
            continue
        rows |= gone
        of_sums |= {a.tensor for a in op.writes}
        written = (
            a.tensor for a in op.writes if graph.read_outside(node, a.tensor) or a.tensor not in for_light
        )
        if kept & rows and any(written):
            return LONGEST_ROW
    return 1.0


@dataclass(frozen=True, kw_only=True)
class ScaleGradient:
    """What the gradient of a scale that multiplies normalized rows makes XLA for GPUs pass over.

    product: the scaled value. operands: the outside tensors of which the normalized value is made.
    sums: of the sums within rows that normalize, whether there is one (an RMS norm); a second one that needs the first
        (a variance computed from the mean); or several that need none of the others (a mean and a mean of squares).

    Read in programs that JAX 0.10.2 compiled for an H100 (rows of 768 and 4,096, bfloat16 and float32), forward and
    backward, x being the operand's bytes: one sum takes 2 x and 5 x; chained ones 2 x and 5 x, and the normalized
    value, which one kernel writes and another multiplies and sums; independent ones 3 x and 6 x, because they are
    kernels of their own. PyTorch's kernels and compiler need 2 x and 5 x.
    """

    product: Access
    operands: tuple[Access, ...]
    sums: Literal["one", "chained", "apart"]


def scale_gradients(graph: Graph, node: Node) -> Iterator[ScaleGradient]:
    """Yields the gradients of scales of norms that the node's backward computes."""
    sums: dict[str, frozenset[str]] = {}  # tensor made in the node -> the sums within rows that led to it
    chained: set[str] = set()  # those that need another one
    made_of: dict[str, dict[str, Access]] = {}
    for op in node.ops:
        if op.kind in HEAVY or op.backward:
            continue
        led = frozenset[str]().union(*(sums.get(a.tensor, frozenset()) for a in op.reads))
        sources: dict[str, Access] = {}
        for a in op.reads:
            sources |= made_of.get(a.tensor, {a.tensor: a})
        for a in op.writes:
            if _sums_rows(op):
                chained |= {a.tensor} if led else set()
                sums[a.tensor] = led | {a.tensor}
            else:
                sums[a.tensor] = led
            made_of[a.tensor] = sources
        if op.function is not MUL or not op.differentiable:
            continue
        for scale, normalized in zip(op.reads, reversed(op.reads), strict=True):
            behind = sums.get(normalized.tensor)
            if behind and _over_rows(op, scale) and graph.tensors[scale.tensor].needs_grad:
                yield ScaleGradient(
                    product=op.writes[0],
                    operands=tuple(made_of[normalized.tensor].values()),
                    sums="chained" if behind & chained else "one" if len(behind) == 1 else "apart",
                )


def _sums_rows(op: Op) -> bool:
    """Whether the op reduces along the last dim of what it reads."""
    (read, *_), kept = op.reads or (None,), {d for a in op.writes for d in a.map.dims}
    if op.kind != "reduce" or read is None or not read.map.walks:
        return False
    return not set(read.map.walks[-1].dims) & kept


def _over_rows(op: Op, scale: Access) -> bool:
    """Whether an operand has one value for each column of the result, so that its gradient is a sum over rows."""
    result = op.writes[0].map
    mine = set(scale.map.dims)
    return bool(result.walks) and set(result.walks[-1].dims) <= mine and mine < set(result.dims)
