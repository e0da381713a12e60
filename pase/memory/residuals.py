"""Residuals: which tensors backward needs from forward, and where they are kept.

The derivative of an op needs operands of products and of non-linear functions, or their results (exp, tanh, …).
A compiler does not keep a value that it can recompute within the reader's own fusion. Cheap elementwise ops, casts and
views of one large operand are therefore followed back to that operand, which is kept instead. Sums of two activations
are kept as they are. A derivative rule that the user wrote keeps exactly what its backward reads from forward.
What only light ops need is not kept if light ops compute it from tensors that are kept themselves: the sum before a
ReLU, whose operands a normalization keeps anyway. Expensive functions are not recomputed, except on parameters that
backward needs as well (``_from_weights``).

PyTorch's eager mode fuses nothing (``Fusion``): each call of the program keeps its own operands or its result, and
recomputes from them what is inside of the call. So what calls make of a parameter alone (the tanh of a weight) is kept
too. A compiler makes it again from the parameter.

No fusion reaches from a loop's forward into its backward, nor through a branch. What their bodies keep is stacked, as
the framework's derivative lists it (``Function.listed``), unless the body is rematerialized.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from pase.ir import Graph, Node, Op, Place, Scope
from pase.ir.blocks import micro_batches_of
from pase.ir.functions import MAX, MUL, RANDOM, UNSTACK
from pase.ir.recompute import needs
from pase.ir.sizes import Size, product
from pase.ir.types import LEAF, PRODUCTS
from pase.once import once
from pase.tables.layouts import concrete_size

__all__ = [
    "Fusion",
    "Kept",
    "bytes_by_region",
    "differentiated",
    "fusion_of",
    "kept",
    "kept_bytes",
    "kept_through",
    "read_of_parameters",
    "written_bytes",
]

Fusion = Literal["none", "light", "products"]
"""What runs in one kernel. none: one call of the traced program (PyTorch's eager mode). light: neighboring light ops.
products: light ops and the product that they surround (``Machine.fuses_products``)."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A tensor that backward needs.

    region: the rematerialized region that recomputes it; None if it is kept from forward on.
    times: how many of it exist at once in one micro-batch: one for each iteration of the loops in which it is both made
        and read. Inside a region, this counts one run of the region. A stack that a loop fills is read after the loop,
        so there is one.
    light: whether only the derivatives of light ops need it, outside of loops and regions.
    """

    tensor: str
    region: tuple[Scope, ...] | None
    times: int
    light: bool = False


_Which = Literal["value", "last", "own"]
"""``value``: the tensor's value, in each iteration. ``last``: the value that a carry has after its loop. ``own``: an
array of the tensor's size that the framework's derivative makes."""


_ReadsOfNodes: TypeAlias = "tuple[tuple[str, str], ...]"
"""Reads of tensors that other nodes make: (node, tensor)."""


def fusion_of(graph: Graph) -> Fusion:
    """Returns what runs in one kernel on a machine whose compiler does not fuse light ops into products."""
    return "none" if graph.facts.eager else "light"


def kept(graph: Graph, fusion: Fusion | None = None, loops_stack: bool = True) -> dict[str, Kept]:
    """Returns everything that backward needs: tensor -> Kept.

    fusion: what runs in one kernel. A compiler that fuses light ops into products also recomputes expensive functions.
        None: as the program runs by itself (``fusion_of``).
    loops_stack: False if a loop stands for layers that are written out, so that fusions reach from forward into
        backward.
    """
    return _together(graph, fusion or fusion_of(graph), loops_stack)


@once
def _together(graph: Graph, fusion: Fusion, loops_stack: bool) -> dict[str, Kept]:
    found: dict[tuple[str, _Which], Kept] = {}
    for k, which in _kept(graph, fusion, loops_stack):
        before = found.get((k.tensor, which))
        light = k.light and (before is None or before.light)
        if before is not None and which == "own":
            found[k.tensor, which] = replace(k, times=before.times + k.times, light=light)
        elif before is None or _lasting(k) > _lasting(before):
            found[k.tensor, which] = replace(k, light=light)
        elif light != before.light:
            found[k.tensor, which] = replace(before, light=light)
    together: dict[str, Kept] = {}
    for k in sorted(found.values(), key=_lasting, reverse=True):
        first = together.setdefault(k.tensor, replace(k, times=0))
        together[k.tensor] = replace(first, times=first.times + k.times, light=first.light and k.light)
    if fusion == "light" and loops_stack:
        maker = _provenance(graph).maker
        again = {t for t, k in together.items() if k.light and _from_kept(graph, t, together, maker)}
        together = {t: k for t, k in together.items() if t not in again}
    return together


def _from_kept(graph: Graph, t: str, wanted: Mapping[str, Kept], maker: Mapping[str, _Made]) -> bool:
    """Whether cheap light ops compute the tensor from large operands that are all kept."""
    op = maker[t].op
    if op.kind not in ("elementwise", "view") or op.function.expensive or op.scope:
        return False
    size = graph.tensors[t].elements
    large = [
        x
        for x in (_storage_of(a.tensor, maker) for a in op.reads)
        if x in maker and _as_large(graph, x, size) and graph.tensors[x].role != "constant"
    ]
    return bool(large) and all(x in wanted or _from_kept(graph, x, wanted, maker) for x in large)


def _lasting(k: Kept) -> tuple[bool, int, int]:
    """A sort key: larger if the tensor lives longer, or if there is more of it."""
    return k.region is None, -len(k.region or ()), k.times


@dataclass(frozen=True, kw_only=True)
class _Made:
    """Where a tensor is made.

    scope: the scope of the op that gives it its value. For a loop's carry it is the body of the loop, which gives it
        a new value in each iteration.
    """

    node: Node
    op: Op
    scope: tuple[Scope, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Provenance:
    """A graph, and what a walk back from a reader must know of it.

    constant: the constants. readers: by tensor, the calls of the traced program that read it.
    """

    graph: Graph
    maker: Mapping[str, _Made]
    constant: frozenset[str]
    readers: Mapping[str, frozenset[Place]]

    def derivatives(self) -> Iterator[tuple[Node, Op]]:
        """Yields the ops that have a derivative or are part of one."""
        reached = differentiated(self.graph)
        for n in self.graph.nodes:
            yield from ((n, op) for op in n.ops if op.backward or any(a.tensor in reached for a in op.writes))

    def forward(self, t: str) -> tuple[str, _Made] | None:
        """Returns the array that the tensor is stored as, and where it is made. None for a constant, and for what is
        made in backward itself."""
        t = _storage_of(t, self.maker)
        if t not in self.maker or t in self.constant or self.maker[t].node.kind == "constant":
            return None
        op = self.maker[t].op
        passes = self.graph.tensors[t].needs_grad if op.kind == "cotangent" else not op.backward
        return (t, self.maker[t]) if passes else None


@once
def _provenance(graph: Graph) -> _Provenance:
    constant = frozenset(t.name for t in graph.tensors.values() if t.role == "constant")
    return _Provenance(graph=graph, maker=dict(_makers(graph)), constant=constant, readers=_readers(graph))


def _makers(graph: Graph) -> Iterator[tuple[str, _Made]]:
    for n in graph.nodes:
        closes = next((op for op in n.ops if op.kind == "carry" and not op.writes), None)
        for op in n.ops:
            scope = closes.scope if closes is not None and op.kind == "carry" else op.scope
            yield from ((a.tensor, _Made(node=n, op=op, scope=scope)) for a in op.writes)


def _kept(graph: Graph, fusion: Fusion, loops_stack: bool) -> Iterator[tuple[Kept, _Which]]:
    """Yields what each op's derivative needs."""
    program = _provenance(graph)
    maker, constant, trip_counts = program.maker, program.constant, _trip_counts(graph)
    varies = _varies(graph, maker, constant)

    def keep(t: str, reader: Op, which: _Which = "value") -> tuple[Kept, _Which]:
        made = maker[t]
        shared = _shared(made.scope, reader.scope)
        # A tensor read outside the region that makes it is kept from forward on. So is a result that a policy keeps.
        region = _region(shared) if made.op.remat else None
        loops, times = _loops(shared), 1
        for i in range(len(_loops(region or ())), len(loops)):
            if loops[: i + 1] in varies[t]:
                times *= trip_counts[loops[: i + 1]] // trip_counts[loops[:i]]
        if made.op.kind == "carry" and shared != made.scope:
            which = "last"
        light = reader.kind == "elementwise" and not (reader.backward or shared or _stacks(reader))
        return Kept(tensor=t, region=region, times=times, light=light), which

    for n, op in program.derivatives():
        stacked = loops_stack and _stacks(op)
        own = _own(graph, op) if stacked else 0
        for _ in range(own):
            yield keep(op.writes[0].tensor, op, "own")
        for t in () if own and op.function.listed == "own" else _needed(op, graph, fusion):
            if not stacked:
                roots = _roots(program, n, op, t, fusion)
                yield from (keep(root, op) for root in roots if _is_kept_made(root, n, maker))
                continue
            root = _storage_of(t, maker)
            stored = root in constant or root not in maker
            if not stored and maker[root].node.kind not in ("parameter", "constant"):
                yield keep(root, op)
    for n in graph.nodes:  # recomputation starts from the regions' inputs, and from what a policy keeps
        for op in n.ops:
            for a in op.reads if op.region is not None else ():
                root = _storage_of(a.tensor, maker)
                if a.gradient or root not in maker or maker[root].node.kind in ("parameter", "constant"):
                    continue
                inside = maker[root].scope[: len(op.region or ())] == op.region
                if not inside or (op.remat and not maker[root].op.remat and not maker[root].op.backward):
                    yield keep(root, op)


def _is_kept_made(t: str, reader: Node, maker: Mapping[str, _Made]) -> bool:
    """Whether what backward needs is kept where it is made. A parameter is stored, and what other nodes read of one
    they keep as they read it (``read_of_parameters``)."""
    made = maker[t]
    return made.node.kind != "parameter" or (made.node is reader and made.op.kind != "parameter")


@once
def read_of_parameters(graph: Graph) -> frozenset[tuple[str, str]]:
    """Returns what nodes read of parameters and need in backward as they read it, if each call of the program runs by
    itself: (reader, tensor). What a rematerialized region reads is gathered again."""
    program, found = _provenance(graph), set[tuple[str, str]]()
    for n, op in program.derivatives():
        for t in _needed(op, graph, "none") if op.region is None else ():
            roots = _roots(program, n, op, t, "none")
            found |= {(n.name, x) for x in roots if not _is_kept_made(x, n, program.maker)}
    return frozenset(found)


def _needed(op: Op, graph: Graph, fusion: Fusion) -> tuple[str, ...]:
    """Returns the tensors that the op's derivative needs. PyTorch's ReLU keeps its result, which tells as much. What a
    call keeps that nobody knows: all that it reads and makes."""
    if fusion == "none" and op.function is MAX and any(x == 0 for x in op.literals or ()):
        return tuple(a.tensor for a in op.writes)
    if fusion == "none" and op.kind == "opaque":
        return (*needs(op, graph.tensors), *(a.tensor for a in op.writes))
    return needs(op, graph.tensors)


@once
def kept_through(graph: Graph) -> dict[str, tuple[_ReadsOfNodes, ...]]:
    """Returns, for a program that runs call by call, how those that need an activation in backward read it: tensor ->
    per reader the reads of nodes as (node, tensor), from the reader to the node that makes it.

    There are none of them for a reader in that node, in a rematerialized region, or in a loop.
    """
    if not graph.facts.eager:
        return {}
    program, found = _provenance(graph), {t: set[_ReadsOfNodes]() for t in kept(graph)}
    maker = program.maker
    for a in (a for n in graph.nodes for op in n.ops if op.region is not None for a in op.reads):
        found.get(_storage_of(a.tensor, maker), set()).add(())
    for n, op in program.derivatives():
        apart = op.scope or op.backward
        for t in _needed(op, graph, "none"):
            for root, through in _roots_of_call(program, n, op, t):
                if root in found and maker[root].node.kind != "parameter":
                    found[root].add(() if apart or maker[root].scope else through)
    return {t: tuple(sorted(ways)) or ((),) for t, ways in found.items()}


def _readers(graph: Graph) -> Mapping[str, frozenset[Place]]:
    """Returns, by tensor, the calls of the traced program that read it."""
    found: dict[str, set[Place]] = {}
    for op in (op for n in graph.nodes for op in n.ops):
        for a in op.reads:
            found.setdefault(a.tensor, set()).add(op.eqn)
    return {t: frozenset(found.get(t, ())) for t in graph.tensors}


def _stacks(op: Op) -> bool:
    """Whether the op runs in a loop or branch whose residuals are stacked as the framework lists them.

    This does not hold in a rematerialized region inside of the loop, nor in a derivative rule that the user wrote.
    """
    return not op.backward and bool(op.scope) and op.scope[-1].kind in ("loop", "branch")


def _own(graph: Graph, op: Op) -> int:
    """Returns how many arrays of its result's size the op's derivative makes in forward, according to JAX.

    Other frameworks may keep fewer in a loop, but a model gets the same count whichever framework it comes from.
    """
    nonlinear = op.kind == "elementwise" and op.differentiable and op.function.needs in ("operands", "result")
    if not nonlinear or op.function.listed == "needs":
        return 0
    return sum(graph.tensors[a.tensor].needs_grad for a in op.reads)


@once
def differentiated(graph: Graph) -> frozenset[str]:
    """Returns the tensors whose gradients are computed.

    They depend on a parameter, and a returned value depends on them through ops that have a derivative.
    """
    found = {t for t in graph.outputs if graph.tensors[t].needs_grad}
    ops = [op for n in reversed(graph.nodes) for op in reversed(n.ops)]
    carried = {a.tensor: n for n in graph.nodes if n.kind == "carry" for a in n.ops[0].writes}
    before = -1
    while before < len(found):  # repeat, because an iteration of a loop reads what the previous one returns
        before = len(found)
        for op in ops:
            ends = op.kind in ("output", "gradient") or op.backward
            if ends or (op.differentiable and any(a.tensor in found for a in op.writes)):
                found |= {a.tensor for a in op.reads if graph.tensors[a.tensor].needs_grad}
        for t, n in carried.items():
            if t in found:
                found |= {a.tensor for op in n.ops for a in op.reads if graph.tensors[a.tensor].needs_grad}
    return frozenset(found)


def _varies(
    graph: Graph, maker: Mapping[str, _Made], constant: frozenset[str]
) -> Mapping[str, frozenset[tuple[Scope, ...]]]:
    """Returns, per tensor, the loops whose iterations give it different values, each with the loops around it.

    If a body computes a tensor only from values from outside of its loop (a weight's norm), the tensor is the same in
    each iteration, and derivatives keep one of it.
    """
    found: dict[str, frozenset[tuple[Scope, ...]]] = {}
    for t in (a.tensor for n in graph.nodes for op in n.ops for a in op.writes):
        made, loops = maker[t], _loops(maker[t].scope)
        around = frozenset(loops[: i + 1] for i in range(len(loops)))
        op = made.op
        sliced = op.kind == "carry" or op.function in (UNSTACK, RANDOM)
        # A constant may count iterations, and the operands of what is made later are not known yet: assume both vary.
        if sliced or any(a.tensor in constant or a.tensor not in found for a in op.reads):
            found[t] = around
        else:
            found[t] = frozenset().union(*(found[a.tensor] for a in op.reads)) & around
    return found


def _loops(scope: tuple[Scope, ...]) -> tuple[Scope, ...]:
    """Returns the scopes that run more than once each time that the scope around them runs."""
    return tuple(s for s in scope if s.kind not in ("remat", "branch"))


def _region(scope: tuple[Scope, ...]) -> tuple[Scope, ...] | None:
    """Returns the innermost rematerialized region of a scope, with all scopes around it."""
    inner = next((i for i in reversed(range(len(scope))) if scope[i].kind == "remat"), None)
    return None if inner is None else scope[: inner + 1]


def _shared(a: tuple[Scope, ...], b: tuple[Scope, ...]) -> tuple[Scope, ...]:
    """Returns the scopes that contain both."""
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:same]


