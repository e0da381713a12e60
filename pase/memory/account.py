"""Memory per device under a strategy. The plan's account and the search under a memory limit share this definition.

Parameters are kept in their storage layout. Gradients and optimizer state have the same layout or are split further
(ZeRO-2). Activations are what backward needs (``pase.memory.residuals``). Each is counted once, in the layout in which
it was written, times the loop iterations that make it for readers in the same loop. A rematerialized region keeps only
its inputs, plus the inner tensors of one iteration while it is recomputed. Weights that a product reads gathered or
cast also count as activations until its backward, except where backward gathers them again: in a rematerialized region,
and everywhere if the step lets go what it gathered (``GraphFacts.frees_gathered``). Hoisted gathers keep the gathered
weights for the whole step, in regions too, and hoisted sums keep the unreduced gradients (``pase.ir.blocks.Hoisted``).
Buffers are the most that one op reads and makes, including gradients. If collectives of parameters overlap with
compute, buffers also include what a loop iteration gathers for the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pase.ir import Access, Graph, Node, Op, Place, Scope
from pase.ir.blocks import hoisted_of, micro_batches_of
from pase.ir.made_of_weights import made_of_weights
from pase.ir.recompute import needs
from pase.ir.types import WORKLESS
from pase.ir.whole_step import whole_step
from pase.machine import Mesh
from pase.memory.live import is_trained, live_bytes, lives
from pase.memory.residuals import differentiated, kept, kept_through, read_of_parameters
from pase.once import once
from pase.tables.axis_layout import REPLICATED, forward_states, gradient_states, summed_states
from pase.tables.charges import node_charges
from pase.tables.facts import facts
from pase.tables.itemize import largest_buffer
from pase.tables.layouts import (
    LayoutRule,
    concrete_size,
    dim_index,
    read_rule,
    shards,
    state_index,
    write_rule,
)
from pase.tables.work import OPTIMIZERS, has_gradient, parameter_reads, state_itemsize

if TYPE_CHECKING:
    from pase.search import MemoryProfile

__all__ = [
    "Flight",
    "Gathered",
    "Held",
    "KeptPart",
    "Memory",
    "MemoryKind",
    "NodeTerms",
    "Term",
    "converted",
    "flights",
    "gathered",
    "held",
    "held_by_term",
    "in_flight",
    "in_flight_at_least",
    "is_gathered_again",
    "is_kept_as_read",
    "is_made_by_call",
    "is_read_whole",
    "kept_as_read",
    "memory",
    "node_terms",
    "order_in_memory",
    "parts",
    "prefetched_bytes",
    "profile",
    "stored_as",
    "stored_parameter",
]

MemoryKind = Literal["parameters", "gradients", "optimizer", "activations"]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device at the step's worst moment. buffers: what is in flight then."""

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

    region: the rematerialized region whose recomputation holds them; None means the whole step.
    weights: True for a parameter as a node reads it. There is one copy for any number of micro-batches in flight.
    """

    kind: MemoryKind
    nbytes: np.ndarray
    region: tuple[Scope, ...] | None = None
    weights: bool = False


@dataclass(frozen=True, kw_only=True)
class KeptPart:
    """Bytes that a node keeps on one device under a strategy. region: as in ``Held``."""

    node: str
    kind: MemoryKind
    nbytes: float
    region: tuple[Scope, ...] | None


@dataclass(frozen=True, kw_only=True)
class Term:
    """One part of what a node keeps, before a config is chosen. It is equal for nodes of equal layers.

    nbytes: bytes of the whole tensor.
    dims: the iteration dims that split it.
    state: the dims that split it further.

    weights: as in ``Held``.
    as_read: whether this counts a tensor as its readers have it, instead of as it is stored or written.
    if_split: dims of which one has to be split; otherwise nothing is kept. Without any, there is no such condition.

    A device holds its local bytes times ``times`` divided by ``over``.
    """

    kind: MemoryKind
    nbytes: float
    dims: tuple[int, ...]
    state: tuple[int, ...] = ()
    times: float = 1.0
    over: float = 1.0
    weights: bool = False
    as_read: bool = False
    if_split: tuple[int, ...] = ()

    def held(self, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        """Returns the bytes on a device under each config, float64 [K]; cfg is int8 [K, axes]."""
        local = self.nbytes / shards(cfg, self.dims, mesh)
        if self.state:
            local = local / shards(cfg, self.state, mesh)
        if self.if_split:
            local = local * (shards(cfg, self.if_split, mesh) > 1)
        return np.asarray(local * self.times / self.over)


_ScopePath = tuple[Scope, ...] | None


def _term(graph: Graph, n: Node, kind: MemoryKind, a: Access, **more: Any) -> Term:
    t = graph.tensors[a.tensor]
    return Term(
        kind=kind, nbytes=concrete_size(t.nbytes, t.name), dims=tuple(dim_index(n, a.map.dims)), **more
    )


def held(graph: Graph, n: Node, cfg: np.ndarray, mesh: Mesh, optimizer: str = "adam") -> Iterator[Held]:
    """Yields what the node keeps under each of its configs; cfg is int8 [K, axes]."""
    mine = node_terms(graph, optimizer)[n.name]
    for term, region in zip(mine.terms, mine.regions, strict=True):
        yield Held(kind=term.kind, nbytes=term.held(cfg, mesh), region=region, weights=term.weights)


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeTerms:
    """What a node keeps, and the region that holds each part. ``number`` is equal if the terms are equal."""

    number: int
    terms: tuple[Term, ...]
    regions: tuple[_ScopePath, ...]


@once
def node_terms(graph: Graph, optimizer: str) -> dict[str, NodeTerms]:
    """Returns what each node keeps."""
    heavy = _read_heavily(graph)
    numbers: dict[tuple[Term, ...], int] = {}
    out = {}
    for n in graph.nodes:
        found = list(_terms_of(graph, n, optimizer, heavy))
        terms = tuple(term for term, _ in found)
        number_ = numbers.setdefault(terms, len(numbers))
        out[n.name] = NodeTerms(number=number_, terms=terms, regions=tuple(r for _, r in found))
    return out


def _terms_of(
    graph: Graph, n: Node, optimizer: str, heavy: Collection[str]
) -> Iterator[tuple[Term, _ScopePath]]:
    wanted, micro_batches = kept(graph), micro_batches_of(graph)  # the activations of one live at a time
    stays, unsummed = hoisted_of(graph) != "none", hoisted_of(graph) == "all" and micro_batches > 1

    as_read = {_viewed(n, t) for t in heavy} if n.kind == "parameter" else set()

    def term(kind: MemoryKind, a: Access, **more: Any) -> Term:
        return _term(graph, n, kind, a, **more)

    for op in n.ops:
        for a in op.writes:
            t = graph.tensors[a.tensor]
            if t.role == "parameter":
                yield term(stored_as(graph, n), a), None
                if t.needs_grad:
                    state = tuple(state_index(n))
                    if not unsummed:
                        yield (
                            term("gradients", a, state=state, times=2 if micro_batches > 1 else 1),
                            None,
                        )  # with micro-batches: the sum, and the gradient to add to it
                    values = OPTIMIZERS[optimizer] * state_itemsize(graph, t, optimizer)
                    yield term("optimizer", a, state=state, times=values, over=t.itemsize), None
            elif t.role == "input":
                yield term("activations", a, times=micro_batches), None  # inputs of all micro-batches
            elif graph.facts.eager and a.tensor not in _of_data(graph):
                continue  # each rank has the whole of it (``GraphFacts.constant_bytes``)
            elif a.tensor in wanted and op.kind != "copy" and (graph.facts.eager or n.kind != "parameter"):
                k = wanted[a.tensor]
                if is_kept_as_read(graph, a.tensor):
                    continue
                yield term("activations", a, times=k.times, weights=n.kind == "copy"), k.region
                if n.kind == "parameter" and a.tensor in as_read:  # it is counted there
                    yield term("activations", a, times=-k.times, weights=True, as_read=True), k.region
    for kept_tensor, a in _first_reads(graph).get(n.name, ()):
        yield term("activations", a, times=wanted[kept_tensor].times, as_read=True), None
    for op in n.ops if graph.facts.eager else ():
        yield from ((term("activations", a, times=times), op.region) for a, times in _float_masks(graph, op))
    for ops, a, stored in parameter_reads(graph, n):  # in the layout and dtype in which this node reads them
        many = concrete_size(ops[0].times, n.name)
        if kept_as_read(graph, n, ops, a.tensor):
            yield term("activations", a, times=many, over=micro_batches, weights=True, as_read=True), None
        # The sum, in the precision in which the parameter is stored, and the gradient to add to it:
        if unsummed and any(has_gradient(graph, op, a.tensor) for op in ops):
            copies = 1 + stored.itemsize / graph.tensors[a.tensor].itemsize
            yield term("gradients", a, times=many * copies, over=micro_batches), None
    for op in n.ops[1:] if n.kind == "parameter" and not (stays or graph.facts.eager) else ():
        # What light ops read of the parameter is kept only if it is gathered. Otherwise they make it again.
        yield from (
            (term("activations", a, times=-1, weights=True, as_read=True), None)
            for a in op.writes
            if a.tensor in _read_lightly(graph)
        )
    if n.kind == "parameter":  # subtract the stored parameter, which is counted already
        a = n.ops[0].writes[0]
        counted = (
            as_read if graph.facts.eager else heavy
        )  # call by call, a view is in the array that stores it
        if a.tensor in counted and (stays or graph.tensors[a.tensor].needs_grad):
            yield term("activations", a, times=-1, weights=True, as_read=True), None


def stored_as(graph: Graph, n: Node) -> MemoryKind:
    """What a parameter's node counts as. In a whole step, what only the update reads is optimizer state."""
    return "optimizer" if whole_step(graph).get(n.name) == "update" else "parameters"


