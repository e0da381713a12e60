"""Finds the configs of a stored tensor that match the layout of the user's array (``Graph.fixed``)."""

from __future__ import annotations

import itertools

import numpy as np

from pase.ir import FixedLayout, Graph, Node
from pase.machine import Mesh
from pase.tables.axis_layout import REPLICATED, digit_state, forward_states, tensor_dim
from pase.tables.layouts import configs, dim_index, write_rule

__all__ = ["as_fixed", "fixed_layout", "misfit", "why_not"]


def fixed_layout(graph: Graph, node: Node) -> FixedLayout | None:
    """The layout that the user fixed for the tensor that the node stores; None if there is none."""
    if not graph.fixed or node.kind not in ("parameter", "input"):
        return None
    return graph.fixed.get(node.ops[0].writes[0].tensor)


def as_fixed(node: Node, cfg: np.ndarray, mesh: Mesh, layout: FixedLayout) -> np.ndarray:
    """bool [K]: whether each config stores the tensor in this layout. All False if the mesh cannot hold the layout."""
    parts = layout.mesh.parts(mesh.sizes)
    if parts is None:
        return np.zeros(len(cfg), dtype=bool)
    op = node.ops[0]
    states = forward_states(write_rule(node, op, op.writes[0]).states(cfg, mesh))
    wanted = np.full(len(mesh.sizes), REPLICATED)
    for dim, axes in enumerate(layout.dims):
        blocks = 1
        for axis in itertools.chain.from_iterable(parts[a] for a in axes or ()):
            blocks *= mesh.sizes[axis]
            wanted[axis] = digit_state(dim, blocks)
    free = [dim for dim, axes in enumerate(layout.dims) if axes is None]
    named = {axis for axes in layout.dims for a in axes or () for axis in parts[a]}
    open_axes = [a not in named for a in range(len(mesh.sizes))]
    within = (states >= 0) & np.isin(tensor_dim(states), free) & np.array(open_axes)
    return np.asarray(((states == wanted) | within).all(axis=1))


def misfit(graph: Graph, mesh: Mesh) -> tuple[FixedLayout, str] | None:
    """The first layout that the user fixed and that no strategy on this mesh keeps, and why; None if there is none."""
    for n in graph.nodes:
        layout = fixed_layout(graph, n)
        if layout is None:
            continue
        if layout.mesh.parts(mesh.sizes) is None:
            shape = "×".join(map(str, mesh.sizes))
            return layout, f"the mesh {shape} cannot hold the layout of '{layout.path}', {layout}"
        if not as_fixed(n, configs(n, mesh), mesh, layout).any():
            return layout, f"'{layout.path}' cannot be stored as {layout}: {_reason(n, layout)}"
    return None


def why_not(graph: Graph, mesh: Mesh) -> str | None:
    """Why no strategy on this mesh keeps the layouts that the user fixed; None if every layout can be kept."""
    found = misfit(graph, mesh)
    return None if found is None else found[1]


def _reason(node: Node, layout: FixedLayout) -> str:
    """Why no config stores the tensor in this layout."""
    access = node.ops[0].writes[0]
    place = {name: i for i, name in enumerate(layout.mesh.names)}
    ways = dict(zip(layout.mesh.names, layout.mesh.sizes, strict=True))
    for dim, (axes, walk) in enumerate(zip(layout.dims, access.map.walks, strict=True)):
        size = np.prod([int(node.space.dims[i].size) for i in dim_index(node, walk.dims)], dtype=int)
        split = int(np.prod([ways[a] for a in axes or ()], dtype=int))
        if axes and any(node.space.dims[i].kind == "replicated" for i in dim_index(node, walk.dims)):
            return f"its dim {dim} cannot be split, because a loop runs over it or an op reads it whole"
        if size % split:
            return f"{split} devices do not divide the {size} elements of its dim {dim}"
        if axes and list(axes) != sorted(axes, key=place.__getitem__):
            ordered = tuple(sorted(axes, key=place.__getitem__))
            return f"axes that split one dim must be in the mesh's order, as in P({ordered})"
    return "an op that reads it needs one of these dims whole, or views it as dims that these axes do not divide evenly"
