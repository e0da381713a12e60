"""Memory per device under a strategy: one definition, for the plan's account and for a search under a limit.

Parameters are kept in their storage layout, gradients and optimizer state so too or split further (ZeRO-2).
Activations are what backward needs (``pase.memory.residuals``), each once, in the layout it was written in, times the
loop turns that make it; inside a rematerialised region only what enters it is kept, and while a region is
recomputed, one turn of its inner tensors. Weights that a product reads gathered or cast are activations too, until
its backward, except in a rematerialised region, which gathers them again. Buffers: what one op reads and makes,
with its gradients, at most.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pase.ir import Access, Graph, Node, Op, Scope
from pase.ir.blocks import turns_of
from pase.ir.types import WORKLESS
from pase.machine import Mesh
from pase.memory.live import is_trained, live_bytes, lives
from pase.memory.residuals import kept
from pase.once import once
from pase.tables.charges import node_charges
from pase.tables.facts import facts
from pase.tables.itemize import Collective
from pase.tables.layouts import (
    PARTIAL,
    REPLICATED,
    dim_index,
    forward_states,
    gradient_states,
    local_bytes,
    number,
    read_states,
    shards,
    state_index,
    write_states,
)
from pase.tables.work import OPTIMIZERS

if TYPE_CHECKING:
    from pase.search import MemoryProfile

__all__ = ["Held", "Memory", "held", "in_flight", "in_flight_at_least", "memory", "profile"]

MemoryKind = Literal["parameters", "gradients", "optimizer", "activations"]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes that a node keeps on one device, per config: float64 [K].

    region: the rematerialised region while whose recomputation they live; None: the whole step. weights: of a parameter
    as it is read: one copy, however many micro-batches are in flight.
    """

    kind: MemoryKind
    nbytes: np.ndarray
    region: tuple[Scope, ...] | None = None
    weights: bool = False