def is_kept_as_read(graph: Graph, tensor: str) -> bool:
    """Whether only other nodes keep an activation, each in the layout in which it reads it. Where that is the layout in
    which it is written, it is the written array."""
    ways = kept_through(graph).get(tensor, ())
    return bool(ways) and all(ways) and graph.tensors[tensor].role == "activation"


@once
def _first_reads(graph: Graph) -> dict[str, list[tuple[str, Access]]]:
    """Returns, by node, what it is the first to read of such activations: (activation, what it reads)."""
    found: dict[str, list[tuple[str, Access]]] = {}
    order = {n.name: i for i, n in enumerate(graph.nodes)}
    for t, ways in kept_through(graph).items():
        if is_kept_as_read(graph, t):
            name, read = min((way[0] for way in ways), key=lambda r: order[r[0]])
            op, access = next((op, a) for op, a in graph.node[name].reads if a.tensor == read)
            if not is_gathered_again(graph, op, read):
                found.setdefault(name, []).append((t, access))
    return found


def _viewed(n: Node, t: str) -> str:
    """Returns the tensor of the node of which this one is a view."""
    made = {a.tensor: op for op in n.ops for a in op.writes}
    while t in made and made[t].kind == "view":
        t = made[t].reads[0].tensor
    return t


def stored_parameter(graph: Graph, n: Node | None) -> Node | None:
    """Returns the node of the parameter that a node stores or copies; None if it does neither."""
    while n is not None and n.kind == "copy":
        n = graph.producer.get(n.ops[0].reads[0].tensor)
    return n if n is not None and n.kind == "parameter" else None


