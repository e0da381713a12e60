"""PaSE's configs, and the cost tables over them that the search solves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pase.errors import PaseError
from pase.ir import Access, Graph, Node
from pase.paper.costs import PROTOTYPE, Rules, flow_cost, layer_cost, map_splits
from pase.paper.layers import Layers, layers_of
from pase.search import Solution, solve
from pase.tables import CostTables, EdgeTable
from pase.tables.layouts import concrete_size

__all__ = ["PaperSpace", "build", "complete"]

_LEAST_EXTENT = {True: 4, False: 1}
"""The least extent that a split may leave of a dim, with convolutions and without (the prototype's cutoff)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PaperSpace:
    """PaSE's search space.

    configs: per layer, int64 [K, dims], the split count of each dim. The product of a row is at most p.
    """

    layers: Layers
    p: int
    configs: tuple[np.ndarray, ...]

    def counts(self, choice: np.ndarray) -> dict[str, dict[str, int]]:
        """Layer -> dim -> split count of a solution."""
        return {
            n.name: {d.name: int(c) for d, c in zip(n.space, cfg[k], strict=True)}
            for n, cfg, k in zip(self.layers.nodes, self.configs, choice, strict=True)
        }


def build(graph: Graph, p: int, rules: Rules = PROTOTYPE) -> tuple[CostTables, PaperSpace]:
    """Tables over PaSE's space of powers of two. Raises PaseError if p is not a power of two.

    (Using all divisors, as the prototype does, gives the same optimum on every instance tried; notes/pase.md.)
    """
    if p < 1 or p & (p - 1):
        raise PaseError(
            f"the number of devices must be a power of two, but is {p}",
            where="the paper's search space",
            fix="choose a power of two",
        )
    layers = layers_of(graph)
    least = _LEAST_EXTENT[any(n.kind == "conv" for n in layers.nodes)]
    shared: dict[object, np.ndarray] = {}
    divisors: dict[int, tuple[int, ...]] = {}
    configs = []
    for n in layers.nodes:
        whole = set() if rules.spatial else _spatial(n)
        for d in n.space:
            size = concrete_size(d.size, n.name)
            if size not in divisors:
                divisors[size] = _divisors(size, p, least)
        choices = tuple(
            divisors[concrete_size(d.size, n.name)]
            if d.kind in ("parallel", "reduction") and d.name not in whole
            else (1,)
            for d in n.space
        )
        if choices not in shared:
            shared[choices] = _configs(choices, p)
        configs.append(shared[choices])
    position = {n.name: i for i, n in enumerate(layers.nodes)}
    # Equal layers and flows share their arrays, so they are priced once, and the search sees that they are equal.
    priced: dict[object, np.ndarray] = {}
    costs = []
    for n, c in zip(layers.nodes, configs, strict=True):
        key = _layer_key(layers, n)
        if key not in priced:
            priced[key] = layer_cost(layers, n, c, rules)
        costs.append(priced[key])
    parts: dict[object, tuple[np.ndarray, np.ndarray]] = {}
    same: dict[object, np.ndarray] = {}
    moved: dict[object, np.ndarray] = {}
    edges = []
    for f in layers.flows:
        u, v = position[f.src], position[f.dst]
        ends = []
        for w, access in ((u, f.written), (v, f.read)):
            at = {d.name: i for i, d in enumerate(layers.nodes[w].space)}
            key = (id(configs[w]), tuple(tuple(at[d] for d in walk.dims) for walk in access.walks))
            if key not in parts:
                rows, index = _distinct(map_splits(layers.nodes[w], configs[w], access))
                parts[key] = same.setdefault((rows.shape, rows.tobytes()), rows), index
            ends.append(parts[key])
        (a, a_class), (b, b_class) = ends
        key = (id(a), id(b), f.shape, f.times)
        if key not in moved:
            moved[key] = flow_cost(f, a, b, rules)
        cost = moved[key]
        if u == v:  # from one iteration of a loop to the next
            costs[u] = costs[u] + cost[a_class, b_class]
        elif cost.any():
            edges.append(EdgeTable(src=u, dst=v, cost=cost, src_class=a_class, dst_class=b_class))
    names = tuple(n.name for n in layers.nodes)
    tables = CostTables(node_costs=tuple(costs), edges=tuple(edges), names=names)
    return tables, PaperSpace(layers=layers, p=p, configs=tuple(configs))


def complete(
    tables: CostTables, space: PaperSpace, strategy: Mapping[str, Mapping[str, int]]
) -> tuple[Solution, dict[str, dict[str, int]]]:
    """The best completion of a strategy that gives configs of some layers (dims that it omits are not split).

    A published table gives the layers that matter, and the search decides the rest. Raises KeyError if a given config
    is not in the space.
    """
    keep = []
    for n, cfg in zip(space.layers.nodes, space.configs, strict=True):
        rows = np.arange(len(cfg))
        if n.name in strategy:
            want = [strategy[n.name].get(d.name, 1) for d in n.space]
            rows = np.flatnonzero((cfg == want).all(axis=1))
            if not len(rows):
                raise KeyError(
                    f"layer '{n.name}': {dict(strategy[n.name])} is not one of its configs for p = {space.p}"
                )
        keep.append(rows)
    found = solve(tables.restricted(dict(enumerate(keep))))
    choice = np.array([k[i] for k, i in zip(keep, found.choice, strict=True)])
    return replace(found, choice=choice), space.counts(choice)


def _layer_key(layers: Layers, node: Node) -> object:
    """A key of everything that a layer's cost depends on. It excludes names, so repeated layers have the same key."""
    at = {d.name: i for i, d in enumerate(node.space)}

    def walked(a: Access) -> object:
        walks = tuple((tuple([at[d] for d in w.dims]), w.window) for w in a.map.walks)
        return a.tensor in layers.parameters, walks

    ops = tuple(
        (
            op.kind,
            op.flops_per_point,
            None if op.over is None else tuple(at[d] for d in op.over),
            op.times,
            tuple(map(walked, op.reads)),
            tuple(map(walked, op.writes)),
        )
        for op in node.ops
    )
    return tuple((d.size, d.kind) for d in node.space), ops


def _spatial(node: Node) -> set[str]:
    """Height and width of a convolution: the dims that its input indexes under a window and its filter does not."""
    if node.kind != "conv":
        return set()
    x, w = node.main.reads
    return {d for d in x.map.dims[1:] if d not in w.map.dims}


def _divisors(size: int, p: int, least: int) -> tuple[int, ...]:
    """1, and the powers of two up to p that divide the size and leave at least ``least`` of it."""
    powers = (1 << k for k in range(1, p.bit_length()))
    return (1, *(c for c in powers if size % c == 0 and size // c >= least))


def _configs(choices: Sequence[Sequence[int]], p: int) -> np.ndarray:
    """One row per combination of choices with a product of at most p: int64 [K, dims]. The first row splits nothing."""
    rows = np.ones((1, 0), dtype=np.int64)
    for c in choices:
        rows = np.hstack([np.repeat(rows, len(c), axis=0), np.tile(c, len(rows))[:, None]])
        rows = rows[rows.prod(axis=1) <= p]
    return rows


def _distinct(splits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct rows, and the row of each config."""
    rows, inverse = np.unique(splits, axis=0, return_inverse=True)
    return rows, inverse.reshape(-1).astype(np.int32)
