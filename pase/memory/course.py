"""Peak memory over the course of a step, for a compiler that fuses light ops into products (XLA for TPU).

``pase.memory.account`` sums what is kept and what is in flight, no matter when it is alive. Here a step has moments:

- The end of forward. All that is kept is alive, and the gradients of the last ops are computed.
- The backward of each rematerialized region. What was kept after that region is freed, gradients are alive, and one
  iteration of the region is recomputed.
- The end of backward.

Results of exponentials that a fusion can recompute from a kept operand are not kept. If several ops read a parameter
(a tied embedding), its gradients are added up at the end. A product's contribution is computed inside that sum, so what
it needs lives until then. If the product gathers the parameter, however, its contribution is computed at once and waits
for the sum. Arrays are stored in tiles of the device's memory (``Device.memory_tile``). The machine says which of the
two accounts applies (``Machine.fuses_products``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pase.ir import Access, Graph, Node, Op, Scope
from pase.ir.blocks import hoisted_of, micro_batches_of
from pase.machine import Mesh
from pase.memory.account import Memory, MemoryKind, stored_as, stored_parameter
from pase.memory.residuals import kept
from pase.tables.layouts import concrete_size, dim_index, shards, state_index
from pase.tables.tiles import padding
from pase.tables.work import OPTIMIZERS, has_gradient, parameter_reads, state_itemsize

if TYPE_CHECKING:
    from pase.search import MemoryProfile

__all__ = ["HeldBytes", "course", "peak", "profile"]

_ACCUMULATED = 4
"""Bytes per element of a gradient while it is summed: float32."""


@dataclass(frozen=True, kw_only=True)
class HeldBytes:
    """What a node holds on one device.

    kind: None for what products have in flight. Only the largest of these counts at a moment.
    nbytes: per config, float64 [K].
    at: the moments at which it is alive, bool [moments].
    """

    kind: MemoryKind | None
    nbytes: np.ndarray
    at: np.ndarray


@dataclass(frozen=True, kw_only=True)
class _Moments:
    """The moments of a step.

    Moment 0 is the end of forward, moment i + 1 the backward of region i, and the last moment the end of backward.

    order: the index of each node.
    regions: the regions, numbered in the order in which backward reaches them.
    stops: per moment, the index of the node whose backward is the next to run.
    """

    order: Mapping[str, int]
    regions: Mapping[tuple[Scope, ...], int]
    stops: np.ndarray

    @property
    def always(self) -> np.ndarray:
        return np.ones(len(self.stops), bool)

    @property
    def end(self) -> np.ndarray:
        return np.arange(len(self.stops)) == len(self.stops) - 1

    @property
    def back(self) -> np.ndarray:
        return np.arange(len(self.stops)) > 0

    def only(self, region: tuple[Scope, ...] | None) -> np.ndarray:
        return np.arange(len(self.stops)) == (0 if region is None else self.regions[region] + 1)

    def until(self, node: str) -> np.ndarray:
        """The moments from the end of forward until the node's own backward."""
        return self.stops >= self.order[node]


def _moments(graph: Graph) -> _Moments:
    order = {n.name: i for i, n in enumerate(graph.nodes)}
    stops: dict[tuple[Scope, ...], int] = {}
    for n in graph.nodes:
        for op in n.ops:
            where = op.region
            if where is not None:
                stops[where] = order[n.name]
    back = sorted(stops, key=lambda r: -stops[r])
    return _Moments(
        order=order,
        regions={r: i for i, r in enumerate(back)},
        stops=np.array([len(order), *(stops[r] for r in back), -1]),
    )


