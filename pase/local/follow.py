"""Derives a strategy from the layouts of the inputs, for a program that was not searched, such as a derivative rule.

Each node is sharded like its operands: a mesh axis splits the iteration dim that it splits in the first operand that is
split by it. Partial sums are reduced for the next reader, and layouts that do not match are resharded;
``local_program`` finds the reshard steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from pase.ir import Access, Graph, Node
from pase.local.parts import iteration_dim
from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout
from pase.tables.layouts import NOT_SPLIT, concrete_size, dim_index, write_layout

__all__ = ["followed"]


def followed(graph: Graph, mesh: Mesh, leaves: Mapping[str, AxisLayout]) -> dict[str, np.ndarray]:
    """The strategy: node -> config, int8 [axes].

    leaves: tensor -> layout, for the graph's parameters and inputs. A config can only express layouts whose axes split
    a leaf's dims into contiguous parts, in the order of the mesh.
    """
    held: dict[str, AxisLayout] = {}
    out: dict[str, np.ndarray] = {}
    for node in graph.nodes:
        given = next((leaves[a.tensor] for op in node.ops for a in op.writes if a.tensor in leaves), None)
        if given is not None:
            write = node.ops[0].writes[0]
            held[write.tensor] = given
            config = _config(node, [write], held, mesh)
        else:
            config = _config(node, [a for op in node.ops for a in op.reads], held, mesh)
        out[node.name] = config
        for op in node.ops:
            for a in op.writes:
                held[a.tensor] = write_layout(node, op, a, config, mesh).layout
    return out


def _config(node: Node, accesses: list[Access], held: Mapping[str, AxisLayout], mesh: Mesh) -> np.ndarray:
    """The config under which these accesses read their tensors without resharding, as far as one exists."""
    config = np.full(len(mesh.sizes), NOT_SPLIT, np.int8)
    ways = dict.fromkeys(range(len(node.space.dims)), 1)
    for a in accesses:
        for axis, dim in _splits(node, a, held, mesh):
            d, size = node.space.dims[dim], mesh.sizes[axis]
            fits = concrete_size(d.size, node.name) % (ways[dim] * size) == 0
            if config[axis] == NOT_SPLIT and d.kind in ("parallel", "reduction") and fits:
                config[axis] = dim
                ways[dim] *= size
    return config


def _splits(node: Node, a: Access, held: Mapping[str, AxisLayout], mesh: Mesh) -> Iterator[tuple[int, int]]:
    """(axis, number of the iteration dim) for each split dim of a tensor. Dims under a window are left out."""
    sizes = {d.name: concrete_size(d.size, node.name) for d in node.space}
    for axis, digit in held.get(a.tensor, AxisLayout()).digits:
        walk = a.map.walks[digit.dim]
        if walk.window is None:
            dim = iteration_dim(walk.dims, sizes, digit.blocks, mesh.sizes[axis])
            yield from ((axis, i) for i in dim_index(node, [] if dim is None else [dim]))
