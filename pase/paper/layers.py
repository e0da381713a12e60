"""Converts our graph to PaSE's form: layers and the tensors between them, without storage, copies or loops.

- Parameters, inputs and constants are not layers. The cost of a layer includes the synchronisation of its weights.
- Copy nodes are removed: their readers read the copied tensor.
- The edges of a loop over stacked layers are unrolled: the first iteration reads the initial value, and the others read
  the previous iteration. Costs count once per iteration. All iterations share one config, where PaSE may choose one for
  each.
- A loop that uses the same weights in every iteration is a recurrence over time. With the products that feed it, it
  becomes PaSE's single node over (layer, batch, sequence, output, hidden).
"""

from __future__ import annotations

from dataclasses import dataclass

from pase.errors import PaseError
from pase.ir import Access, AccessMap, Dim, DimKind, Graph, IterationSpace, Node, Op, Tensor, functions
from pase.tables.layouts import concrete_size

__all__ = ["LayerFlow", "Layers", "layers_of"]

_NOT_LAYERS = frozenset({"parameter", "input", "constant", "copy", "carry", "output"})


@dataclass(frozen=True, kw_only=True)
class LayerFlow:
    """A tensor from one layer to another, ``times`` per step. written, read: the access maps at both ends."""

    src: str
    dst: str
    shape: tuple[int, ...]
    written: AccessMap
    read: AccessMap
    times: float


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The problem that PaSE searches: nodes, and flows between them (including flows from a layer to itself).

    tensors: of the graph, and those of nodes made here. parameters: tensors that are weights as a layer
    reads them (possibly cast or copied).
    """

    graph: Graph
    nodes: tuple[Node, ...]
    flows: tuple[LayerFlow, ...]
    tensors: dict[str, Tensor]
    parameters: frozenset[str]


def layers_of(graph: Graph) -> Layers:
    """The graph's layers and flows. Raises PaseError if a recurrence has a form for which PaSE has no node."""
    parameters = frozenset(
        t for t in graph.tensors if (p := _origin(graph, t)) is not None and p.kind == "parameter"
    )
    recurrent = _recurrent(graph, parameters)
    tensors = dict(graph.tensors)
    flows: list[LayerFlow] = []
    nodes = [n for n in graph.nodes if n.kind not in _NOT_LAYERS and n.name not in recurrent]
    if recurrent:
        made, added = _recurrence(graph, recurrent, parameters)
        at = next((i for i, n in enumerate(nodes) if _after(graph, n, recurrent)), len(nodes))
        nodes.insert(at, made)
        tensors |= added
        # One layer's outputs are the next layer's hidden dim, so the whole state is sent, as in the prototype.
        shape = tuple(concrete_size(made.space[d].size, d) for d in "sbd")
        state, hidden = AccessMap.parse("s b d"), AccessMap.parse("s b e")
        flows.append(
            LayerFlow(src=made.name, dst=made.name, shape=shape, written=state, read=hidden, times=1.0)
        )
    writers = {a.tensor: (n, a) for n in nodes for op in n.ops for a in op.writes}
    # Ops of one layer that read a tensor in the same way share its flow.
    seen: set[tuple[str, str, str, AccessMap]] = set()
    for n in nodes:
        for op, a in n.reads:
            if a.tensor in parameters:
                continue
            for tensor, part in _sources(graph, a.tensor, op, writers):
                writer, write = writers[tensor]
                if (n.name, a.tensor, tensor, a.map) in seen:
                    continue
                seen.add((n.name, a.tensor, tensor, a.map))
                shape = tuple(concrete_size(s, tensor) for s in tensors[tensor].shape)
                times = float(concrete_size(op.times, n.name)) * part
                flows.append(
                    LayerFlow(
                        src=writer.name, dst=n.name, shape=shape, written=write.map, read=a.map, times=times
                    )
                )
    return Layers(
        graph=graph,
        nodes=tuple(nodes),
        flows=tuple(f for f in flows if f.times > 0),
        tensors=tensors,
        parameters=parameters,
    )


