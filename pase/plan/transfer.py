"""Applies a strategy found at one size to the same model at another size and on fewer devices."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pase.errors import PaseError
from pase.ir import Graph, Node
from pase.machine import Mesh
from pase.plan.types import PlanData
from pase.tables.layouts import configs

__all__ = ["shrunk_mesh", "transferred"]


def shrunk_mesh(mesh: Mesh, devices: int) -> Mesh:
    """Return the mesh with its axes divided, the largest first, until it has ``devices``. Axis names do not change.

    >>> shrunk_mesh(Mesh(names=("data", "model"), sizes=(8, 4)), 8)
    Mesh(names=('data', 'model'), sizes=(2, 4))
    """
    if mesh.devices % devices:
        raise PaseError(
            f"{devices} devices do not divide the plan's {mesh.devices}",
            fix=f"choose a divisor of {mesh.devices}",
        )
    sizes = list(mesh.sizes)
    left = mesh.devices // devices
    while left > 1:
        prime = next(p for p in range(2, left + 1) if left % p == 0)
        i = max((i for i, s in enumerate(sizes) if s % prime == 0), key=lambda i: sizes[i])
        sizes[i] //= prime
        left //= prime
    return Mesh(names=mesh.names, sizes=tuple(sizes))


def transferred(plan: PlanData, graph: Graph, mesh: Mesh) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Return configs for the nodes of ``graph`` (the plan's model at another size) whose names are in the plan.

    ``mesh`` has the plan's axes. The second result lists the nodes for which an axis had to be dropped because the
    smaller size is not divisible.

    A few nodes may have no counterpart: for example, a model that computes in its parameters' own dtype has no casts.
    The search has to fill these in. Raises PaseError if more than a third of the graph's nodes have no counterpart,
    because it is then not that of the plan's model. The plan may have many more: a smaller model has fewer layers.
    """
    known = {n.name: n for n in plan.nodes}
    shared = [n for n in graph.nodes if n.name in known and known[n.name].op == n.kind]
    if 3 * len(shared) < 2 * len(graph.nodes):
        raise PaseError(
            f"the graph is not that of the plan for '{plan.model}': "
            f"{len(shared)} of its {len(graph.nodes)} nodes are among the plan's {len(plan.nodes)}",
            fix="use the model that was compiled",
        )
    out: dict[str, np.ndarray] = {}
    dropped: list[str] = []
    for n in shared:
        out[n.name], whole = _fitted(n, known[n.name].split, mesh)
        if not whole:
            dropped.append(n.name)
    return out, tuple(dropped)


def _fitted(node: Node, split: Mapping[str, tuple[str, ...]], mesh: Mesh) -> tuple[np.ndarray, bool]:
    dims = {d.name: i for i, d in enumerate(node.space)}
    config = np.full(len(mesh.names), -1, dtype=np.int8)
    space = configs(node, mesh)
    whole = True
    for d, axes in split.items():
        for a in axes:
            i = mesh.names.index(a)
            if mesh.sizes[i] == 1:
                continue
            before = config[i]
            config[i] = dims.get(d, -1)
            if not (space == config).all(axis=1).any():
                config[i] = before
                whole = False
    return config, whole