def _trip_counts(graph: Graph) -> Mapping[tuple[Scope, ...], int]:
    """Returns, per nest of loops (outermost first), how often the innermost body runs in a micro-batch."""
    found: dict[tuple[Scope, ...], int] = {}
    for n in graph.nodes:
        for op in () if n.kind in LEAF else n.ops:
            found[_loops(op.scope)] = concrete_size(op.times, n.name) // micro_batches_of(graph)
    # A body that contains only a loop runs at most as often as that loop's body.
    for inner in sorted(found, key=len, reverse=True):
        for i in range(len(inner)):
            found[inner[:i]] = min(found.get(inner[:i], found[inner]), found[inner])
    return found | {(): 1}


def _copied(maker: Mapping[str, _Made], t: str) -> Iterator[tuple[str, str]]:
    """Yields the reads of the copy nodes that the tensor comes from: a copy may gather it for all of its readers."""
    while t in maker and maker[t].op.kind == "copy":
        name, t = maker[t].node.name, maker[t].op.reads[0].tensor
        yield name, t


def _storage_of(t: str, maker: Mapping[str, _Made]) -> str:
    """Returns the tensor of which this one is a copy or one iteration's slice."""
    while t in maker and (maker[t].op.kind == "copy" or maker[t].op.function is UNSTACK):
        t = maker[t].op.reads[0].tensor
    return t


