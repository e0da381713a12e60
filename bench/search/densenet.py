"""DenseNet on 32 devices: a graph that no elimination order fits.

    python -m bench search.densenet [--seconds 10]

Each dense layer reads the features of all layers before it, so a block of 24 layers is nearly a clique. Costs follow
the paper's formulas (a convolution as a GEMM with its three all-reduces, edges by the bytes that a consumer's shard
lacks), over splits of batch, height, width, input and output channels. Writes bench/results/search_densenet.json.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from bench.runner import Benchmark
from bench.search.common import measure, search_options, settings
from pase.tables.types import CostTables, EdgeTable

BATCH, GROWTH, RATIO = 128, 32, 5000.0  # 10 TFLOPS over 16 GB/s, as the paper's prototype
BLOCKS = {"densenet121": (6, 12, 24, 16), "densenet201": (6, 12, 48, 32)}

LayerSizes = tuple[int, int, int, int, int, int]
"""Batch, height, width, input channels, output channels, taps of the filter."""


class TableBuilder:
    """Nodes and edges of a convolutional graph; equal layers share their arrays."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.costs: list[np.ndarray] = []
        self.names: list[str] = []
        self.spaces: list[LayerSizes] = []
        self.edges: list[EdgeTable] = []
        self._configs: dict[LayerSizes, np.ndarray] = {}
        self._nodes: dict[LayerSizes, np.ndarray] = {}
        self._tables: dict[object, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def configs(self, space: LayerSizes) -> np.ndarray:
        """Returns the splits, int64 [K, 5]: powers of two, at most ``devices`` parts, no part smaller than one."""
        if space not in self._configs:
            powers = [2**i for i in range(self.devices.bit_length())]
            every = itertools.product(*([p for p in powers if size % p == 0] for size in space[:5]))
            self._configs[space] = np.array([c for c in every if math.prod(c) <= self.devices])
        return self._configs[space]

    def conv(self, name: str, space: LayerSizes) -> int:
        if space not in self._nodes:
            splits = self.configs(space).astype(float)
            b, h, w, c, n = (space[i] / splits[:, i] for i in range(5))
            m, k = b * h * w, c * space[5]
            ways_m, ways_k, ways_n = splits[:, 0] * splits[:, 1] * splits[:, 2], splits[:, 3], splits[:, 4]

            def all_reduce(words: np.ndarray, ways: np.ndarray) -> np.ndarray:
                return RATIO * 2 * (ways - 1) / ways * words

            self._nodes[space] = (
                3 * m * n * k
                + all_reduce(m * n, ways_k)  # partial sums forward
                + all_reduce(m * c, ways_n)  # input gradient
                + all_reduce(n * k, ways_m)  # weight gradient
            )
        self.costs.append(self._nodes[space])
        self.names.append(name)
        self.spaces.append(space)
        return len(self.costs) - 1

    def edge(self, src: int, dst: int) -> None:
        """Adds an edge: dst reads all that src writes, possibly as part of its input channels, at dst's resolution."""
        a, b = self.spaces[src], self.spaces[dst]
        if (a, b) not in self._tables:
            tensor = np.array([a[0], b[1], b[2], a[4]], float)  # batch, height, width, channels
            out, src_class = np.unique(self.configs(a)[:, [0, 1, 2, 4]], axis=0, return_inverse=True)
            into, dst_class = np.unique(self.configs(b)[:, [0, 1, 2, 3]], axis=0, return_inverse=True)
            have, need = tensor / out, tensor / into
            share = np.minimum(have[:, None, :], need[None, :, :]).prod(axis=2)
            lacking = np.maximum(0.0, need.prod(axis=1)[None, :] - share)
            self._tables[a, b] = (
                2 * RATIO * lacking,
                src_class.reshape(-1).astype(np.int32),
                dst_class.reshape(-1).astype(np.int32),
            )
        cost, src_class, dst_class = self._tables[a, b]
        self.edges.append(EdgeTable(src=src, dst=dst, cost=cost, src_class=src_class, dst_class=dst_class))

    def tables(self) -> CostTables:
        return CostTables(node_costs=tuple(self.costs), edges=tuple(self.edges), names=tuple(self.names))


def densenet(name: str, devices: int) -> CostTables:
    """Returns the cost tables of DenseNet ``name``, where each dense layer reads all earlier layers of its block."""
    g = TableBuilder(devices)
    side, channels = 56, 64
    before = [g.conv("stem", (BATCH, 112, 112, 3, 64, 49))]
    for block, layers in enumerate(BLOCKS[name]):
        for layer in range(layers):
            squeeze = g.conv(f"{block}.{layer}.1x1", (BATCH, side, side, channels, 4 * GROWTH, 1))
            for u in before:
                g.edge(u, squeeze)
            grow = g.conv(f"{block}.{layer}.3x3", (BATCH, side, side, 4 * GROWTH, GROWTH, 9))
            g.edge(squeeze, grow)
            before.append(grow)
            channels += GROWTH
        if block < len(BLOCKS[name]) - 1:
            halve = g.conv(f"{block}.transition", (BATCH, side, side, channels, channels // 2, 1))
            for u in before:
                g.edge(u, halve)
            before, channels, side = [halve], channels // 2, side // 2
    head = g.conv("classifier", (BATCH, 1, 1, channels, 1000, 1))
    for u in before:
        g.edge(u, head)
    return g.tables()


BENCH = Benchmark(
    "search_densenet",
    {f"{name}@32": name for name in BLOCKS},
    lambda name, given: measure(f"{name}@32", densenet(name, 32), None, given),
    named="{instance}",
    head=settings,
    options=search_options(seconds=10.0),
)