def course(
    graph: Graph, tile: tuple[int, ...] = (), late: Collection[str] | None = None
) -> Callable[[Node, np.ndarray, Mesh, str], Iterator[HeldBytes]]:
    """Returns parts(node, configs int8 [K, axes], mesh, optimizer): what the node holds under each config, and when.

    tile: the rows and columns of a tile of the device's memory.
    late: the nodes whose product computes its contribution to a parameter's gradient at the end. If None, this is not
        known, and only what is held in either case is counted.
    """
    when, wanted, micro_batches = _moments(graph), kept(graph, "products"), micro_batches_of(graph)
    stays, unsummed = hoisted_of(graph) != "none", hoisted_of(graph) == "all" and micro_batches > 1
    made = {a.tensor: op for n in graph.nodes for op in n.ops for a in op.writes}
    tied = _tied(graph)

    def parts(n: Node, cfg: np.ndarray, mesh: Mesh, optimizer: str) -> Iterator[HeldBytes]:
        def local(a: Access) -> np.ndarray:
            t = graph.tensors[a.tensor]
            extents = [
                np.asarray(concrete_size(size, t.name) / shards(cfg, dim_index(n, walk.dims), mesh))
                for size, walk in zip(t.shape, a.map.walks, strict=True)
            ]
            whole = t.itemsize * np.prod(extents, axis=0) * np.ones(len(cfg))
            return np.asarray(whole * padding(extents, tile) if tile else whole)

        def times(op: Op) -> float:
            return float(concrete_size(op.times, n.name)) / micro_batches

        for op in n.ops:
            for a in op.writes:
                t = graph.tensors[a.tensor]
                if t.role == "parameter":
                    yield from _parameter(
                        graph, n, local(a), cfg, mesh, optimizer, when, n.name not in tied and not unsummed
                    )
                elif t.role == "input":  # the inputs of all micro-batches are there from the start
                    yield HeldBytes(kind="activations", nbytes=local(a) * micro_batches, at=when.always)
                elif a.tensor in wanted and n.kind not in ("parameter", "copy"):
                    if _fused_recompute(graph, op, wanted, made):
                        continue
                    k = wanted[a.tensor]
                    at = when.always if n.name in (late or ()) else when.until(n.name)
                    at = at if k.region is None else when.only(k.region)
                    yield HeldBytes(kind="activations", nbytes=local(a) * k.times, at=at)
        if stays:
            yield from _hoisted_bytes(graph, n, local, when)
        elif n.kind == "parameter":
            yield from _cast_stacks(n, local, times, when)
        for op, a in n.reads if n.kind != "copy" else ():
            source = stored_parameter(graph, graph.producer.get(a.tensor))
            if source is None:
                continue
            t, heavy = graph.tensors[a.tensor], op.kind in ("matmul", "conv")
            own = t.needs_grad and op.differentiable
            gradient = own * local(a) / t.itemsize * _ACCUMULATED
            if heavy:
                flying = (not stays) * local(a) + (n.name not in (late or ())) * gradient
                yield HeldBytes(kind=None, nbytes=flying, at=when.only(op.region))
            if source.name in tied and own and not unsummed:
                at = when.back if heavy and late is not None and n.name not in late else when.end
                yield HeldBytes(kind="gradients", nbytes=gradient, at=at)

    return parts


def _cast_stacks(
    n: Node, local: Callable[[Access], np.ndarray], times: Callable[[Op], float], when: _Moments
) -> Iterator[HeldBytes]:
    """Yields a loop's stack of weights that is cast before the loop. times: the trip count of an op's loop."""
    for op in n.ops[1:]:
        if op.kind == "elementwise" and times(op) > 1:
            many = local(op.writes[0]) * times(op)
            yield HeldBytes(kind="activations", nbytes=many, at=when.always & ~when.end)


def _hoisted_bytes(
    graph: Graph, n: Node, local: Callable[[Access], np.ndarray], when: _Moments
) -> Iterator[HeldBytes]:
    """Yields what hoisting keeps: parameters as a node reads them, throughout the step.

    If the sums of their gradients are hoisted too, there are two more parts: the sum, in the stored precision, and one
    gradient to add to it.

    local: the bytes of an access on a device.
    """
    micro_batches = micro_batches_of(graph)
    if n.kind == "parameter" and (mine := n.ops[0].writes[0]).tensor in {e.tensor for e in graph.edges}:
        yield HeldBytes(kind="activations", nbytes=-local(mine), at=when.always)  # the stored array itself
    for ops, a, stored in parameter_reads(graph, n):
        whole = local(a) * float(concrete_size(ops[0].times, n.name)) / micro_batches
        yield HeldBytes(kind="activations", nbytes=whole, at=when.always)
        unsummed = hoisted_of(graph) == "all" and micro_batches > 1
        if unsummed and any(has_gradient(graph, op, a.tensor) for op in ops):
            wide = whole * stored.itemsize / graph.tensors[a.tensor].itemsize
            yield HeldBytes(kind="gradients", nbytes=wide, at=when.always)
            yield HeldBytes(kind="gradients", nbytes=whole, at=when.back)


def _tied(graph: Graph) -> dict[str, list[tuple[Node, Access]]]:
    """Returns, per parameter node, the products outside regions that compute a part of its gradient: (node, access).

    Only parameters whose gradient has several parts are listed.
    """
    readers: dict[str, list[tuple[Node, Op, Access]]] = {}
    for n in graph.nodes:
        for op, a in n.reads if n.kind != "copy" else ():
            source = stored_parameter(graph, graph.producer.get(a.tensor))
            if source is not None and op.differentiable and graph.tensors[a.tensor].needs_grad:
                readers.setdefault(source.name, []).append((n, op, a))
    return {
        name: products
        for name, found in readers.items()
        if len(found) > 1
        and (
            products := [(n, a) for n, op, a in found if op.kind in ("matmul", "conv") and op.region is None]
        )
    }


