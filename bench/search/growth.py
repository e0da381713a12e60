"""Search time as a model grows from 2 to 1,000 equal layers.

    python -m bench search.growth [--only "5 layers"]

The search may use the repetition (equal layers) or not (layers that differ). A layer has 12 nodes with residual edges,
in the sizes of the paper's Transformer at p = 64: 566 configs per node, 84 classes per edge. Costs are random, so that
nothing prunes them. Writes bench/results/search_growth.json.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from typing import Any

import numpy as np

from bench.runner import Benchmark, option
from bench.search.common import settings
from pase.search import solve, verify
from pase.tables.types import CostTables, EdgeTable

LAYERS = (2, 5, 10, 20, 50, 100, 126, 200, 500, 1000)


def stack(
    layers: int, *, shared: bool = True, block: int = 12, configs: int = 566, classes: int = 84
) -> CostTables:
    """Returns the tables of blocks of 12 nodes with residual edges; with ``shared=False`` each layer has its own
    arrays."""
    rng = np.random.default_rng(0)
    node = [rng.integers(0, 1000, configs).astype(float) for _ in range(block)]
    cls = [rng.integers(0, classes, configs).astype(np.int32) for _ in range(4)]

    def matrix() -> np.ndarray:
        return rng.integers(0, 1000, (classes, classes)).astype(float)

    inner = [(i, i + 1, matrix()) for i in range(block - 1)]
    inner += [(i, j, matrix()) for i, j in ((0, 4), (4, 8), (8, 11), (1, 3))]
    links = [(0, matrix()), (4, matrix())]
    nodes: list[np.ndarray] = []
    edges: list[EdgeTable] = []

    def own(a: np.ndarray) -> np.ndarray:
        return a if shared else a + rng.integers(0, 2, a.shape)

    for layer in range(layers):
        at = layer * block
        nodes += [own(c) for c in node]
        pairs = [(at + i, at + j, cls[i % 4], cls[j % 4], t) for i, j, t in inner]
        pairs += [(at - 1, at + j, cls[3], cls[j % 4], t) for j, t in links if layer]
        edges += [
            EdgeTable(src=a, dst=b, cost=own(t), src_class=ca, dst_class=cb) for a, b, ca, cb, t in pairs
        ]
    return CostTables(node_costs=tuple(nodes), edges=tuple(edges))


def measured(layers: int, given: Namespace) -> dict[str, Any]:
    """Returns a row: median seconds with equal layers, and with layers that differ (up to 126)."""
    row: dict[str, Any] = {"layers": layers, "nodes": 12 * layers}
    for kind in ("shared", "unlike") if layers <= 126 else ("shared",):
        tables = stack(layers, shared=kind == "shared")
        times = []
        for _ in range(given.repeats):
            began = time.perf_counter()
            found = solve(tables)
            times.append(time.perf_counter() - began)
        verify(tables, found)
        row |= {f"{kind}_s": round(statistics.median(times), 5), f"{kind}_work": found.work}
    return row


BENCH = Benchmark(
    "search_growth",
    {f"{layers} layers": layers for layers in LAYERS},
    measured,
    named="{layers} layers",
    head=settings,
    options=[option("--repeats", type=int, default=3)],
    prepare=lambda: solve(stack(2)),  # compiles the kernels
)