def is_made_by_call(stored: Node, read: str) -> bool:
    """Whether a call of the program makes what is read of a parameter, and it is not just another view."""
    return stored.ops[0].writes[0].tensor != _viewed(stored, read)


def kept_as_read(graph: Graph, n: Node, ops: Sequence[Op], tensor: str) -> bool:
    """Whether a parameter stays as these ops of the node read it, until their backward or throughout the step.

    tensor: what they read of the parameter.
    """
    return hoisted_of(graph) != "none" or any(_read_in_backward(graph, n, op, tensor) for op in ops)


def _read_in_backward(graph: Graph, n: Node, op: Op, tensor: str) -> bool:
    """Whether the node's backward needs what this op reads, without gathering it again."""
    if op.region is not None or not op.differentiable or is_gathered_again(graph, op, tensor):
        return False
    if graph.facts.eager:
        needed = read_of_parameters(graph)
        return any(t == tensor for _, t in needed) if n.kind == "copy" else (n.name, tensor) in needed
    if is_read_whole(n, op):
        return True
    derived = any(a.tensor in differentiated(graph) for a in op.writes)
    return derived and tensor in needs(op, graph.tensors)


def is_gathered_again(graph: Graph, op: Op, tensor: str) -> bool:
    """Whether an op outside of regions lets go what it reads of a parameter, if that arrives from other devices
    (``Gathered.arrives``), and backward gathers it again."""
    again = graph.facts.frees_gathered and op.region is None
    return again and any(a.tensor == tensor and a.recompute for a in op.reads)


