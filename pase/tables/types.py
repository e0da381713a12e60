"""Cost tables: what the search sees. Arrays only, no ops and no meshes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["CostTables", "EdgeTable"]


@dataclass(frozen=True, kw_only=True, eq=False)
class EdgeTable:
    """Cost of an edge, priced on classes of configs that lay the tensor out alike.

    The cost of (config i of ``src``, config j of ``dst``) is ``cost[src_class[i], dst_class[j]]``.
    Equal edges of repeated layers share the same array objects, so that ``is`` finds repetition.

    cost: float64 [classes of src, classes of dst]; np.inf forbids a pair.
    src_class: int32 [K_src]; dst_class: int32 [K_dst].
    """

    src: int
    dst: int
    cost: np.ndarray
    src_class: np.ndarray
    dst_class: np.ndarray

    def between(self, src: int, dst: int) -> EdgeTable:
        """The same costs between other nodes. (``dataclasses.replace`` takes three times as long.)"""
        return EdgeTable(src=src, dst=dst, cost=self.cost, src_class=self.src_class, dst_class=self.dst_class)

    def dense(self) -> np.ndarray:
        """The full [K_src, K_dst] matrix."""
        return self.cost[self.src_class[:, None], self.dst_class[None, :]]


@dataclass(frozen=True, kw_only=True, eq=False)
class CostTables:
    """Minimise sum of node costs + sum of edge costs over one config index per node.

    node_costs: per node a float64 [K_v] vector (np.inf forbids a config).
    edges: parallel edges are allowed; a self-loop is refused.
    names: one name per node, for messages.
    memory: per node an optional float64 [K_v] vector of bytes.
    """

    node_costs: tuple[np.ndarray, ...]
    edges: tuple[EdgeTable, ...]
    names: tuple[str, ...] | None = None
    memory: tuple[np.ndarray, ...] | None = None

    def __post_init__(self) -> None:
        sound: set[tuple[int, int]] = (
            set()
        )  # (classes, length of the axis) seen to fit: layers share their arrays
        for e in self.edges:
            if e.src == e.dst:
                raise ValueError(f"edge {self.name(e.src)} -> itself: fold its cost into the node's vector")
            for end, cls, axis in ((e.src, e.src_class, 0), (e.dst, e.dst_class, 1)):
                if not 0 <= end < len(self.node_costs):
                    raise ValueError(
                        f"edge ({e.src}, {e.dst}) names node {end}; there are {len(self.node_costs)}"
                    )
                if cls.shape != self.node_costs[end].shape:
                    raise ValueError(
                        f"edge ({e.src}, {e.dst}): {cls.size} classes for the {self.node_costs[end].size} "
                        f"configs of node {self.name(end)}"
                    )
                if (id(cls), e.cost.shape[axis]) in sound:
                    continue
                if cls.size and (cls.min() < 0 or cls.max() >= e.cost.shape[axis]):
                    raise ValueError(f"edge ({e.src}, {e.dst}): a class index lies outside the cost matrix")
                sound.add((id(cls), e.cost.shape[axis]))

    @property
    def entries(self) -> int:
        """Entries of all distinct matrices together."""
        return sum({id(e.cost): e.cost.size for e in self.edges}.values())

    @property
    def least_sum(self) -> float:
        """No choice costs less: the least of every node and edge by itself."""
        least = {id(c): c.min() for c in (*self.node_costs, *(e.cost for e in self.edges))}
        return float(sum(least[id(c)] for c in self.node_costs) + sum(least[id(e.cost)] for e in self.edges))

    def restricted(self, keep: Mapping[int, np.ndarray]) -> CostTables:
        """The same problem with fewer configs: node -> indices of those to keep, in the order to have them in."""
        made: dict[tuple[int, bytes], np.ndarray] = {}
        marks = {id(k): k.tobytes() for k in keep.values()}

        def kept(array: np.ndarray, v: int) -> np.ndarray:
            """Equal arrays of repeated layers stay one object."""
            if v not in keep:
                return array
            key = (id(array), marks[id(keep[v])])
            if key not in made:
                made[key] = array[keep[v]]
            return made[key]

        edges = tuple(
            EdgeTable(
                src=e.src,
                dst=e.dst,
                cost=e.cost,
                src_class=kept(e.src_class, e.src),
                dst_class=kept(e.dst_class, e.dst),
            )
            for e in self.edges
        )
        costs = tuple(kept(c, v) for v, c in enumerate(self.node_costs))
        return CostTables(node_costs=costs, edges=edges, names=self.names)

    def name(self, v: int) -> str:
        return self.names[v] if self.names else str(v)
