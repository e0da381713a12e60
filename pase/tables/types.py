"""Cost tables, the input of the search: arrays only, without ops or meshes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["CostTables", "EdgeTable"]


@dataclass(frozen=True, kw_only=True, eq=False)
class EdgeTable:
    """Cost of an edge, stored per pair of layout classes: configs that give the tensor the same layout share a class.

    The cost of (config i of ``src``, config j of ``dst``) is ``cost[src_class[i], dst_class[j]]``.
    Equal edges of repeated layers share the same array objects, so repetition can be found with ``is``.

    cost: float64 [classes of src, classes of dst]; np.inf forbids a pair.
    src_class: int32 [K_src]; dst_class: int32 [K_dst].
    """

    src: int
    dst: int
    cost: np.ndarray
    src_class: np.ndarray
    dst_class: np.ndarray

    def between(self, src: int, dst: int) -> EdgeTable:
        """Returns the same costs between other nodes. (``dataclasses.replace`` takes three times as long.)"""
        return EdgeTable(src=src, dst=dst, cost=self.cost, src_class=self.src_class, dst_class=self.dst_class)

    def dense(self) -> np.ndarray:
        """The full [K_src, K_dst] matrix."""
        return self.cost[self.src_class[:, None], self.dst_class[None, :]]


@dataclass(frozen=True, kw_only=True, eq=False)
class CostTables:
    """Minimise the sum of node costs and edge costs over one config index per node.

    node_costs: per node, a float64 [K_v] vector; np.inf forbids a config.
    edges: parallel edges are allowed; self-loops are refused.
    names: one name per node, for messages.
    memory: optionally, per node, a float64 [K_v] vector of bytes.
    """

    node_costs: tuple[np.ndarray, ...]
    edges: tuple[EdgeTable, ...]
    names: tuple[str, ...] | None = None
    memory: tuple[np.ndarray, ...] | None = None

    def __post_init__(self) -> None:
        # (id of the class array, length of the axis) pairs already checked: repeated layers share their arrays.
        sound: set[tuple[int, int]] = set()
        for e in self.edges:
            if e.src == e.dst:
                raise ValueError(
                    f"edge {self.name(e.src)} -> itself: add its cost to the node's vector instead"
                )
            for end, cls, axis in ((e.src, e.src_class, 0), (e.dst, e.dst_class, 1)):
                if not 0 <= end < len(self.node_costs):
                    raise ValueError(
                        f"edge ({e.src}, {e.dst}) refers to node {end}, but there are {len(self.node_costs)} nodes"
                    )
                if cls.shape != self.node_costs[end].shape:
                    raise ValueError(
                        f"edge ({e.src}, {e.dst}) has {cls.size} classes, but node {self.name(end)} has "
                        f"{self.node_costs[end].size} configs"
                    )
                if (id(cls), e.cost.shape[axis]) in sound:
                    continue
                if cls.size and (cls.min() < 0 or cls.max() >= e.cost.shape[axis]):
                    raise ValueError(f"edge ({e.src}, {e.dst}): a class index is outside the cost matrix")
                sound.add((id(cls), e.cost.shape[axis]))

    @property
    def entries(self) -> int:
        """The total number of entries of all distinct edge matrices."""
        return sum({id(e.cost): e.cost.size for e in self.edges}.values())

    @property
    def least_sum(self) -> float:
        """A lower bound on the cost of any choice: the sum of each node's and each edge's own minimum."""
        least = {id(c): c.min() for c in (*self.node_costs, *(e.cost for e in self.edges))}
        return float(sum(least[id(c)] for c in self.node_costs) + sum(least[id(e.cost)] for e in self.edges))

    def restricted(self, keep: Mapping[int, np.ndarray]) -> CostTables:
        """The same problem with fewer configs. keep: node -> indices of the configs to keep, in the new order."""
        made: dict[tuple[int, bytes], np.ndarray] = {}
        marks = {id(k): k.tobytes() for k in keep.values()}

        def kept(array: np.ndarray, v: int) -> np.ndarray:
            """Selects the kept entries. An array that is shared by repeated layers stays one object."""
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
        """The name of a node for messages."""
        return self.names[v] if self.names else str(v)