@dataclass(frozen=True, kw_only=True)
class _Term:
    """A part of what a node keeps, before a config is chosen: equal for nodes of equal layers.

    nbytes: of the whole tensor; dims: the iteration dims that split it, state: those that split it further. What a
    device holds is its local bytes times ``times`` over ``over``.
    """

    kind: MemoryKind
    nbytes: float
    dims: tuple[int, ...]
    state: tuple[int, ...] = ()
    times: float = 1.0
    over: float = 1.0
    weights: bool = False

    def held(self, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        """Bytes on a device under each config, float64 [K]; cfg int8 [K, axes]."""
        local = self.nbytes / shards(cfg, self.dims, mesh)
        if self.state:
            local = local / shards(cfg, self.state, mesh)
        return np.asarray(local * self.times / self.over)


_ScopePath = tuple[Scope, ...] | None


def _term(graph: Graph, n: Node, kind: MemoryKind, a: Access, **more: Any) -> _Term:
    t = graph.tensors[a.tensor]
    return _Term(kind=kind, nbytes=number(t.nbytes, t.name), dims=tuple(dim_index(n, a.map.dims)), **more)


def held(graph: Graph, n: Node, cfg: np.ndarray, mesh: Mesh, optimizer: str = "adam") -> Iterator[Held]:
    """What the node keeps under each of its configs; cfg int8 [K, axes]."""
    for term, region in _terms(graph, optimizer)[n.name]:
        yield Held(kind=term.kind, nbytes=term.held(cfg, mesh), region=region, weights=term.weights)


@once
def _terms(graph: Graph, optimizer: str) -> dict[str, tuple[tuple[_Term, _ScopePath], ...]]:
    """Per node, what it keeps and where."""
    heavy = _read_heavily(graph)
    return {n.name: tuple(_terms_of(graph, n, optimizer, heavy)) for n in graph.nodes}


def _terms_of(
    graph: Graph, n: Node, optimizer: str, heavy: Collection[str]
) -> Iterator[tuple[_Term, _ScopePath]]:
    wanted, turns = kept(graph), turns_of(graph)  # of a step in micro-batches, one lives at a time

    def term(kind: MemoryKind, a: Access, **more: Any) -> _Term:
        return _term(graph, n, kind, a, **more)

    for op in n.ops:
        for a in op.writes:
            t = graph.tensors[a.tensor]
            if t.role == "parameter":
                yield term("parameters", a), None
                if t.needs_grad:
                    state = tuple(state_index(n))
                    yield (
                        term("gradients", a, state=state, times=2 if turns > 1 else 1),
                        None,
                    )  # the sum, and one to add
                    values = 4 * OPTIMIZERS[optimizer]
                    yield term("optimizer", a, state=state, times=values, over=t.itemsize), None
            elif t.role == "input":
                yield term("activations", a, times=turns), None  # all of them arrive at once
            elif n.kind == "carry" and t.needs_grad:  # kept once for every turn of its loop
                many = max(number(o.times, n.name) for o in n.ops)
                yield term("activations", a, times=many, over=turns), None
            elif a.tensor in wanted and n.kind not in ("parameter", "copy"):
                k = wanted[a.tensor]
                copies = 1 if k.region is not None else number(k.times, t.name) / turns
                yield term("activations", a, times=copies), k.region
    for op, a in n.reads:  # parameters as this node reads them, kept for its backward
        source = graph.producer.get(a.tensor)
        if source is None or source.kind != "parameter" or not op.differentiable or op.region is not None:
            continue
        if n.kind == "copy" or op.kind in ("matmul", "conv"):
            yield term("activations", a, times=number(op.times, n.name), over=turns, weights=True), None
    if n.kind == "parameter":  # less what is the stored parameter itself
        a = n.ops[0].writes[0]
        if a.tensor in heavy and graph.tensors[a.tensor].needs_grad:
            yield term("activations", a, times=-1, weights=True), None


def _read_heavily(graph: Graph) -> set[str]:
    """Tensors that a product outside of rematerialised regions reads, or a copy."""
    return {
        e.tensor
        for e in graph.edges
        if e.op.region is None
        and e.op.differentiable
        and (e.op.kind in ("matmul", "conv") or graph.node[e.dst].kind == "copy")
    }


def _passing(graph: Graph, n: Node) -> Iterator[tuple[Op, Access, Node]]:
    """What the node reads and makes while it runs, each tensor once: (op, access, the node that makes it). What stays
    inside of the node, what is read in part, and what nodes that do no work hand on is left out; of a program that is
    not trained also what is written in place, and leaves, which are there anyway."""
    seen: set[str] = set()
    arrays = None if is_trained(graph) else lives(graph).array
    for op in () if n.kind == "parameter" or n.kind in WORKLESS else n.ops:
        for a in (*op.writes, *op.reads):
            source = graph.producer.get(a.tensor)
            inner = a.tensor in n.internal and not graph.read_outside(n, a.tensor)
            if source is None or inner or a.tensor in seen or (a.sparse and source is not n):
                continue
            if arrays is not None and (a.sparse or a.tensor not in arrays):
                continue
            seen.add(a.tensor)
            yield op, a, source


def in_flight(graph: Graph, n: Node, configs: Mapping[str, np.ndarray], mesh: Mesh) -> float:
    """Bytes of what the node reads and makes while it runs, and of the parameters that it reads, and of their
    gradients, where these are laid out otherwise than they are kept."""
    cfg, out = configs[n.name][None, :], 0.0
    for op, a, source in _passing(graph, n):
        t = graph.tensors[a.tensor]
        local = float(local_bytes(n, t, a, cfg, mesh)[0])
        if source.kind != "parameter":
            out += local
            continue
        written = write_states(source, *source.write_of(t.name), t, configs[source.name][None, :], mesh)
        read = read_states(n, op, a, t, cfg, mesh)
        again = op.region is not None  # else it counts as kept
        moved = (forward_states(written) != np.where(read == PARTIAL, REPLICATED, read)).any()
        out += local * (again and (moved or source.ops[0].writes[0].tensor != t.name))
        out += local * (t.needs_grad and bool((gradient_states(written) != read).any()))
    return out


@once
def _flight_terms(graph: Graph) -> list[tuple[_Term, ...]]:
    """Per node, what it reads and makes while it runs, but for parameters."""

    def terms(n: Node) -> Iterator[_Term]:
        return (_term(graph, n, "activations", a) for _, a, s in _passing(graph, n) if s.kind != "parameter")

    return [tuple(terms(n)) for n in graph.nodes]


def in_flight_at_least(graph: Graph, mesh: Mesh, configs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """A lower bound on a strategy's buffers that each node's config alone decides: bytes [K].

    Of what the node reads and makes, parameters are left out, whose layouts their own nodes decide; and the largest
    buffer of its own collectives. configs: per node its int8 [K, axes].
    """
    made: dict[tuple[tuple[_Term, ...], int, int], np.ndarray] = {}  # nodes of equal layers share an array
    out = []
    every = zip(graph.nodes, _flight_terms(graph), facts(graph).cost, configs, strict=True)
    for n, terms, number_, cfg in every:
        key = (terms, number_, id(cfg))
        if key not in made:
            held_ = sum((t.held(cfg, mesh) for t in terms), np.zeros(len(cfg)))
            moved = (np.where(c.axes > 0, c.nbytes, 0.0) for c in node_charges(graph, n, cfg, mesh))
            made[key] = np.maximum.reduce([held_, *moved])
        out.append(made[key])
    return out


def memory(
    graph: Graph,
    mesh: Mesh,
    configs: Mapping[str, np.ndarray],
    moved: tuple[Collective, ...],
    optimizer: str = "adam",
) -> Memory:
    """Predicted peak bytes on one device; configs: node name -> int8 [axes]."""
    sums = dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), 0.0)
    regions: dict[tuple[Scope, ...], float] = {}
    for n in graph.nodes:
        for h in held(graph, n, configs[n.name][None, :], mesh, optimizer):
            if h.region is None:
                sums[h.kind] += float(h.nbytes[0])
            else:
                regions[h.region] = regions.get(h.region, 0.0) + float(h.nbytes[0])
    sums["activations"] += max(regions.values(), default=0.0)
    buffers = max((c.nbytes for c in moved), default=0.0)
    if is_trained(graph):
        buffers = max(buffers, *(in_flight(graph, n, configs, mesh) for n in graph.nodes))
    else:
        buffers = max(buffers, live_bytes(graph, mesh, configs))
    return Memory(buffers=round(buffers), **{k: round(v) for k, v in sums.items()})


