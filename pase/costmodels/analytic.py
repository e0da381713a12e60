"""Costs in seconds: a roofline for local work, and the machine's own collective algorithms by size."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from pase.costmodels.attention import attention_s
from pase.costmodels.collectives import DeviceGroup, group, lines
from pase.costmodels.products import product_s
from pase.costmodels.registry import register
from pase.machine import CollectiveCurve, CollectiveKind, Machine, Mesh
from pase.machine.tables import curve_s, matmul_flops_per_s

__all__ = ["Analytic"]

_SPLITS_OF_K = (1, 2, 4, 8, 16)


@register("analytic")
class Analytic:
    """Predicts seconds on a machine. Measured tables in the machine's file replace the formulas.

    >>> from pase.machine import load, mesh_from
    >>> model = Analytic(load("h100x8"))
    >>> mesh = mesh_from("data=4,model=8", 32)
    >>> t = model.collective("all_reduce", mesh, [0, 1, 2, 3], 1e9)
    >>> [round(1e3 * float(ms), 1) for ms in t]
    [0.0, 31.6, 3.9, 5.5]
    """

    name = "analytic"
    unit = "s"

    def __init__(
        self, machine: Machine, *, flat: bool = False, steady: bool = True, copies: float = 1.0
    ) -> None:
        """flat: whether collectives are single calls of a library whose rings go through all devices (NCCL).

        steady: whether the device is at its power limit, as it is during a training step. If false, an op is priced as
            a benchmark of this op alone shows it.

        copies: how often each item, such as a token for several experts, occurs in the bytes of an all-to-all. It
            counts for a library that sends an item once to each unit (``Algorithm.once``).
        """
        if not copies >= 1:
            raise ValueError(f"an item occurs at least once in an all-to-all, got {copies} copies")
        self.machine = machine
        self.flat = flat
        self.steady = steady
        self.copies = copies
        self._coefficients: dict[tuple[CollectiveKind, tuple[int, ...]], tuple[np.ndarray, np.ndarray]] = {}
        self._by_group: dict[tuple[CollectiveKind, DeviceGroup], np.ndarray] = {}
        self._groups: dict[tuple[int, ...], list[DeviceGroup]] = {}

    # -- local work --

    def compute(
        self,
        kind: str,
        dtype: str,
        flops: ArrayLike,
        nbytes: ArrayLike,
        *,
        mnk: tuple[ArrayLike, ArrayLike, ArrayLike] | None = None,
    ) -> np.ndarray:
        """The seconds of local work: the slower of arithmetic and memory, plus a launch. No work costs nothing."""
        device = self.machine.device
        if kind not in ("matmul", "conv", "attention", "memory"):
            raise ValueError(f"compute kind must be 'matmul', 'conv', 'attention' or 'memory', got '{kind}'")
        flops, nbytes = np.asarray(flops, dtype=float), np.asarray(nbytes, dtype=float)
        launch, dtype = device.launch_s, device.rated(dtype)
        busy = (flops > 0) | (nbytes > 0)
        if kind == "attention" and device.attention is not None and mnk is not None:
            queries, keys, width = (np.asarray(x, dtype=float) for x in mnk)
            seconds = attention_s(device, device.attention, dtype, flops, nbytes, (queries, keys, width))
            return np.where(busy, seconds, 0.0)
        measured = any(t.dtype == dtype for t in device.matmul_tables)
        if kind in ("matmul", "conv") and device.products is not None and not measured:
            return np.where(busy, self._kernels_s(kind, dtype, flops, nbytes, mnk), 0.0)
        if device.memory_curve is not None:
            moving = curve_s(device.memory_curve, nbytes)
            # The curve was measured with its launch, so a memory-bound op pays no second one.
            moving = np.maximum(moving - launch, 0.0)
        else:
            moving = nbytes / device.moved_bytes_per_s
        if kind == "memory":
            working = flops / (device.vector_flops or min(device.peak_flops.values()))
        else:
            working = self._products_s(kind, dtype, flops, mnk)
        return np.where(busy, np.maximum(working, moving) + launch, 0.0)

    def _kernels_s(
        self,
        kind: str,
        dtype: str,
        flops: np.ndarray,
        nbytes: np.ndarray,
        mnk: tuple[ArrayLike, ArrayLike, ArrayLike] | None,
    ) -> np.ndarray:
        """The seconds of products by the library's kernels. A convolution is a product at its own part of the peak."""
        device = self.machine.device
        assert device.products is not None  # compute chose this
        part = device.efficiency.get("conv") if kind == "conv" else None
        rate = device.peak(dtype) * (part or device.products.rate_of(dtype))
        extents = None
        if mnk is not None:
            m, n, k = (np.asarray(x, dtype=float) for x in mnk)
            extents = m, n, k
        conv = kind == "conv"
        return product_s(device, rate, dtype, flops, nbytes, extents, window=conv, steady=self.steady)

    def _products_s(
        self,
        kind: str,
        dtype: str,
        flops: np.ndarray,
        mnk: tuple[ArrayLike, ArrayLike, ArrayLike] | None,
    ) -> np.ndarray:
        device = self.machine.device
        if kind == "attention":
            kind = "matmul"  # without a figure for the fused kernel, attention is priced as its products
        rate = device.peak(dtype) * device.reached(kind, dtype)
        if mnk is None:
            return flops / rate
        m, n, k = (np.maximum(np.asarray(x, dtype=float), 1.0) for x in mnk)
        batch = flops / (2 * m * n * k)
        table = next((t for t in device.matmul_tables if t.dtype == dtype), None)
        if table is not None:
            # A batch fills the device in the same way as more rows would.
            measured = matmul_flops_per_s(table, np.maximum(m * batch, 1.0), n, k)
            # There are no tables for convolutions. Their rate relative to a matmul's is taken from the machine's file.
            part = device.efficiency.get(kind, 1.0) / device.efficiency.get("matmul", 1.0)
            rates = np.minimum(measured * part, max(table.flops_per_s)) if part > 1 else measured * part
            return np.maximum(flops / rates - device.launch_s, 0.0)
        if not device.compute_units or not device.tiles:
            return flops / rate
        return self._tiled_s(batch, m, n, k, rate)

    def _tiled_s(
        self, batch: np.ndarray, m: np.ndarray, n: np.ndarray, k: np.ndarray, rate: float
    ) -> np.ndarray:
        """The time of whole waves of whole tiles, for the best tile and split of k. A split writes partial sums.

        Axis 0 is over the tiles, axis 1 over the splits, and the operands' own axes follow.
        """
        device = self.machine.device
        batch, m, n, k = np.broadcast_arrays(batch, m, n, k)
        behind = (1,) * batch.ndim
        tm, tn, tk, tile_rate, overhead_s = (
            np.array([getattr(t, field) for t in device.tiles], dtype=float).reshape(-1, 1, *behind)
            for field in ("m", "n", "k", "rate", "overhead_s")
        )
        split = np.array(_SPLITS_OF_K, dtype=float).reshape(1, -1, *behind)
        tiles = batch * np.ceil(m / tm) * np.ceil(n / tn)
        waves = np.ceil(tiles * split / device.compute_units)
        depth = np.ceil(k / (split * tk))
        wave_s = 2.0 * tm * tn * tk * device.compute_units / (rate * tile_rate)
        # The float32 partial sums are written and read again.
        partial_s = 2 * 4 * batch * m * n / device.memory_bandwidth_bytes_per_s
        seconds = waves * (depth * wave_s + overhead_s) + np.where(split > 1, split, 0.0) * partial_s
        return np.asarray(seconds.min(axis=(0, 1)))

    # -- collectives --

    def collective(self, kind: CollectiveKind, mesh: Mesh, axes: ArrayLike, nbytes: ArrayLike) -> np.ndarray:
        """The seconds of the cheapest algorithm for each size; see ``costmodels/collectives.py``."""
        axes, nbytes = np.asarray(axes), np.asarray(nbytes, dtype=float)
        if axes.size and (axes.min() < 0 or axes.max() >= 1 << len(mesh.sizes)):
            raise ValueError(f"the axis sets of mesh {mesh.names} must be in 0..{(1 << len(mesh.sizes)) - 1}")
        alpha, beta = self._table(kind, mesh)
        out = np.full(np.broadcast_shapes(axes.shape, nbytes.shape), np.inf)
        for a, b in zip(alpha, beta, strict=True):
            np.minimum(out, a[axes] + b[axes] * nbytes, out=out)
        for axis_set in self._measured_sets(kind, mesh):
            out = np.where(axes == axis_set, self._measured_s(kind, mesh, axis_set, nbytes), out)
        # Axis sets that join nothing have the line 0 + 0 * bytes.
        return np.where(nbytes > 0, out, 0.0)

    def _of_mesh(self, mesh: Mesh) -> list[DeviceGroup]:
        if mesh.sizes not in self._groups:
            sets = range(1 << len(mesh.sizes))
            self._groups[mesh.sizes] = [group(mesh, s, self.machine) for s in sets]
        return self._groups[mesh.sizes]

    def _lines(self, kind: CollectiveKind, g: DeviceGroup) -> np.ndarray:
        if (kind, g) not in self._by_group:
            self._by_group[kind, g] = lines(kind, self.machine, g, flat=self.flat, copies=self.copies)
        return self._by_group[kind, g]

    def _table(self, kind: CollectiveKind, mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
        """alpha and beta as float64 [lines, axis sets]. Shorter lists of lines are padded with their last line."""
        key = (kind, mesh.sizes)
        if key not in self._coefficients:
            found = [self._lines(kind, g) for g in self._of_mesh(mesh)]
            most = max(len(f) for f in found)
            full = np.stack([np.pad(f, ((0, most - len(f)), (0, 0)), mode="edge") for f in found])
            self._coefficients[key] = (full[:, :, 0].T.copy(), full[:, :, 1].T.copy())
        return self._coefficients[key]

    def _nearest(self, kind: CollectiveKind, g: DeviceGroup) -> CollectiveCurve | None:
        """The measured curve over the same levels with the nearest number of devices, or None."""
        crossed = [w > 1 for w in g.ways]
        same = [c for c in self.machine.collectives if c.kind == kind and [w > 1 for w in c.ways] == crossed]
        size = math.log(math.prod(g.ways))
        return min(same, key=lambda c: abs(math.log(math.prod(c.ways)) - size), default=None)

    def _measured_sets(self, kind: CollectiveKind, mesh: Mesh) -> list[int]:
        if not self.machine.collectives:
            return []
        groups = self._of_mesh(mesh)
        return [s for s, g in enumerate(groups) if math.prod(g.ways) > 1 and self._nearest(kind, g)]

    def _measured_s(self, kind: CollectiveKind, mesh: Mesh, axis_set: int, nbytes: np.ndarray) -> np.ndarray:
        """The time from the measured table. For other ways than measured, it is scaled as the formulas scale at the
        largest measured size."""
        g = self._of_mesh(mesh)[axis_set]
        measured = self._nearest(kind, g)
        assert measured is not None  # _measured_sets chose it
        seconds = curve_s(measured.curve, nbytes)
        if measured.ways == g.ways:
            return seconds
        like = DeviceGroup(ways=measured.ways, stretch=g.stretch, ring=g.ring)
        last = measured.curve.nbytes[-1]
        wanted, had = (
            float(np.min(f[:, 0] + f[:, 1] * last)) for f in (self._lines(kind, g), self._lines(kind, like))
        )
        return seconds * (wanted / had)