def _roots(program: _Provenance, reader: Node, by: Op, t: str, fusion: Fusion) -> frozenset[str]:
    """Returns the tensors that are kept for ``t``: those from which the reader's node cheaply recomputes it.

    They are on the same side of a rematerialized region's border as the reader.

    by: the op that needs t.
    """
    if fusion == "none":
        return frozenset(root for root, _ in _roots_of_call(program, reader, by, t))
    graph, maker, constant, least = program.graph, program.maker, program.constant, t
    while (found := program.forward(t)) is not None:
        t, n, op = found[0], found[1].node, found[1].op
        if op.kind == "cotangent":
            t = op.reads[0].tensor
            continue
        if n.kind == "parameter":
            return frozenset()
        near = n is reader and op.region == by.region  # what enters or leaves a region is kept as it is
        if not near or op.kind not in ("elementwise", "view", "generate"):
            return frozenset([t])
        # A product reads its operands from memory, in backward too.
        read_whole = by.kind in PRODUCTS and op.kind == "elementwise"
        if fusion != "products" and (read_whole or op.function.expensive):
            again = not read_whole and _from_weights(program, reader, t)
            return frozenset() if again else frozenset([t])
        size = graph.tensors[t].elements
        operands = {a.tensor for a in op.reads if a.tensor not in constant and a.tensor in maker}
        large = [x for x in operands if _as_large(graph, x, size)]
        if len(large) == 1:
            if graph.tensors[t].itemsize < graph.tensors[least].itemsize:
                least = t
            t = large[0]
            continue
        if large or any(_larger(graph, x, t) for x in operands):
            return frozenset([t])
        # A tensor joined from parts that together have its size (the halves of a rotation) is kept, in its narrowest
        # cast. For a tensor made of small operands, the operands are kept.
        if _of_parts(graph, op, size, constant):
            return frozenset([min((t, least), key=lambda x: graph.tensors[x].itemsize)])
        small = (x for x in operands if maker[x].node.kind != "input")
        return frozenset().union(*(_roots(program, reader, by, x, fusion) for x in small))
    return frozenset()