def is_read_whole(n: Node, op: Op) -> bool:
    """Whether a compiler has in memory what this op reads of a parameter. Into a light op it fuses what makes that."""
    return op.kind in ("matmul", "conv") or n.kind == "copy"


def _read_heavily(graph: Graph) -> set[str]:
    """Returns the tensors that are kept in the layout and dtype in which their readers have them."""
    stays = hoisted_of(graph) != "none"
    return {
        e.tensor for e in graph.edges if stays or _read_in_backward(graph, graph.node[e.dst], e.op, e.tensor)
    }


@once
def _read_lightly(graph: Graph) -> frozenset[str]:
    """Returns the tensors that only light ops read heavily (``_read_heavily``)."""
    whole = {e.tensor for e in graph.edges if is_read_whole(graph.node[e.dst], e.op)}
    return frozenset(_read_heavily(graph) - whole)


def _passing(graph: Graph, n: Node) -> Iterator[tuple[Op, Access, Node]]:
    """Yields what the node reads and makes while it runs, each array once: (op, access, the node that makes it).

    Left out are tensors inside the node, tensors that are read only in part, results written over an operand, and
    tensors passed on by nodes that do no work. If the program is not trained, results written in place and leaves are
    left out too, because they are in memory anyway.

    A parameter is not written over. But when something made of parameters alone is on its way back, the gradients of a
    compiled step are all that counts, and without sums a parameter's takes over the array of the result's.
    """
    touched = list(_touched(graph, n))
    takes_over = not graph.facts.eager and n.name in made_of_weights(graph)
    takes_over &= all(op.kind in ("elementwise", "view") for op in n.ops)
    free = {
        a.tensor: a
        for _, a, source in touched
        if source is not n
        and (takes_over or source.kind != "parameter")
        and not graph.read_outside(n, a.tensor)
    }
    made = {a.tensor: op for op in n.ops for a in op.writes}
    for op, a, source in touched:
        over = _written_over(graph, a, made, free) if source is n else None
        if over is None:
            yield op, a, source
        else:
            del free[over]


def _float_masks(graph: Graph, op: Op) -> Iterator[tuple[Access, float]]:
    """Yields the boolean masks of an attention, each with how many times its bytes a copy as numbers takes.

    PyTorch's attention turns a boolean mask into numbers in its queries' dtype, to add to the scores. Each call keeps
    its own for backward. A mask that follows from the program alone is not counted: most are causal, and attention then
    runs without one.
    """
    if op.kind != "attention" or not any(a.tensor in differentiated(graph) for a in op.writes):
        return
    queries = graph.tensors[op.reads[0].tensor].itemsize
    times = concrete_size(op.times, op.name) / micro_batches_of(graph) if op.region is None else 1.0
    for a in op.reads:
        if (mask := graph.tensors[a.tensor]).dtype == "bool" and a.tensor in _of_inputs(graph):
            yield a, times * queries / mask.itemsize


