"""The types of a calibration: what to measure (Task), its result (Sample), and the interface that measures (Bench)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = [
    "COLLECTIVE_OPS",
    "CONV_OPS",
    "FORMS",
    "LIGHT_BYTES",
    "LIGHT_SHAPES",
    "Bench",
    "Level",
    "MeasuredOp",
    "Sample",
    "Task",
]

MeasuredOp = Literal[
    "matmul.nn",
    "matmul.nt",
    "matmul.tn",
    "conv.forward",
    "conv.input",
    "conv.filter",
    "elementwise",
    "reduction",
    "vector",
    "light",
    "window",
    "launch",
    "dispatch",
    "host.program",
    "host.op",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "permute",
    "broadcast",
]
FORMS: tuple[MeasuredOp, ...] = ("matmul.nn", "matmul.nt", "matmul.tn")
"""[m,k]x[k,n] as in forward, [m,k]x[n,k] as for the input's gradient, [k,m]x[k,n] as for the weight's gradient."""
CONV_OPS: tuple[MeasuredOp, ...] = ("conv.forward", "conv.input", "conv.filter")
COLLECTIVE_OPS: tuple[MeasuredOp, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "permute",
    "broadcast",
)

LIGHT_SHAPES: tuple[tuple[int, ...], ...] = ((64, 32, 128), (64, 32, 512))
"""Activations of the op "light": with the model's width, and with the width of the hidden layer and the logits."""
LIGHT_BYTES = 73_401_868.0
"""Bytes of "light", forward and backward, with ops fused as ``pase.ir.simplify`` fuses them. A test compares this with
the graph."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """A link level of the measured devices: it connects ``ways`` units of the next inner level."""

    name: str
    ways: int
    topology: Literal["switch", "torus"] = "switch"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One op to time.

    extents: for a matmul (batch, m, n, k); for a conv (images, side, channels in, channels out, window); for a window
    (images, side, channels, window), with a stride of 2.
    nbytes: for a memory op the bytes read and written; for a collective the larger local buffer, as in
    ``CostModel.collective``.
    ways: for a collective the number of devices in a group at each level, innermost first. All groups run at the same
    time.
    rank: 0 for tasks that every machine file needs; the budget is spent in ascending order of rank.
    witness: not used for the fit; the fit is checked against it.
    """

    op: MeasuredOp
    dtype: str = "float32"
    extents: tuple[int, ...] = ()
    nbytes: int = 0
    ways: tuple[int, ...] = ()
    rank: int = 0
    witness: bool = False

    @property
    def key(self) -> str:
        """Identifies the measurement. It does not depend on the rank.

        >>> Task(op="matmul.nn", extents=(1, 8, 32, 128)).key
        'matmul.nn float32 1x8x32x128'
        """
        parts = [self.op, self.dtype]
        if self.extents:
            parts.append("x".join(map(str, self.extents)))
        if self.nbytes:
            parts.append(f"{self.nbytes}B")
        if self.ways:
            parts.append(f"over {list(self.ways)}".replace(" ", "").replace("over", "over "))
        return " ".join(parts)

    @property
    def family(self) -> tuple[str, str, tuple[int, ...]]:
        """Identifies tasks whose times differ only by ``work``, so that smaller ones predict larger ones."""
        return self.op, self.dtype, self.ways

    @property
    def work(self) -> float:
        """The amount of work: FLOPs of a product (two per multiply-add) or of a window (one per element that it covers,
        and two in backward); bytes of any other op; 1 if it has no size."""
        if self.op.startswith("conv"):
            images, side, c_in, c_out, window = self.extents
            return 2.0 * images * side * side * c_in * c_out * window * window
        if self.op == "window":
            images, side, channels, window = self.extents
            return 3.0 * images * ((side - window) // 2 + 1) ** 2 * channels * window * window
        if self.op.startswith("matmul"):
            return 2.0 * math.prod(self.extents)
        return float(self.nbytes or 1)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The measured time of one task. seconds: the median. spread: the interquartile range divided by the median."""

    key: str
    seconds: float
    spread: float
    repeats: int
    inner: int
    """How often the op runs within one timed program."""
    others: float = 0.0
    """The mean number of cores that other programs used meanwhile; 0 if the host does not report it."""


class Bench(Protocol):
    """Measures tasks, in one process or in several.

    If there are several processes, all call the same methods in the same order, and ``share`` keeps their decisions
    equal.
    """

    def prepare(self, task: Task) -> Callable[[int], float]:
        """Compiles the task. Returns run(inner), which returns the seconds for ``inner`` repetitions of the op."""
        ...

    def share(self, values: list[float]) -> list[list[float]]:
        """Returns the values of every process, in the order of the processes. There may be at most 64 values."""
        ...

    def others_s(self) -> float:
        """Returns the core-seconds that other programs have used on this host so far. It is constant if the devices are
        not these cores, or if the host does not report it."""
        ...

    def now(self) -> float:
        """Returns the seconds of a monotonic clock."""
        ...