def _from_weights(program: _Provenance, reader: Node, t: str) -> bool:
    """Whether light ops of the reader's node compute the tensor from parameters that its backward needs as well (the
    tanh in the GELU of a weight). XLA computes it again from them, expensive functions too."""
    if t in program.constant or t not in program.maker:
        return True
    n, op = program.maker[t].node, program.maker[t].op
    if n.kind == "parameter":
        needing = (o for o in reader.ops if not o.backward and o.region is None)
        return any(t in needs(o, program.graph.tensors) for o in needing)
    light = n is reader and op.kind in ("elementwise", "view", "generate") and op.function is not RANDOM
    return light and all(_from_weights(program, reader, a.tensor) for a in op.reads)


def _roots_of_call(program: _Provenance, reader: Node, by: Op, t: str) -> Iterator[tuple[str, _ReadsOfNodes]]:
    """Yields the same for a program that runs call by call, each with the reads of nodes, from the reader on, through
    which its array gets there unless one of them moves it."""
    graph, at = program.graph, reader
    through: _ReadsOfNodes = ()
    while (found := program.forward(t)) is not None:
        read, t, n, op = t, found[0], found[1].node, found[1].op
        if n is not at:
            through, at = (*through, (at.name, read), *_copied(program.maker, read)), n
        if op.kind == "cotangent":
            t = op.reads[0].tensor
            continue
        if n.kind == "parameter" and (n is not reader or op.kind == "parameter"):
            yield t, through
            return
        same = op.kind == "view" and _as_large(graph, op.reads[0].tensor, graph.tensors[t].elements)
        if same or (op.kind == "view" and op.name == "slice"):  # a slice keeps the whole storage
            t = op.reads[0].tensor
            continue
        result = any(a.tensor == t for a in by.writes)
        inside = op.eqn and op.eqn == by.eqn and (not result or program.readers[t] == {op.eqn})
        if not inside or op.kind not in ("elementwise", "view", "generate", "reduce", "window"):
            yield t, through
            return
        roots = dict(found for a in op.reads for found in _roots_of_call(program, n, by, a.tensor))
        # A norm keeps what it divides by, and the mean of its operand: it does not sum a larger tensor again.
        mean = op.kind == "reduce" and by.function is MUL and op.reads[0].tensor in roots
        if (result or mean) and any(_larger(graph, x, t) for x in roots):
            yield t, through
        else:
            yield from roots.items()
        return