@once
def _of_inputs(graph: Graph) -> frozenset[str]:
    """Returns the tensors that depend on the batch, as far as the order of the nodes shows it."""
    found: set[str] = set()
    for op in (op for n in graph.nodes for op in n.ops):
        if op.kind == "input" or any(a.tensor in found for a in op.reads):
            found |= {a.tensor for a in op.writes}
    return frozenset(found)


@once
def _of_data(graph: Graph) -> frozenset[str]:
    """Returns the tensors that calls make which depend on the batch or on parameters. All that such a call makes is
    made for a rank's part, also what depends on no operand (the mask of a dropout)."""
    ops = [op for n in graph.nodes for op in n.ops]
    found: set[str] = set()
    calls: set[Place] = set()
    before = -1
    while before < len(found) + len(calls):  # a loop's carry, too, is made for a part
        before = len(found) + len(calls)
        for op in ops:
            of_data = op.kind in ("input", "parameter", "carry", "cotangent") or any(
                a.tensor in found for a in op.reads
            )
            if of_data or op.eqn in calls:
                found |= {a.tensor for a in op.writes}
                calls |= {op.eqn} if op.eqn else set()
    return frozenset(found)


def _touched(graph: Graph, n: Node) -> Iterator[tuple[Op, Access, Node]]:
    """Yields the same as ``_passing``, plus the results that are written over an operand."""
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


def _written_over(
    graph: Graph, result: Access, made: Mapping[str, Op], free: Mapping[str, Access]
) -> str | None:
    """Returns the operand whose array the result takes over, or None if there is none.

    Such an operand is turned into the result by elementwise ops, has the same size and split, and has no other reader.
    The gradient of the operand then also takes over the array of the result's gradient.

    made: tensor -> the op of the node that makes it.
    free: the operands that nothing else reads and that nothing is written over yet.
    """
    mine, left = graph.tensors[result.tensor], [result.tensor]
    while left:
        op = made.get(left.pop())
        if op is None or op.kind not in ("elementwise", "view", "copy"):
            continue
        for a in op.reads:
            t = graph.tensors[a.tensor]
            if t.itemsize != mine.itemsize or t.elements != mine.elements:
                continue
            if a.tensor in free and set(free[a.tensor].map.dims) == set(result.map.dims):
                return a.tensor
            left.append(a.tensor)
    return None


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """How a parameter gets from its storage to the node that reads it, and how its gradient gets back.

    recompute: it is gathered for each use, in a region. Otherwise it counts as kept.
    cast: what is read takes an array of its own (``converted``).
    trained: it has a gradient.
    """

    write: LayoutRule
    read: LayoutRule
    recompute: bool
    cast: bool
    trained: bool

    def copies(self, stored: np.ndarray, cfg: np.ndarray, mesh: Mesh, gradients: bool = True) -> int:
        """Returns how many of the tensor and its gradient differ in layout from storage; configs are int8 [1, axes].

        gradients: False if only the tensor counts.
        """
        apart = (gradient_states(self.write.states(stored, mesh)) != self.read.states(cfg, mesh)).any()
        recompute = self.recompute and (self.cast or self.resharded(stored, cfg, mesh))
        return int(recompute) + int(gradients and self.trained and bool(apart))

    def arrives(self, stored: np.ndarray, cfg: np.ndarray, mesh: Mesh) -> bool:
        """Whether other devices send parts of it. If not, a device reads what it stores, or a part of that."""
        written, read = forward_states(self.write.states(stored, mesh)), self.read.states(cfg, mesh)
        return bool(((written != read) & (written != REPLICATED)).any())

    def resharded(self, stored: np.ndarray, cfg: np.ndarray, mesh: Mesh) -> bool:
        """Whether it is read in another layout than it is stored in."""
        written, read = self.write.states(stored, mesh), self.read.states(cfg, mesh)
        return bool((forward_states(written) != summed_states(read)).any())