def _origin(graph: Graph, tensor: str) -> Node | None:
    """The node that produces a tensor, seen through copies; None for a tensor without a producer."""
    producer = graph.producer.get(tensor)
    while producer is not None and producer.kind == "copy":
        producer = graph.producer.get(producer.ops[0].reads[0].tensor)
    return producer


def _sources(
    graph: Graph, tensor: str, reader: Op, writers: dict[str, tuple[Node, Access]]
) -> list[tuple[str, float]]:
    """(Tensor that a layer writes, fraction of the reader's iterations that read it), through copies and carries."""
    if tensor in writers:
        return [(tensor, 1.0)]
    producer = graph.producer.get(tensor)
    if producer is None or producer.kind not in ("copy", "carry"):
        return []
    init = producer.ops[0].reads[0].tensor
    if producer.kind == "copy" or len(producer.ops) == 1:
        return _sources(graph, init, reader, writers)
    back = producer.ops[1]
    value = back.reads[0].tensor
    if reader.scope[: len(back.scope)] != back.scope:
        return _sources(graph, value, reader, writers)
    trip_count = concrete_size(back.times, producer.name) / concrete_size(
        producer.ops[0].times, producer.name
    )
    first = [(t, part / trip_count) for t, part in _sources(graph, init, reader, writers)]
    later = [(t, part * (1 - 1 / trip_count)) for t, part in _sources(graph, value, back, writers)]
    return first + later


def _recurrent(graph: Graph, parameters: frozenset[str]) -> frozenset[str]:
    """Nodes of loops over time, and the nodes between the look-up and these loops."""
    loops = {
        n.name
        for n in graph.nodes
        for op, a in n.reads
        if op.kind == "matmul"
        and a.tensor in parameters
        and concrete_size(op.times, n.name) > 1
        and graph.producer[a.tensor].kind == "copy"
    }
    if not loops:
        return frozenset()
    ahead: dict[str, set[str]] = {}
    behind: dict[str, set[str]] = {}
    for e in graph.edges:
        ahead.setdefault(e.src, set()).add(e.dst)
        behind.setdefault(e.dst, set()).add(e.src)
    gathers = {n.name for n in graph.nodes if n.kind == "gather"}
    inside = {n.name for n in graph.nodes if concrete_size(n.times, n.name) > 1 or n.kind == "carry"}
    after = _closure({g for g in gathers}, ahead)
    before = _closure(inside | loops, behind)
    return frozenset((inside | (after & before)) - gathers)


def _closure(start: set[str], step: dict[str, set[str]]) -> set[str]:
    """The nodes reachable from ``start``, including ``start``."""
    seen, left = set(start), list(start)
    while left:
        for name in step.get(left.pop(), ()):
            if name not in seen:
                seen.add(name)
                left.append(name)
    return seen


def _after(graph: Graph, node: Node, names: frozenset[str]) -> bool:
    """Whether a node reads a tensor that one of these nodes produces."""
    return any((p := _origin(graph, a.tensor)) is not None and p.name in names for _, a in node.reads)


