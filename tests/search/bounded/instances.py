"""Random tables for the bounded search, and their reductions."""

from __future__ import annotations

import numpy as np

from pase.errors import Infeasible
from pase.search import MemoryProfile, brute_force
from pase.search.bounded.contract import Contracted, contract
from pase.tables.types import CostTables, EdgeTable


def optimum(tables: CostTables, memory: MemoryProfile | None = None) -> float | None:
    try:
        return brute_force(tables, memory).cost
    except Infeasible:
        return None


def contracted(tables: CostTables, memory: MemoryProfile | None = None) -> Contracted | None:
    try:
        return contract(tables, memory)
    except Infeasible:
        return None


def clique(rng: np.random.Generator, nodes: int, configs: int) -> CostTables:
    cls = np.arange(configs, dtype=np.int32)
    return CostTables(
        node_costs=tuple(rng.integers(0, 1000, configs).astype(float) for _ in range(nodes)),
        edges=tuple(
            EdgeTable(
                src=u,
                dst=v,
                cost=rng.integers(0, 1000, (configs, configs)).astype(float),
                src_class=cls,
                dst_class=cls,
            )
            for v in range(nodes)
            for u in range(v)
        ),
    )


def limited(seed: int, nodes: int = 16, configs: int = 8) -> tuple[CostTables, MemoryProfile]:
    """A dense graph under a limit. With 16 nodes it is too large for an integer program at once."""
    rng = np.random.default_rng(seed)
    tables = clique(rng, nodes=nodes, configs=configs)
    held = tuple(rng.integers(0, 20, configs).astype(float) for _ in range(nodes))
    return tables, MemoryProfile.all_live(held, nodes * 7.0)