@dataclass(frozen=True, kw_only=True, eq=False)
class Flight:
    """What a node reads and makes while it runs.

    terms: each with the way in which it is gathered if it is a parameter, and None otherwise.
    sources: the nodes that store the parameters.
    number: equal if all of this is equal, whichever nodes store the parameters.
    """

    number: int
    terms: tuple[tuple[Term, Gathered | None], ...]
    sources: tuple[str, ...]

    def nbytes(
        self, name: str, configs: Mapping[str, np.ndarray], mesh: Mesh, gradients: bool = True
    ) -> float:
        """Returns the bytes in flight at once under a strategy; name is the node's. gradients: as in ``in_flight``."""
        cfg, out = configs[name][None, :], 0.0
        stored = iter(self.sources)
        for term, way in self.terms:
            local = float(term.held(cfg, mesh)[0])
            if way is not None:
                local *= way.copies(configs[next(stored)][None, :], cfg, mesh, gradients)
            out += local
        return out


@once
def flights(graph: Graph) -> dict[str, Flight]:
    """Returns what each node reads and makes while it runs."""
    numbers: dict[object, int] = {}
    out = {}
    for n in graph.nodes:
        terms: list[tuple[Term, Gathered | None]] = []
        sources = []
        for op, a, source in _passing(graph, n):
            stored = source.kind == "parameter"
            way = gathered(graph, n, op, a, source) if stored else None
            sources += [source.name] * stored
            terms.append((_term(graph, n, "activations", a), way))
        terms += ((term, None) for term in (_by_index(graph, n) if graph.facts.eager else ()))
        number_ = numbers.setdefault(tuple(terms), len(numbers))
        out[n.name] = Flight(number=number_, terms=tuple(terms), sources=tuple(sources))
    return out


def _by_index(graph: Graph, n: Node) -> Iterator[Term]:
    """Yields what ops by index make besides their result, where the dim that they select from is split.

    A device looks up all indices, and puts zeros where an index is another device's. Backward does the same with the
    gradient of the result. So there are two arrays of the result's size. An update goes into an array with a row more
    than the result, for what is another device's.
    """
    for op in n.ops if n.kind != "parameter" else ():
        if op.kind not in ("gather", "scatter"):
            continue
        others = {d for a in op.reads[1:] for d in a.map.dims}
        others |= {d for a in op.writes for d in a.map.dims} if op.kind == "gather" else set()
        selected = tuple(dim_index(n, [d for d in op.reads[0].map.dims if d not in others]))
        yield _term(graph, n, "activations", op.writes[0], if_split=selected)


def gathered(graph: Graph, n: Node, op: Op, a: Access, source: Node) -> Gathered:
    """Returns how a parameter gets to the op of the node that reads it. source: the node that stores it."""
    return Gathered(
        write=write_rule(source, *source.write_of(a.tensor)),
        read=read_rule(n, op, a),
        recompute=op.region is not None and hoisted_of(graph) == "none",
        cast=converted(graph, source, a.tensor),
        trained=graph.tensors[a.tensor].needs_grad,
    )


def converted(graph: Graph, stored: Node, read: str) -> bool:
    """Whether a parameter takes an array of its own to be read as this tensor. A program that runs call by call reads
    another shape of it, or its dims in another order, in the array that stores it, or in the one that is kept."""
    if not graph.facts.eager:
        return stored.ops[0].writes[0].tensor != read
    read = _viewed(stored, read)
    return stored.ops[0].writes[0].tensor != read and read not in kept(graph)


def order_in_memory(n: Node, read: str) -> tuple[int, ...]:
    """Returns how views in the node that makes a tensor order its dims in memory: per dim, its place. ``(1, 0)`` for a
    transposed matrix; as they are if a view does more."""
    made = {a.tensor: op for op in n.ops for a in op.writes}
    places = tuple(range(len(made[read].writes[0].map.walks)))
    while read in made and made[read].kind == "view":
        op = made[read]
        before, after = op.reads[0].map.dims, op.writes[0].map.dims
        if sorted(before) == sorted(after) and len(after) == len(places):
            at = {d: i for i, d in enumerate(before)}
            places = tuple(at[after[p]] for p in places)
        read = op.reads[0].tensor
    return places


