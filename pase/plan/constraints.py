"""From a strategy to the layouts of named tensors: where they are constrained, and as what.

Framework-free. A placement is, per tensor dim, the mesh axes that split it, major to minor (what JAX writes
as a PartitionSpec). Three kinds of place:

- storage: how a parameter, its gradient and its optimizer state are kept; how a batch input arrives;
- define: where a tensor is made (a second entry, where one follows, is the copy that several readers share);
- read: where one op wants a tensor in another layout than it was made or copied in.

A tensor that is still partial when it is made is not constrained there: its reader's layout settles the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pase.ir import Access, Graph, Node, Op
from pase.machine import Mesh
from pase.tables.layouts import PARTIAL, read_states, stride_of, tensor_dim, write_states

__all__ = ["Constraints", "Placement", "constraints", "placement"]

Placement = tuple[tuple[str, ...], ...]
"""Per tensor dim, the mesh axes that split it."""


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """See the module's text. ``read`` is keyed "EQUATION|TENSOR"."""

    storage: Mapping[str, Placement] = field(default_factory=dict)
    define: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)
    read: Mapping[str, Placement] = field(default_factory=dict)


def placement(states: np.ndarray, shape: tuple[int, ...], mesh: Mesh) -> Placement | None:
    """Axes per tensor dim, or None where blocks of the dim are not contiguous (a minor factor is split)."""
    out: list[tuple[str, ...]] = []
    for t, size in enumerate(shape):
        axes = sorted(
            ((stride_of(int(s)), a) for a, s in enumerate(states) if s >= 0 and tensor_dim(int(s)) == t), reverse=True
        )
        left = int(size)
        for stride, a in axes:
            left //= mesh.sizes[a]
            if stride != left:
                return None
        out.append(tuple(mesh.names[a] for _, a in axes))
    return tuple(out)


def constraints(graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> Constraints:
    """All constraints of a strategy: node name -> config, int8 [axes]."""
    storage: dict[str, Placement] = {}
    define: dict[str, list[Placement]] = {}
    read: dict[str, Placement] = {}
    current: dict[str, Placement | None] = {}

    def written(n: Node, op: Op, a: Access) -> Placement | None:
        states = write_states(n, op, a, graph.tensors[a.tensor], configs[n.name][None, :], mesh)[0]
        return None if (states == PARTIAL).any() else _placed(graph, a, states, mesh)

    for n in graph.nodes:
        for op in n.ops:
            for a in op.reads:
                if a.tensor in n.internal or a.tensor not in graph.producer or n.kind in ("copy", "output"):
                    continue
                states = read_states(n, op, a, graph.tensors[a.tensor], configs[n.name][None, :], mesh)[0]
                want = _placed(graph, a, states, mesh)
                if want is not None and graph.tensors[a.tensor].shape and want != current.get(a.tensor):
                    read[f"{op.eqn}|{_raw(a.tensor)}"] = want
            for a in op.writes:
                tensor = graph.tensors[a.tensor]
                if n.kind in ("parameter", "input") and op is n.ops[0]:
                    where = written(n, op, a)
                    assert where is not None  # stored as it is walked
                    storage[a.tensor] = where
                if not tensor.shape or not graph.read_outside(n, a.tensor):
                    continue
                current[a.tensor] = written(n, op, a)
                where = current[a.tensor]
                if where is not None and n.kind != "input":
                    define.setdefault(_raw(a.tensor), []).append(where)
    return Constraints(storage=storage, define={t: tuple(dict.fromkeys(p)) for t, p in define.items()}, read=read)


def _placed(graph: Graph, a: Access, states: np.ndarray, mesh: Mesh) -> Placement | None:
    return placement(states, graph.tensors[a.tensor].shape, mesh)  # type: ignore[arg-type]


def _raw(tensor: str) -> str:
    """A copy bears its original's name and a suffix c, c1, …"""
    return tensor.partition("c")[0]