def _parameter(
    graph: Graph,
    n: Node,
    local: np.ndarray,
    cfg: np.ndarray,
    mesh: Mesh,
    optimizer: str,
    when: _Moments,
    alone: bool,
) -> Iterator[HeldBytes]:
    """Yields the parameter, its optimizer state and its gradient.

    The gradient is alive once backward has begun. With micro-batches, their sum is alive from the first one on.

    alone: False if the readers count the gradient instead. They do if the gradient has several readers, because its
        parts are added at the end, and if the sum over devices is hoisted, because the parts live throughout the step.
    """
    t = graph.tensors[n.ops[0].writes[0].tensor]
    yield HeldBytes(kind=stored_as(graph, n), nbytes=local, at=when.always)
    if not t.needs_grad:
        return
    mine = local / shards(cfg, state_index(n), mesh)
    state = OPTIMIZERS[optimizer] * state_itemsize(graph, t, optimizer)
    yield HeldBytes(kind="optimizer", nbytes=state * mine / t.itemsize, at=when.always)
    if alone:
        yield HeldBytes(kind="gradients", nbytes=mine, at=when.back)
    if micro_batches_of(graph) > 1 and hoisted_of(graph) != "all":
        yield HeldBytes(kind="gradients", nbytes=mine, at=when.always)


def _late(graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> set[str]:
    """Returns the products that read a tied parameter as it is stored: their part of its gradient is computed last."""

    def ways(n: Node, a: Access) -> int:
        return int(shards(configs[n.name][None, :], dim_index(n, a.map.dims), mesh)[0])

    return {
        n.name
        for name, products in _tied(graph).items()
        for n, a in products
        if ways(n, a) == ways(graph.node[name], graph.node[name].ops[0].writes[0])
    }


def peak(
    graph: Graph,
    mesh: Mesh,
    configs: Mapping[str, np.ndarray],
    optimizer: str = "adam",
    tile: tuple[int, ...] = (),
) -> Memory:
    """Returns the predicted bytes on one device at the step's worst moment.

    configs: node name -> int8 [axes].
    tile: the rows and columns of a tile of the device's memory.
    """
    parts = course(graph, tile, _late(graph, mesh, configs))
    sums: dict[MemoryKind, np.ndarray] = {}
    flight = np.zeros(len(_moments(graph).stops))
    for n in graph.nodes:
        for p in parts(n, configs[n.name][None, :], mesh, optimizer):
            here = p.at * p.nbytes[0]
            if p.kind is None:
                flight = np.maximum(flight, here)
            else:
                sums[p.kind] = sums.get(p.kind, 0.0) + here
    worst = int(np.argmax(sum(sums.values(), flight)))
    held = {k: round(float(v[worst])) for k, v in sums.items()}
    whole: dict[str, int] = dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), 0)
    return Memory(**whole | held, buffers=round(float(flight[worst])))


def profile(
    graph: Graph,
    mesh: Mesh,
    configs: Sequence[np.ndarray],
    limit_bytes: float,
    optimizer: str = "adam",
    tile: tuple[int, ...] = (),
) -> MemoryProfile:
    """Returns the same account as a limit for the search. It is a lower bound, because it leaves out what is in flight
    and what waits for the end of backward.

    A node has one interval for each span of moments during which it holds something.

    configs: per node, its int8 [K, axes].
    """
    from pase.search import MemoryProfile

    parts = course(graph, tile)
    intervals: list[tuple[int, int, int, np.ndarray]] = []
    for v, (n, cfg) in enumerate(zip(graph.nodes, configs, strict=True)):
        spans: dict[tuple[int, int], np.ndarray] = {}
        for p in parts(n, cfg, mesh, optimizer):
            live = np.flatnonzero(p.at)
            if p.kind is None or not len(live):
                continue
            span = (int(live[0]), int(live[-1]) + 1)
            assert p.at[slice(*span)].all()  # a node holds each part without a break
            spans[span] = spans.get(span, np.zeros(len(cfg))) + p.nbytes
        for (first, last), held in (spans or {(0, 0): np.zeros(len(cfg))}).items():
            intervals.append((v, first, last, held))
    return MemoryProfile.of(intervals, limit_bytes)


def _fused_recompute(graph: Graph, op: Op, wanted: Mapping[str, object], made: Mapping[str, Op]) -> bool:
    """Whether a fusion recomputes the op's result.

    It does if elementwise ops and views compute the result from large operands that are kept themselves or constant.
    """
    if op.kind == "generate":
        return True
    if op.kind not in ("elementwise", "view", "copy"):
        return False
    size = graph.tensors[op.writes[0].tensor].elements
    large = [a.tensor for a in op.reads if bool(graph.tensors[a.tensor].elements == size)]
    return any(t in wanted or t in made for t in large) and all(
        t in wanted
        or t not in made
        or graph.tensors[t].role == "constant"
        or _fused_recompute(graph, made[t], wanted, made)
        for t in large
    )