@once
def _prefetched_reads(graph: Graph) -> dict[tuple[Scope, ...], list[tuple[Node, Node, Term, Gathered]]]:
    """Returns what each loop prefetches: loop -> (reader, node that stores it, parameter as read, how it is gathered).

    An iteration prefetches a parameter for the next one if its reader does not wait for a product of its own iteration.
    """
    out: dict[tuple[Scope, ...], list[tuple[Node, Node, Term, Gathered]]] = {}
    late: set[tuple[tuple[Scope, ...], str]] = set()
    for n in graph.nodes:
        for op in n.ops:
            micro_batches = concrete_size(op.times, n.name) / micro_batches_of(graph)
            if not op.loops or micro_batches <= 1:
                continue
            # Whatever an inner loop makes counts as a product, no matter what the loop contains.
            late |= {(op.loops[:k], a.tensor) for k in range(1, len(op.loops)) for a in op.writes}
            waits = any((op.loops, a.tensor) in late for a in op.reads)
            if waits or op.kind in ("matmul", "conv", "carry"):
                late |= {(op.loops, a.tensor) for a in op.writes}
            for a in () if waits else op.reads:
                source = graph.producer.get(a.tensor)
                if source is not None and source.kind == "parameter" and n.kind != "parameter":
                    term = _term(graph, n, "activations", a)
                    out.setdefault(op.loops, []).append((n, source, term, gathered(graph, n, op, a, source)))
    return out


def prefetched_bytes(graph: Graph, configs: Mapping[str, np.ndarray], mesh: Mesh) -> float:
    """Returns the bytes that a loop iteration holds for the next one, at most over all loops.

    ``pase.backends.jax.spmd.prefetch`` does the prefetching. What is kept for backward anyway does not count.
    configs: node name -> int8 [axes].
    """

    def nbytes(n: Node, source: Node, term: Term, way: Gathered) -> float:
        cfg, stored = configs[n.name][None, :], configs[source.name][None, :]
        return way.recompute * way.resharded(stored, cfg, mesh) * float(term.held(cfg, mesh)[0])

    return max(
        (sum(nbytes(*one) for one in found) for found in _prefetched_reads(graph).values()), default=0.0
    )


def in_flight(
    graph: Graph,
    configs: Mapping[str, np.ndarray],
    mesh: Mesh,
    made: dict[object, float] | None = None,
    gradients: bool = True,
) -> dict[str, float]:
    """Returns, per node, the bytes of what it reads and makes while it runs.

    The parameters that it reads, and their gradients, count if their layout differs from storage.

    configs: node name -> int8 [axes].
    made: results that are known from other configs; it is extended.
    gradients: False if the gradients of parameters are counted elsewhere (``pase.memory.sending``).
    """
    made = {} if made is None else made  # equal nodes of repeated layers share a result
    out = {}
    for name, flight in flights(graph).items():
        key = (flight.number, *(configs[n].tobytes() for n in (name, *flight.sources)))
        if key not in made:
            made[key] = flight.nbytes(name, configs, mesh, gradients)
        out[name] = made[key]
    return out


