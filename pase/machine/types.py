"""Machines, meshes and the protocol that every cost model answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np

__all__ = ["COLLECTIVES", "CollectiveKind", "CostModel", "Device", "LinkLevel", "Machine", "Mesh"]

CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute"]
COLLECTIVES: tuple[CollectiveKind, ...] = (
    "reduce_scatter",
    "all_to_all",
    "permute",
    "all_reduce",
    "all_gather",
)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator. ``peak_flops`` maps a dtype name to FLOP/s (a multiply-add is two)."""

    name: str
    peak_flops: dict[str, float]
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class LinkLevel:
    """One level of the interconnect: ``ways`` units of the level below are joined by it.

    bandwidth is per device and direction when every device talks at once.
    The last level has ``ways = 0``: as many as are asked for.
    """

    name: str
    ways: int
    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices joined by link levels, innermost first. ``sources`` names where each number is from."""

    name: str
    device: Device
    levels: tuple[LinkLevel, ...]
    sources: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Ordered named axes; devices are numbered row-major, so the last axis is the innermost.

    >>> m = Mesh(names=("data", "model"), sizes=(4, 8))
    >>> m.devices, m.strides
    (32, (8, 1))
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes) or len(set(self.names)) != len(self.names):
            raise ValueError(f"a mesh needs one distinct name per axis, got names {self.names} sizes {self.sizes}")
        if any(s < 1 for s in self.sizes):
            raise ValueError(f"mesh axis sizes must be positive, got {self.sizes}")

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[i + 1 :]) for i in range(len(self.sizes)))

    def ways(self, axes: int) -> int:
        """Devices that a collective over the axes of this bit set (bit i = axis i) joins."""
        return math.prod(s for i, s in enumerate(self.sizes) if axes >> i & 1)


@runtime_checkable
class CostModel(Protocol):
    """Prices local work and collectives. Arrays in, arrays out: one call prices many configs."""

    name: str
    unit: str
    """"s", or "FLOP" for the paper's model."""

    def compute(self, kind: str, dtype: str, flops: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """Cost of local work on one device. kind: "matmul" | "conv" | "memory".

        flops: a multiply-add is two; nbytes: bytes that device memory must move. Shapes broadcast.
        """
        ...

    def collective(self, kind: CollectiveKind, mesh: Mesh, axes: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """Cost of one collective over mesh axes. Shapes broadcast; 0 where axes is 0 or nbytes is 0.

        axes: integer bit sets over ``mesh.names`` (bit i = axis i).
        nbytes: size of the larger local buffer: all_reduce, all_to_all and permute: the local
        tensor; reduce_scatter: the input; all_gather: the output.
        """
        ...
