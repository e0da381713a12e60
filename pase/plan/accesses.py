"""The layouts in which each equation of the model reads and writes its tensors, computed in one place for all users.

A layout has one digit per mesh axis. The digit (tensor dim, blocks) says what the axis selects of the tensor; None
means that the tensor is replicated over the axis. A partial sum has the layout in which it is summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
    "reshaped",
]

Digit: TypeAlias = "tuple[int, int] | None"
"""(tensor dim, blocks into which this axis and the more major axes cut it), as in ``pase.tables.layouts``; None if the
tensor is replicated."""
Digits: TypeAlias = tuple[Digit, ...]

_NO_EQUATION = ("output", "copy", "parameter", "input", "constant", "cotangent", "gradient")


@dataclass(frozen=True)
class Reading:
    """The read of a tensor, or of a copy shared by several equations, by the equation ``at``."""

    at: Place
    tensor: str


@dataclass(frozen=True, kw_only=True)
class EquationLayouts:
    """The layouts of what one equation reads and writes. Tensors are named as in the traced graph."""

    reads: Mapping[str, Digits]
    writes: Mapping[str, Digits]


@dataclass(frozen=True, kw_only=True)
class NodeStates:
    """The states of each access of each op of a node, int64 [axes] (see ``pase.tables.layouts``).

    reads: None if the op only passes on what it reads (a copy, an output), or if it runs in backward.
    """

    reads: tuple[tuple[np.ndarray | None, ...], ...]
    writes: tuple[tuple[np.ndarray, ...], ...]


def access_states(graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> dict[str, NodeStates]:
    """Return the states of each node's accesses, by node name. configs: node name -> int8 [axes]."""
    out: dict[str, NodeStates] = {}
    for n in graph.nodes:
        config = configs[n.name][None, :]

        def read(op: Op, a: Access, n: Node = n, config: np.ndarray = config) -> np.ndarray | None:
            if op.kind in ("copy", "output") or op.backward:  # the program has no equation for it
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
    """Return the layouts of each equation. states: the result of ``access_states``."""
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


def reshaped(digit: tuple[int, int], ways: int, shape: Sequence[int], new: Sequence[int]) -> Digit:
    """The digit of a reshaped tensor that selects the same elements; None if no dim of the new shape has such a digit.

    ways: the size of the digit's mesh axis. A digit is a range of the row-major index of elements, which a reshape does
    not change.

    >>> reshaped((0, 2), 2, (4, 6), (24,)), reshaped((1, 2), 2, (4, 6), (24,)), reshaped((0, 36), 2, (72,), (12, 6))
    ((0, 2), (0, 8), None)
    """
    dim, blocks = digit
    low = shape[dim] // blocks * math.prod(shape[dim + 1 :])
    for i, extent in enumerate(new):
        inner = math.prod(new[i + 1 :])
        if low % inner == 0 and inner * extent % (low * ways) == 0:
            return i, inner * extent // low
    return None


def _digit(state: int) -> Digit:
    return (tensor_dim(state), blocks_of(state)) if state >= 0 else None


def distinct(layouts: Mapping[Place, EquationLayouts]) -> Iterator[Digits]:
    """Yield every layout that occurs, once, in the order of first occurrence."""
    every = (d for e in layouts.values() for part in (e.reads, e.writes) for d in part.values())
    yield from dict.fromkeys(every)
