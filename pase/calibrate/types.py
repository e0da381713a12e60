"""What is measured (Task), what came out (Sample), and what anything that measures answers (Bench)."""

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
"""[m,k]x[k,n] of forward, [m,k]x[n,k] of the input's gradient, [k,m]x[k,n] of the weight's."""
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
"""Activations of "light": as wide as the model, and as the hidden layer and the logits."""
LIGHT_BYTES = 13_632_004.0
"""Bytes of its light work forward, joined as ``pase.ir.simplify`` joins it; backward has twice of each. A test holds
this against the graph."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """A link level as it lies here, innermost first: ``ways`` units of the level below."""

    name: str
    ways: int
    topology: Literal["switch", "torus"] = "switch"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One thing to time.

    extents: matmul: (batch, m, n, k); conv: (images, side, channels in, channels out, window); window: (images, side,
    channels, window), which moves by two.
    nbytes: memory ops: bytes moved; collectives: the larger local buffer, as in ``CostModel.collective``.
    ways: collectives: devices joined at each level, innermost first; all such groups talk at once.
    rank: 0: needed for any machine file; then in the order in which a budget is spent.
    witness: never fitted; the fit is checked against it.
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
        """The same for the same measurement, whatever its rank.

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
        """Tasks whose time grows with ``work`` alone, so that one foretells the next."""
        return self.op, self.dtype, self.ways

    @property
    def work(self) -> float:
        """FLOPs of a product (a multiply-add is two) or a window (one for each element that it meets, and two in
        backward), else bytes; 1 for what has no size."""
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
    """What one task took. seconds: the median; spread: interquartile range over the median."""

    key: str
    seconds: float
    spread: float
    repeats: int
    inner: int
    """How often the op ran within one timed program."""
    others: float = 0.0
    """Cores of this host that other programs took meanwhile, as far as that can be told."""


class Bench(Protocol):
    """Measures tasks, on one process or on several that act alike.

    In a team of processes each calls the same methods in the same order; ``share`` is what keeps
    their decisions equal.
    """

    def prepare(self, task: Task) -> Callable[[int], float]:
        """run(inner): seconds that the op takes ``inner`` times over, everything compiled before."""
        ...

    def share(self, values: list[float]) -> list[list[float]]:
        """Every process's values, process 0's first; at most 64 of them."""
        ...

    def others_s(self) -> float:
        """Seconds that other programs have had of this host's cores so far; always the same where the devices are not
        these cores, or where it cannot be told."""
        ...

    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        ...