def _as_large(graph: Graph, t: str, size: Size) -> bool:
    """Whether the tensor has the size of its reader's result."""
    return bool(graph.tensors[t].elements == size)


def _larger(graph: Graph, t: str, than: str) -> bool:
    """Whether the tensor has more elements than another one."""
    return concrete_size(graph.tensors[t].elements, t) > concrete_size(graph.tensors[than].elements, than)


def _of_parts(graph: Graph, op: Op, size: Size, constant: frozenset[str]) -> bool:
    """Whether the op's operands together have at least the size of its result."""
    parts = {a.tensor for a in op.reads if a.tensor not in constant}
    together = sum(concrete_size(graph.tensors[t].elements, t) for t in parts)
    return len(parts) > 1 and together >= concrete_size(size, op.name)


def kept_bytes(graph: Graph) -> int:
    """Returns the bytes that one device keeps from forward to backward in one micro-batch, if nothing is split.

    This is ``kept`` without parameters, inputs, and what a rematerialized region recomputes.
    """
    return bytes_by_region(graph).get(None, 0)


def bytes_by_region(graph: Graph) -> dict[tuple[Scope, ...] | None, int]:
    """Returns the bytes of the activations among ``kept`` by the rematerialized region that holds them."""
    out: dict[tuple[Scope, ...] | None, int] = {}
    for k in kept(graph).values():
        t = graph.tensors[k.tensor]
        if t.role == "activation":
            out[k.region] = out.get(k.region, 0) + k.times * concrete_size(t.nbytes, t.name)
    return out


def written_bytes(graph: Graph) -> int:
    """Returns an upper bound on what a micro-batch can keep for backward, in bytes, if nothing is split.

    It counts the inputs, everything that ops write in all iterations of their loops, and each parameter once per read.
    """
    micro_batches, total = micro_batches_of(graph), 0
    for n in graph.nodes:
        for op in n.ops:
            times = concrete_size(op.times, n.name) // (1 if n.kind in LEAF else micro_batches)
            for a in () if op.kind == "parameter" else op.writes:
                t = graph.tensors[a.tensor]
                touched = (
                    t.elements if not a.sparse or not op.over else product(n.space[d].size for d in op.over)
                )
                total += times * t.itemsize * concrete_size(touched, t.name)
            total += sum(
                times * concrete_size(graph.tensors[a.tensor].nbytes, a.tensor)
                for a in op.reads
                if graph.tensors[a.tensor].role == "parameter"
            )
    return total
