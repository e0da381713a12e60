"""The layouts in which each equation of the model reads and writes its tensors, computed in one place for all users.

A partial sum has the layout in which it is summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pase.ir import Access, Graph, Node, Op, Place
from pase.machine import Mesh
from pase.tables.axis_layout import AccessLayout, AxisLayout
from pase.tables.layouts import read_layout, write_layout

__all__ = [
    "EquationLayouts",
    "NodeLayouts",
    "Reading",
    "access_layouts",
    "distinct",
    "equation_layouts",
]

_NO_EQUATION = ("output", "copy", "parameter", "input", "constant", "cotangent", "gradient")


@dataclass(frozen=True)
class Reading:
    """The read of a tensor, or of a copy shared by several equations, by the equation ``at``."""

    at: Place
    tensor: str


@dataclass(frozen=True, kw_only=True)
class EquationLayouts:
    """The layouts of what one equation reads and writes. Tensors are named as in the traced graph."""

    reads: Mapping[str, AxisLayout]
    writes: Mapping[str, AxisLayout]


@dataclass(frozen=True, kw_only=True)
class NodeLayouts:
    """The layouts of each access of each op of a node.

    reads: None if the op only passes on what it reads (a copy, an output), or if it runs in backward.
    """

    reads: tuple[tuple[AccessLayout | None, ...], ...]
    writes: tuple[tuple[AccessLayout, ...], ...]


def access_layouts(graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> dict[str, NodeLayouts]:
    """Return the layouts of each node's accesses, by node name. configs: node name -> int8 [axes]."""

    def read(n: Node, op: Op, a: Access) -> AccessLayout | None:
        if op.kind in ("copy", "output") or op.backward:  # the program has no equation for it
            return None
        return read_layout(n, op, a, configs[n.name], mesh)

    return {
        n.name: NodeLayouts(
            reads=tuple(tuple(read(n, op, a) for a in op.reads) for op in n.ops),
            writes=tuple(
                tuple(write_layout(n, op, a, configs[n.name], mesh) for a in op.writes) for op in n.ops
            ),
        )
        for n in graph.nodes
    }


def equation_layouts(graph: Graph, layouts: Mapping[str, NodeLayouts]) -> dict[Place, EquationLayouts]:
    """Return the layouts of each equation. layouts: the result of ``access_layouts``."""
    found: dict[Place, tuple[dict[str, AxisLayout], dict[str, AxisLayout]]] = {}
    for n in graph.nodes:
        of_node = layouts[n.name]
        for op, reads, writes in zip(n.ops, of_node.reads, of_node.writes, strict=True):
            if op.kind in _NO_EQUATION or op.backward:
                continue
            both = found.setdefault(op.eqn, ({}, {}))
            for kept, accesses, had in ((both[0], op.reads, reads), (both[1], op.writes, writes)):
                for a, x in zip(accesses, had, strict=True):
                    if x is not None:
                        kept.setdefault(graph.tensors[a.tensor].original, x.layout.summed)
    return {at: EquationLayouts(reads=reads, writes=writes) for at, (reads, writes) in found.items()}


def distinct(layouts: Mapping[Place, EquationLayouts]) -> Iterator[AxisLayout]:
    """Yield every layout that occurs, once, in the order of first occurrence."""
    every = (d for e in layouts.values() for part in (e.reads, e.writes) for d in part.values())
    yield from dict.fromkeys(every)
