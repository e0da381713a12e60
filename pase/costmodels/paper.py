"""PaSE's own cost model: FLOP-equivalents, no latency, no hierarchy, no memory traffic."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from pase.costmodels.registry import register
from pase.machine import CollectiveKind, Machine, Mesh, PaperFigures

__all__ = ["Paper", "figures"]


def figures(machine: Machine) -> PaperFigures:
    """The machine's [paper] figures, or else its float32 peak, its outermost bandwidth, and 8-byte words."""
    if machine.paper is not None:
        return machine.paper
    return PaperFigures(
        flops=machine.device.peak("float32"),
        bandwidth_bytes_per_s=machine.levels[-1].bandwidth_bytes_per_s,
        word_bytes=8,
    )


def _sent_part(kind: CollectiveKind, ways: int) -> float:
    """The fraction of ``nbytes`` that a device sends: 2(P-1)/P for a ring all-reduce, (P-1)/P for its halves."""
    match kind:
        case "all_reduce":
            return 2 * (ways - 1) / ways
        case "reduce_scatter" | "all_gather" | "all_to_all":
            return (ways - 1) / ways
        case "permute" | "broadcast":
            return 1.0 if ways > 1 else 0.0
    raise ValueError(f"unknown collective kind '{kind}'")


@register("paper")
class Paper:
    """PaSE's F = sum of t_l + r * t_x: multiply-adds, and words sent at r FLOP each.

    A multiply-add counts as one FLOP, as in the paper. r = word bytes * FLOP/s / (bytes/s) = 5000 with the paper's
    figures of 10 TFLOPS and 16 GB/s for 8-byte words. The prototype prices every element as one such word, whatever its
    dtype; pass nbytes = elements * word_bytes to reproduce it.

    >>> from pase.machine import load, mesh_from
    >>> model = Paper(load("1080tix8"))
    >>> float(model.compute("matmul", "float32", 2 * 64 * 32 * 16, 0)) == 64 * 32 * 16
    True
    >>> float(model.collective("all_reduce", mesh_from("4", 4), 1, 8.0)) == 5000 * 2 * 3 / 4
    True
    """

    name = "paper"
    unit = "FLOP"

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.figures = figures(machine)

    def compute(
        self,
        kind: str,
        dtype: str,
        flops: ArrayLike,
        nbytes: ArrayLike,
        *,
        mnk: tuple[ArrayLike, ArrayLike, ArrayLike] | None = None,
    ) -> np.ndarray:
        """The multiply-adds of products; the FLOPs of other work. Memory traffic is free, as in the paper."""
        if kind not in ("matmul", "conv", "attention", "memory"):
            raise ValueError(f"compute kind must be 'matmul', 'conv', 'attention' or 'memory', got '{kind}'")
        work = np.asarray(flops, dtype=float) * (1.0 if kind == "memory" else 0.5)
        return np.broadcast_to(work, np.broadcast_shapes(work.shape, np.shape(nbytes))).copy()

    def collective(self, kind: CollectiveKind, mesh: Mesh, axes: ArrayLike, nbytes: ArrayLike) -> np.ndarray:
        """r FLOP for each word that a device sends."""
        ways = [
            math.prod(s for i, s in enumerate(mesh.sizes) if x >> i & 1) for x in range(1 << len(mesh.sizes))
        ]
        sent = np.array([_sent_part(kind, w) for w in ways])
        return sent[np.asarray(axes)] * np.asarray(nbytes, dtype=float) * self.figures.flop_per_byte
