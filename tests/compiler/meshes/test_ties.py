"""Of strategies that cost the same, the one that stores the least is taken."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from pase.compiler.meshes.search import search_meshes
from pase.compiler.meshes.ties import least_stored
from pase.compiler.problem.problem import SplitProblem
from pase.frontends.jax.frontend import trace
from pase.machine import mesh_from
from pase.search.check import cost_of
from pase.tables.layouts import local_bytes

MESH = mesh_from("4", 4)


def stored(problem: SplitProblem, configs: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the bytes of each stored tensor on a device."""
    graph, out = problem.graph, {}
    for n in graph.nodes:
        if n.kind in ("parameter", "input"):
            access = n.ops[0].writes[0]
            out[n.name] = float(
                local_bytes(n, graph.tensors[access.tensor], access, configs[n.name][None], MESH)[0]
            )
    return out


def test_a_table_that_is_stored_whole_is_split_as_its_reader_wants_it() -> None:
    """In a program that is not trained, a product split by its columns reads a quarter of the weight."""
    w, x = (jax.ShapeDtypeStruct(s, "float32") for s in ((512, 4096), (8, 512)))
    traced = trace(lambda w, x: x @ w, w, x, mode="inference")
    problem = SplitProblem.of(traced.graph, 4, "h100x8", "analytic", "adam", "none")
    found = search_meshes(problem, [MESH])
    tables, _ = problem.tables(MESH)
    less = least_stored(problem, found)
    before, after = stored(problem, found.configs), stored(problem, less.configs)
    assert after == {"params": before["params"] / 4, "in.x": before["in.x"]}
    assert cost_of(tables, less.solution.choice) == pytest.approx(found.solution.cost, rel=1e-9)
    # By brute force: no single stored tensor can be split further at the same cost.
    graph = problem.graph
    for v, n in enumerate(graph.nodes):
        if n.name not in after:
            continue
        for k in range(len(less.space.configs[v])):
            other = np.array(less.solution.choice)
            other[v] = k
            if cost_of(tables, other) <= found.solution.cost * (1 + 1e-12):
                configs = less.configs | {n.name: less.space.configs[v][k]}
                assert stored(problem, configs)[n.name] >= after[n.name]
