"""Nodes and dims that the searched graph has beyond the model's own: copies for several readers, states, rings."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

from pase.ir import functions
from pase.ir.maps import AccessMap, Walk
from pase.ir.places import Scope
from pase.ir.sizes import is_one
from pase.ir.types import Access, Dim, Graph, IterationSpace, Node, Op

__all__ = ["with_copies", "with_rings", "with_states"]


def with_copies(graph: Graph) -> Graph:
    """Adds a copy node after every tensor with several readers. Its 'pending' dim lets their gradients be summed once.

    Readers in different loops get separate copies, because a gather inside a loop runs in every iteration. If some
    readers of a parameter read it cast or viewed (a tied embedding), the copy node makes these values of the copy. So
    the gradients of all readers meet before they are summed over devices, as XLA adds them up.
    """
    forms = {n.name: n.ops[1:] for n in graph.nodes if _read_in_several_forms(graph, n)}
    readers: dict[tuple[str, tuple[Scope, ...]], dict[str, Op]] = defaultdict(dict)
    again: set[tuple[str, tuple[Scope, ...]]] = set()
    for n in graph.nodes:
        for op, a in n.reads:
            source = graph.producer.get(a.tensor)
            if source is not None and source.name in forms:
                a = replace(a, tensor=source.ops[0].writes[0].tensor)
            readers[a.tensor, op.scope].setdefault(n.name, op)
            if a.recompute:
                again.add((a.tensor, op.scope))
    copies: dict[str, list[Node]] = defaultdict(list)
    renames: dict[tuple[str, tuple[Scope, ...]], str] = {}
    tensors = dict(graph.tensors)
    for (t, scope), who in readers.items():
        tensor, producer = graph.tensors[t], graph.producer.get(t)
        if len(who) < 2 or producer is None or _is_single(graph, t):
            continue
        if producer.kind in ("input", "constant"):  # small, so each reader gathers it
            continue
        op, write = producer.write_of(t)
        inside = next(iter(who.values()))
        new = next(name for k in itertools.count() if (name := f"{t}c{k or ''}") not in tensors)
        tensors[new] = replace(tensor, name=new, role="activation", copy_of=t)
        walks, dims, names = _factored(producer, write)
        m = AccessMap(tuple(walks))
        copy = Op(
            name="copy",
            kind="copy",
            function=functions.COPY,
            reads=(Access(t, m, recompute=(t, scope) in again),),
            writes=(Access(new, m),),
            flops_per_point=0,
            over=(),
            source=op.source or inside.source,
            eqn=op.eqn,
            scope=scope,
            times=inside.times,
            chance=inside.chance,
            remat=inside.remat,
            backward=all(o.backward for o in who.values()),
        )
        pending = [Dim(name="pending", size=0, kind="pending")] if tensor.needs_grad else []
        made = (_in_copy(o, {t: new}, names) for o in forms.get(producer.name, ()))
        copies[producer.name].append(
            Node(name=f"copy.{new}", space=IterationSpace((*dims, *pending)), ops=(copy, *made))
        )
        renames[t, scope] = new
    nodes: list[Node] = []
    for n in graph.nodes:
        nodes.append(_reading(replace(n, ops=n.ops[:1]) if n.name in forms else n, renames))
        nodes += copies[n.name]
    return replace(graph, nodes=tuple(nodes), tensors=tensors)


def _read_in_several_forms(graph: Graph, n: Node) -> bool:
    """Whether several nodes read a parameter, not all of them the same tensor of its node, all in one scope.

    The casts and views in the parameter's node must be in this scope, too.
    """
    if n.ops[0].kind != "parameter" or len(n.ops) == 1 or _is_single(graph, n.ops[0].writes[0].tensor):
        return False
    made = {a.tensor for op in n.ops for a in op.writes}
    read = [(m.name, a.tensor, op.scope) for m in graph.nodes for op, a in m.reads if a.tensor in made]
    readers, tensors, scopes = map(set, zip(*read, strict=True)) if read else (set(), set(), set())
    scopes |= {op.scope for op in n.ops[1:]}
    return len(readers) > 1 and len(tensors) > 1 and len(scopes) == 1


def _is_single(graph: Graph, tensor: str) -> bool:
    """Whether it has one element: its readers have nothing to share."""
    return all(map(is_one, graph.tensors[tensor].shape))


def _in_copy(op: Op, renames: dict[str, str], names: dict[str, str]) -> Op:
    """The cast or view of a parameter, made of its copy. names: dim of the parameter's node -> dim of the copy's."""

    def walked(a: Access) -> Access:
        walks = (replace(w, dims=tuple(names[d] for d in w.dims)) for w in a.map.walks)
        return replace(a, tensor=renames.get(a.tensor, a.tensor), map=AccessMap(tuple(walks)))

    return replace(
        op,
        reads=tuple(map(walked, op.reads)),
        writes=tuple(map(walked, op.writes)),
        over=None if op.over is None else tuple(names[d] for d in op.over),
    )


def with_states(graph: Graph) -> Graph:
    """Adds a 'state' dim to every trained parameter. Axes on it split only the gradient and the optimizer's state."""

    def extended(n: Node) -> Node:
        if n.ops[0].kind != "parameter" or not graph.tensors[n.ops[0].writes[0].tensor].needs_grad:
            return n
        if all(d.kind != "parallel" for d in n.space):
            return n
        return replace(n, space=IterationSpace((*n.space.dims, Dim(name="state", size=0, kind="state"))))

    return replace(graph, nodes=tuple(map(extended, graph.nodes)))