def profile(
    graph: Graph, mesh: Mesh, configs: Sequence[np.ndarray], limit_bytes: float, optimizer: str = "adam"
) -> MemoryProfile:
    """The same account as a limit for the search: one point of time for each region, all else lives throughout.

    configs: per node its int8 [K, axes]. A node that keeps something throughout and something in a region is
    counted with both throughout.
    """
    from pase.search import MemoryProfile

    terms = _terms(graph, optimizer)
    regions = dict.fromkeys(r for n in graph.nodes for _, r in terms[n.name] if r is not None)
    point = {r: i for i, r in enumerate(regions)}
    last = max(len(point), 1)
    made: dict[tuple[tuple[_Term, ...], int], np.ndarray] = {}  # nodes of equal layers share an array
    nbytes, start, stop = [], [], []
    for n, cfg in zip(graph.nodes, configs, strict=True):
        mine = terms[n.name]
        key = (tuple(t for t, _ in mine), id(cfg))
        if key not in made:
            made[key] = sum((t.held(cfg, mesh) for t, _ in mine), np.zeros(len(cfg)))
        nbytes.append(made[key])
        only = {r for _, r in mine}
        region = only.pop() if len(only) == 1 else None
        at = point[region] if region is not None else 0
        start.append(at)
        stop.append((at + 1 if region is not None else last) if mine else at)
    return MemoryProfile(
        bytes=tuple(nbytes),
        start=np.array(start, np.int64),
        stop=np.array(stop, np.int64),
        limit_bytes=limit_bytes,
    )
