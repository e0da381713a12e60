"""Random instances that are small enough for brute force, with all features that the search must handle."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from pase.search import MemoryProfile
from pase.tables.types import CostTables, EdgeTable

seeds = st.integers(0, 2**32 - 1)


def random_tables(rng: np.random.Generator, *, max_choices: int = 4000) -> CostTables:
    """Trees, cycles, cliques, sparse and disconnected graphs, with parallel edges, infinities, ties,
    zero costs, nodes with one config, and classes with and without unused numbers. Costs are integers, so sums
    are exact in float64."""
    n = int(rng.integers(1, 8))
    k_max = int(rng.integers(1, 5))
    sizes = rng.integers(1, k_max + 1, n)
    while sizes.prod() > max_choices:
        sizes[int(rng.integers(n))] = 1
    top = int(rng.choice([0, 1, 3, 50, 10**6]))
    p_inf = float(rng.choice([0.0, 0.0, 0.1, 0.3]))

    def costs(shape: tuple[int, ...]) -> np.ndarray:
        c = rng.integers(0, top + 1, shape).astype(np.float64)
        c[rng.random(shape) < p_inf] = np.inf
        return c

    kind = rng.choice(["tree", "cycle", "clique", "random", "empty"])
    pairs: list[tuple[int, int]] = []
    if kind == "tree":
        pairs = [(int(rng.integers(v)), v) for v in range(1, n)]
    elif kind == "cycle" and n > 2:
        pairs = [(v, (v + 1) % n) for v in range(n)]
    elif kind == "clique":
        pairs = [(u, v) for v in range(n) for u in range(v)]
    elif kind == "random":
        pairs = [(u, v) for v in range(n) for u in range(v) if rng.random() < 0.4]
    pairs += [pairs[int(i)] for i in rng.integers(0, max(1, len(pairs)), int(rng.integers(0, 3))) if pairs]
    edges = []
    for u, v in pairs:
        if rng.random() < 0.5:
            u, v = v, u
        cu, cv = int(rng.integers(1, 6)), int(rng.integers(1, 6))
        edges.append(
            EdgeTable(
                src=u,
                dst=v,
                cost=costs((cu, cv)),
                src_class=rng.integers(0, cu, sizes[u]).astype(np.int32),
                dst_class=rng.integers(0, cv, sizes[v]).astype(np.int32),
            )
        )
    return CostTables(node_costs=tuple(costs((int(k),)) for k in sizes), edges=tuple(edges))


def random_memory(rng: np.random.Generator, tables: CostTables) -> MemoryProfile:
    """A liveness profile over ``tables`` with a limit anywhere between impossible and loose."""
    n = len(tables.node_costs)
    held = tuple(rng.integers(0, 20, c.size).astype(np.float64) for c in tables.node_costs)
    points = int(rng.integers(1, 5))
    start = rng.integers(0, points, n)
    stop = np.minimum(points, start + rng.integers(0, points + 1, n))
    low = sum(float(b.min()) for b in held)
    high = sum(float(b.max()) for b in held)
    node = np.arange(n)
    if rng.random() < 0.5:  # some nodes also hold something at other points
        more = rng.integers(0, n, int(rng.integers(1, n + 1)))
        node = np.append(node, more)
        held += tuple(rng.integers(0, 20, tables.node_costs[v].size).astype(np.float64) for v in more)
        start = np.append(start, rng.integers(0, points, more.size))
        stop = np.append(stop, np.minimum(points, start[n:] + rng.integers(0, points + 1, more.size)))
    limit = float(np.floor(low * 0.5 + (high - low * 0.5) * rng.random()))
    return MemoryProfile(bytes=held, start=start, stop=stop, limit_bytes=limit, node=node)


def chain_of_blocks(rng: np.random.Generator, layers: int, *, block: int = 4, configs: int = 5) -> CostTables:
    """``layers`` identical blocks in a row with residual edges; the blocks share their array objects."""
    top = 1000
    node = [rng.integers(0, top, configs).astype(np.float64) for _ in range(block)]
    cls = np.arange(configs, dtype=np.int32)
    mats = [rng.integers(0, top, (configs, configs)).astype(np.float64) for _ in range(block + 1)]
    nodes, edges = [], []
    for layer in range(layers):
        at = layer * block
        nodes += node
        for i in range(block):
            if at + i > 0:
                edges.append(
                    EdgeTable(src=at + i - 1, dst=at + i, cost=mats[i], src_class=cls, dst_class=cls)
                )
        edges.append(EdgeTable(src=at, dst=at + block - 1, cost=mats[block], src_class=cls, dst_class=cls))
    return CostTables(node_costs=tuple(nodes), edges=tuple(edges))