def _recurrence(
    graph: Graph, names: frozenset[str], parameters: frozenset[str]
) -> tuple[Node, dict[str, Tensor]]:
    """One node for all recurrent layers: layers × (sequence·batch) × (gates·output) × (2·hidden) multiply-adds."""
    steps = [
        (graph.node[n], op)
        for n in names
        for op in graph.node[n].ops
        if op.kind == "matmul" and concrete_size(op.times, n) > 1
    ]
    node, op = steps[0]
    weight = next(a for a in op.reads if a.tensor in parameters)
    state = next(a for a in op.reads if a.tensor not in parameters)
    sizes = {d.name: concrete_size(d.size, node.name) for d in node.space}
    hidden = [d for d in weight.map.dims if d not in op.writes[0].map.dims]
    out = [d for d in weight.map.dims if d in op.writes[0].map.dims]
    batch = [d for d in state.map.dims if d not in hidden]
    if len(hidden) != 1 or len(batch) != 1 or sizes[out[-1]] != sizes[hidden[0]]:
        raise PaseError(
            "PaSE's recurrent node needs exactly one hidden, one output and one batch dim",
            where=f"recurrence '{node.name}'",
        )
    width = sizes[hidden[0]]
    gates = 1
    for d in out[:-1]:
        gates *= sizes[d]
    steps_of_time = concrete_size(op.times, node.name)
    enters, leaves = _ends(graph, names, node.name)
    extents = {
        "l": len(steps),
        "b": sizes[batch[0]],
        "s": steps_of_time,
        "d": width,
        "e": width,
        "g": gates,
        "two": 2,
    }
    kinds: dict[str, DimKind] = {"e": "reduction", "g": "replicated", "two": "replicated"}
    dims = tuple(Dim(name=name, size=n, kind=kinds.get(name, "parallel")) for name, n in extents.items())

    def tensor(name: str, letters: str) -> Tensor:
        shape = tuple(extents[x] for x in letters.split())
        return Tensor(name=name, shape=shape, dtype="float32", needs_grad=True)

    def flat(name: str, last: str) -> AccessMap:
        """Time and batch in the order in which the model has them."""
        order = {steps_of_time: "s", sizes[batch[0]]: "b"}
        shape = [concrete_size(s, name) for s in graph.tensors[name].shape]
        return AccessMap.of(order[shape[0]], order[shape[1]], last)

    ops = _lstm(Access(enters, flat(enters, "e")), Access(leaves, flat(leaves, "d")))
    made = Node(name="lstm", space=IterationSpace(dims), ops=ops)
    return made, {name: tensor(name, letters) for name, letters in _LSTM.items()}


_LSTM = {"lstm.x": "l s b two e", "lstm.w": "l two e g d", "lstm.y": "l s b g d"}
"""The tensors that PaSE's node reads and writes, by its dims."""


def _lstm(entering: Access, leaving: Access) -> tuple[Op, Op, Op]:
    """PaSE's recurrent product, between views that convert the model's tensors to its dims and back."""
    x, w, y = (Access(name, AccessMap.parse(letters)) for name, letters in _LSTM.items())

    def view(name: str, read: Access, write: Access) -> Op:
        return Op(
            name=name,
            kind="view",
            function=functions.MOVE,
            reads=(read,),
            writes=(write,),
            flops_per_point=0,
            over=(),
        )

    product = Op(
        name="lstm",
        kind="matmul",
        function=functions.MATMUL,
        reads=(x, w),
        writes=(y,),
        flops_per_point=2,
    )
    return view("enter", entering, x), product, view("leave", y, leaving)


def _ends(graph: Graph, names: frozenset[str], what: str) -> tuple[str, str]:
    """The tensors that enter and leave these nodes. Raises PaseError if there is not exactly one of each."""
    entering = {a.tensor for n in names for _, a in graph.node[n].reads if _enters(graph, a.tensor, names)}
    leaving = {
        a.tensor
        for n in graph.nodes
        if n.name not in names and n.kind not in _NOT_LAYERS
        for _, a in n.reads
        if (p := _origin(graph, a.tensor)) is not None and p.name in names
    }
    if len(entering) != 1 or len(leaving) != 1:
        raise PaseError(
            f"PaSE's recurrent node needs one tensor in and one out, but there are {len(entering)} and {len(leaving)}",
            where=f"recurrence '{what}'",
        )
    return entering.pop(), leaving.pop()


def _enters(graph: Graph, tensor: str, names: frozenset[str]) -> bool:
    """Whether a tensor comes from a layer outside these nodes."""
    origin = _origin(graph, tensor)
    return origin is not None and origin.kind not in _NOT_LAYERS and origin.name not in names
