"""The layouts in which each equation of the model reads and writes its tensors. They are computed once, for all users.

A layout is one digit for each mesh axis: (tensor dim, blocks) says what the axis selects of the tensor, and None says
that the tensor is replicated over the axis. A partial sum has the layout in which it is summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from pase.ir import Access, Graph, Node, Op, Place
from pase.machine import Mesh
from pase.tables.layouts import blocks_of, forward_states, read_states, tensor_dim, write_states

__all__ = [
    "Digit",
    "Digits",
    "EquationLayouts",
    "NodeStates",
    "Reading",
    "access_states",
    "distinct",
    "equation_layouts",
]

Digit: TypeAlias = "tuple[int, int] | None"
"""(tensor dim, blocks that this and the more major axes cut it in), as in ``pase.tables.layouts``; None: replicated."""
Digits: TypeAlias = tuple[Digit, ...]

_NO_EQUATION = ("output", "copy", "parameter", "input", "constant", "cotangent", "gradient")


@dataclass(frozen=True)
class Reading:
    """An equation reads a tensor, or a copy that it shares with other equations. at: the equation."""

    at: Place
    tensor: str


@dataclass(frozen=True, kw_only=True)
class EquationLayouts:
    """The layouts of what one equation reads and writes. Tensors are named as in the traced graph."""

    reads: Mapping[str, Digits]
    writes: Mapping[str, Digits]


@dataclass(frozen=True, kw_only=True)
class NodeStates:
    """For each op of a node, the states of each access, int64 [axes] (see ``pase.tables.layouts``).

    reads: None if a node only passes on what it reads (a copy, an output), or runs in backward.
    """

    reads: tuple[tuple[np.ndarray | None, ...], ...]
    writes: tuple[tuple[np.ndarray, ...], ...]


def access_states(graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> dict[str, NodeStates]:
    """Node name -> the states of its accesses. configs: node name -> int8 [axes]."""
    out: dict[str, NodeStates] = {}
    for n in graph.nodes:
        config = configs[n.name][None, :]

        def read(op: Op, a: Access, n: Node = n, config: np.ndarray = config) -> np.ndarray | None:
            if n.kind in ("copy", "output") or op.backward:  # no equation of the program's own stands there
                return None
            return np.asarray(read_states(n, op, a, graph.tensors[a.tensor], config, mesh)[0])

        out[n.name] = NodeStates(
            reads=tuple(tuple(read(op, a) for a in op.reads) for op in n.ops),
            writes=tuple(
                tuple(write_states(n, op, a, graph.tensors[a.tensor], config, mesh)[0] for a in op.writes)
                for op in n.ops
            ),
        )
    return out


def equation_layouts(graph: Graph, states: Mapping[str, NodeStates]) -> dict[Place, EquationLayouts]:
    """Equation -> its layouts. states: the result of ``access_states``."""
    found: dict[Place, tuple[dict[str, Digits], dict[str, Digits]]] = {}
    for n in graph.nodes:
        of_node = states[n.name]
        for op, reads, writes in zip(n.ops, of_node.reads, of_node.writes, strict=True):
            if op.kind in _NO_EQUATION or op.backward:
                continue
            both = found.setdefault(op.eqn, ({}, {}))
            for kept, accesses, rows in ((both[0], op.reads, reads), (both[1], op.writes, writes)):
                for a, row in zip(accesses, rows, strict=True):
                    if row is not None:
                        kept.setdefault(graph.tensors[a.tensor].original, _digits(row))
    return {at: EquationLayouts(reads=reads, writes=writes) for at, (reads, writes) in found.items()}


def _digits(states: np.ndarray) -> Digits:
    return tuple(_digit(s) for s in forward_states(states).tolist())


def _digit(state: int) -> Digit:
    return (tensor_dim(state), blocks_of(state)) if state >= 0 else None


def distinct(layouts: Mapping[Place, EquationLayouts]) -> Iterator[Digits]:
    """Every layout that occurs, once, in order of first occurrence."""
    every = (d for e in layouts.values() for part in (e.reads, e.writes) for d in part.values())
    yield from dict.fromkeys(every)