def with_rings(graph: Graph) -> Graph:
    """Adds a 'ring' dim to every attention without mask or bias that may split its queries and keys together."""

    def extended(n: Node) -> Node:
        positions = _positions(n)
        if positions is None:
            return n
        (ring,) = itertools.islice(
            (name for k in itertools.count() if (name := f"ring{k or ''}") not in n.space), 1
        )

        def cut(dims: tuple[str, ...]) -> tuple[str, ...]:
            return (ring, *dims) if set(dims) & positions else dims

        def walked(a: Access) -> Access:
            return replace(a, map=AccessMap(tuple(replace(w, dims=cut(w.dims)) for w in a.map.walks)))

        def split(op: Op) -> Op:
            return replace(
                op,
                reads=tuple(map(walked, op.reads)),
                writes=tuple(map(walked, op.writes)),
                over=None if op.over is None else cut(op.over),
            )

        space = IterationSpace((*n.space.dims, Dim(name=ring, size=1, kind="ring")))
        return replace(n, space=space, ops=tuple(map(split, n.ops)))

    return replace(graph, nodes=tuple(map(extended, graph.nodes)))


def _positions(n: Node) -> frozenset[str] | None:
    """The dims of an attention's queries and keys if one axis may split both, else None. Each must be a single dim that
    is walked alone, without a window."""
    op = n.main
    if op.kind != "attention" or len(op.reads) != 3 or op.reads[0].tensor in {a.tensor for a in op.reads[1:]}:
        return None
    queries = op.writes[1].map.walks[1].dims
    keys = tuple(d for d in op.reads[1].map.dims if d not in op.reads[0].map.dims)
    if len(queries) != 1 or len(keys) != 1:
        return None
    if op.function is functions.CAUSAL_ATTENTION and n.space[queries[0]].size != n.space[keys[0]].size:
        return None
    found = frozenset((*queries, *keys))
    walks = [w for o in n.ops for a in (*o.reads, *o.writes) for w in a.map.walks if set(w.dims) & found]
    return found if all(len(w.dims) == 1 and w.window is None for w in walks) else None


def _factored(producer: Node, write: Access) -> tuple[list[Walk], list[Dim], dict[str, str]]:
    """The walks and dims of the written tensor, and which dim is for which of the producer's dims. A merged tensor dim
    keeps its factors, so that it can be split in the same way as its readers split it."""
    dims: list[Dim] = []
    names: dict[str, str] = {}
    walks: list[Walk] = []
    for w in write.map.walks:
        first = len(dims)
        for d in w.dims:
            kind = "replicated" if producer.space[d].kind == "replicated" else "parallel"
            names[d] = f"d{len(dims)}"
            dims.append(Dim(name=f"d{len(dims)}", size=producer.space[d].size, kind=kind))  # type: ignore[arg-type]
        walks.append(Walk(tuple(f"d{i}" for i in range(first, len(dims)))))
    return walks, dims, names


def _reading(n: Node, renames: dict[tuple[str, tuple[Scope, ...]], str]) -> Node:
    internal = n.internal

    def renamed(op: Op) -> tuple[Access, ...]:
        return tuple(
            replace(a, tensor=renames[a.tensor, op.scope])
            if (a.tensor, op.scope) in renames and a.tensor not in internal
            else a
            for a in op.reads
        )

    return replace(n, ops=tuple(replace(op, reads=renamed(op)) for op in n.ops))