def in_flight_at_least(graph: Graph, mesh: Mesh, configs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns a lower bound on a strategy's buffers that depends only on each node's own config: bytes [K].

    It is the larger of two figures. One is what the node reads and makes, without parameters, because other nodes
    decide their layouts. The other is the largest buffer of the node's own collectives.

    configs: per node, its int8 [K, axes].
    """
    made: dict[tuple[int, int, int], np.ndarray] = {}  # nodes of equal layers share an array
    out = []
    for n, number_, cfg in zip(graph.nodes, facts(graph).cost, configs, strict=True):
        flight = flights(graph)[n.name]
        key = (flight.number, number_, id(cfg))
        if key not in made:
            held_ = sum((t.held(cfg, mesh) for t, g in flight.terms if g is None), np.zeros(len(cfg)))
            sent = (np.where(c.axes > 0, c.nbytes, 0.0) for c in node_charges(graph, n, cfg, mesh))
            made[key] = np.maximum.reduce([held_, *sent])
        out.append(made[key])
    return out


def held_by_term(
    graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray], optimizer: str = "adam"
) -> Iterator[tuple[str, NodeTerms, list[float]]]:
    """Yields (node, its terms, the bytes of each on a device). configs: node name -> int8 [axes]."""
    made: dict[tuple[int, bytes], list[float]] = {}  # equal nodes of repeated layers share a result
    for name, mine in node_terms(graph, optimizer).items():
        at = (mine.number, configs[name].tobytes())
        if at not in made:
            made[at] = [float(t.held(configs[name][None, :], mesh)[0]) for t in mine.terms]
        yield name, mine, made[at]


def parts(
    graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray], optimizer: str = "adam"
) -> Iterator[KeptPart]:
    """Yields what the nodes keep under a strategy. configs: node name -> int8 [axes]."""
    for name, mine, held_ in held_by_term(graph, mesh, configs, optimizer):
        for term, region, nbytes in zip(mine.terms, mine.regions, held_, strict=True):
            yield KeptPart(node=name, kind=term.kind, nbytes=nbytes, region=region)


def memory(
    graph: Graph,
    mesh: Mesh,
    configs: Mapping[str, np.ndarray],
    optimizer: str = "adam",
    prefetch: bool = False,
) -> Memory:
    """Returns the predicted peak bytes on one device.

    configs: node name -> int8 [axes].
    prefetch: whether loops gather parameters one iteration early.
    """
    sums = dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), 0.0)
    regions: dict[tuple[Scope, ...], float] = {}
    for p in parts(graph, mesh, configs, optimizer):
        if p.region is None:
            sums[p.kind] += p.nbytes
        else:
            regions[p.region] = regions.get(p.region, 0.0) + p.nbytes
    sums["activations"] += max(regions.values(), default=0.0)
    buffers = largest_buffer(graph, mesh, configs)
    if is_trained(graph):
        buffers = max(buffers, *in_flight(graph, configs, mesh).values())
        buffers += prefetched_bytes(graph, configs, mesh) if prefetch else 0.0
    else:
        buffers = max(buffers, live_bytes(graph, mesh, configs))
    return Memory(buffers=round(buffers), **{k: round(v) for k, v in sums.items()})


def profile(
    graph: Graph, mesh: Mesh, configs: Sequence[np.ndarray], limit_bytes: float, optimizer: str = "adam"
) -> MemoryProfile:
    """Returns the same account as a limit for the search, with one point in time per region; all else lives throughout.

    A node has one interval for what it keeps throughout, and one for each region in which it keeps something.

    configs: per node, its int8 [K, axes].
    """
    from pase.search import MemoryProfile

    terms = node_terms(graph, optimizer)
    regions = dict.fromkeys(r for mine in terms.values() for r in mine.regions if r is not None)
    point = {r: i for i, r in enumerate(regions)}
    last = max(len(point), 1)
    made: dict[tuple[int, tuple[int, ...], int], np.ndarray] = {}  # nodes of equal layers share an array
    intervals: list[tuple[int, int, int, np.ndarray]] = []
    for v, (n, cfg) in enumerate(zip(graph.nodes, configs, strict=True)):
        mine = terms[n.name]
        for region in dict.fromkeys(mine.regions) or (None,):
            which = tuple(i for i, r in enumerate(mine.regions) if r == region)
            key = (mine.number, which, id(cfg))
            if key not in made:
                made[key] = sum((mine.terms[i].held(cfg, mesh) for i in which), np.zeros(len(cfg)))
            start = 0 if region is None else point[region]
            stop = (last if region is None else start + 1) if which else start
            intervals.append((v, start, stop, made[key]))
    return MemoryProfile.of(intervals, limit_bytes)
