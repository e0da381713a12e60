"""Finds the role of each dim for the usual ways to parallelize: batch, model dim, heads, experts.

The roles follow from the graph; names are not used. The batch is the first dim of the inputs, if it holds more than one
example. The model dim (residual stream) is the dim that most weights share; an encoder and a decoder, or two towers,
have one each. A *column* weight maps the model dim to another dim, and a *row* weight maps back to it. Tensor
parallelism splits the dims between the two (heads, hidden units, vocabulary).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pase.ir import Graph, Node, Op, dim_classes
from pase.ir.made_of_weights import made_of_weights
from pase.ir.names import DimKey, view_classes
from pase.ir.parameters import EqualPart, Slice
from pase.once import once

__all__ = ["Roles", "Weight", "roles"]

_SHARE = 2 / 3
"""At least this fraction of the weights must have a model dim; otherwise there is none."""
_FEWEST = 3
"""Two weights that share a dim are just consecutive layers; three or more are a stream that runs through layers."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter as one product or look-up reads it. Its dims are given as dim classes, major to minor."""

    parameter: str
    node: str
    op: Op
    shared: tuple[int, ...]
    """Dims of the weight, the activation and the result, and the groups of a grouped product: experts."""
    contracted: tuple[int, ...]
    out: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Classes of dims by role.

    rows: the subset of ``batch`` that is sorted by expert. Each device multiplies its part of the rows of all examples.
    model: empty if no dim runs through the weights. tensor: the dims that tensor parallelism splits. ends: the subset
    of ``tensor`` that is not inside a layer (vocabulary, classes). merged: columns of products that are cut into parts
    with a dim of ``tensor`` each, which a block of the columns does not split (queries, keys and values). experts: dims
    that weights, activations and results share, or the groups of grouped products. sequence: the other dims of the
    residual stream. of_weights: the nodes that compute something of parameters alone (a weight divided by its norm).
    eager: see ``GraphFacts``.
    """

    classes: dict[DimKey, int]
    weights: tuple[Weight, ...]
    batch: frozenset[int]
    rows: frozenset[int]
    model: frozenset[int]
    tensor: frozenset[int]
    ends: frozenset[int]
    merged: frozenset[int]
    experts: frozenset[int]
    sequence: frozenset[int]
    of_weights: frozenset[str]
    eager: bool
    alike: Mapping[str, int]
    """Node -> a number. Nodes with the same number have the same kind, and dims of the same sizes, kinds and roles."""

    def dims(self, node: Node, wanted: frozenset[int]) -> list[int]:
        """Indices of the node's dims that belong to these classes."""
        return [i for i, d in enumerate(node.space) if self.classes[node.name, d.name] in wanted]

    def sizes(self, graph: Graph, wanted: frozenset[int]) -> list[int]:
        """Distinct sizes of these classes in the graph."""
        return sorted(
            {int(d.size) for n in graph.nodes for d in n.space if self.classes[n.name, d.name] in wanted}
        )


@once
def roles(graph: Graph) -> Roles:
    """The roles of every dim of the graph. The result is cached with the graph, because every baseline needs it."""
    classes = dim_classes(graph)
    weights = tuple(_weights(graph, classes))
    inputs = [n for n in graph.nodes if n.kind == "input"]
    # An input that is also returned (a cache) may be stacked by layer. The batch is the first dim of the other inputs.
    fresh = [n for n in inputs if not any(op.kind == "carry" for op in n.ops)]
    batch = frozenset(  # a first dim of size 1 has no iteration dim, so there is no batch then
        classes[n.name, d]
        for n in fresh or inputs
        for first in n.ops[0].writes[0].map.walks[:1]
        for d in first.dims[:1]
    )
    views = view_classes(graph, classes)
    rows = _rows_of_groups(graph, classes, views) - batch
    batch |= rows
    model = _model_dims(weights)
    experts = frozenset(c for w in weights for c in w.shared) - batch
    inner, ends = (
        frozenset(found) - experts - batch - model
        for found in _tensor_dims(graph, classes, weights, model, views)
    )
    tensor = inner | ends
    merged = _merged(graph, classes, weights, views, inner)
    sequence = frozenset(
        c
        for n in graph.nodes
        if n.kind in ("elementwise", "reduce", "carry")
        for here in [{classes[n.name, d.name] for d in n.space if d.kind == "parallel"}]
        if model & here and here & batch
        for c in here - batch - tensor - experts - model
    )
    of_weights = made_of_weights(graph)
    told = (batch, tensor, ends - inner, merged, experts, sequence)
    numbers: dict[object, int] = {}

    def look(n: Node) -> object:
        """Everything about a node that a baseline sees if it looks only at roles."""
        dims = ((d.size, d.kind, *(classes[n.name, d.name] in role for role in told)) for d in n.space)
        return n.kind, n.name in of_weights, tuple(dims)

    return Roles(
        classes=classes,
        weights=weights,
        batch=batch,
        rows=rows,
        model=model,
        tensor=tensor,
        ends=ends - inner,
        merged=merged,
        experts=experts,
        sequence=frozenset(s for s in sequence if s is not None),
        of_weights=of_weights,
        eager=graph.facts.eager,
        alike={n.name: numbers.setdefault(look(n), len(numbers)) for n in graph.nodes},
    )


def _rows_of_groups(
    graph: Graph, classes: dict[DimKey, int], views: Mapping[int, frozenset[int]]
) -> frozenset[int]:
    """The rows of all examples that grouped products multiply, each by the weights of its group: tokens, sorted by
    expert. What makes these rows or reads the results walks them, too, or other views of them."""
    rows: dict[str, set[int]] = defaultdict(set)
    groups = set[int]()
    for n in graph.nodes:
        for op in n.ops:
            if op.kind != "matmul" or op.backward or _parameter_of(graph, op.factors[1].tensor) is None:
                continue
            x, w = op.factors
            own = {*op.writes[0].map.dims} - {*w.map.dims}
            for a in (x, op.writes[0]):
                for i, walk in enumerate(a.map.walks):
                    # Groups' rows follow one another in one dim, in an unknown order or all equally many.
                    if own & {*walk.dims} and (len(op.reads) > 2 or {*walk.dims} & {*w.map.dims}):
                        rows[a.tensor].add(i)
                        groups |= {classes[n.name, d] for d in w.map.dims}
    found = {
        classes[n.name, d]
        for n in graph.nodes
        for op in n.ops
        for a in (*op.reads, *op.writes)
        if a.tensor in rows
        for i in rows[a.tensor]
        for d in a.map.walks[i].dims
    }
    return frozenset(found.union(*(views[c] for c in found)) - groups)


def _parameter_of(graph: Graph, tensor: str) -> str | None:
    """The parameter of which this tensor is a version (cast, copied or normalised); None for an activation.

    Of a result of several parameters, it is the first with the most dims: the weight, not its scale.
    """
    producer = graph.producer.get(tensor)
    while producer is not None and (producer.kind == "copy" or producer.name in made_of_weights(graph)):
        read = max((a for _, a in producer.reads), key=lambda a: len(a.map.dims))
        producer = graph.producer.get(read.tensor)
    return producer.name if producer is not None and producer.kind == "parameter" else None


def _weights(graph: Graph, classes: dict[DimKey, int]) -> Iterator[Weight]:
    """The weights of every product and look-up, one per reading op."""
    for n in graph.nodes:
        for op in n.ops:
            if op.kind not in ("matmul", "conv", "gather") or len(op.factors) != 2 or op.backward:
                continue
            for weight, other in (op.factors, op.factors[::-1]):
                parameter = _parameter_of(graph, weight.tensor)
                if parameter is None or _parameter_of(graph, other.tensor) is not None:
                    continue
                written, beside = set(op.writes[0].map.dims), set(other.map.dims)
                walked = [d for d in weight.map.dims if n.space[d].kind in ("parallel", "reduction")]
                groups = {*walked} - written - beside if op.kind == "matmul" else set()
                if op.kind == "gather" and weight is not op.reads[0]:
                    continue

                def of(dims: list[str], name: str = n.name) -> tuple[int, ...]:
                    return tuple(classes[name, d] for d in dims)

                yield Weight(
                    parameter=parameter,
                    node=n.name,
                    op=op,
                    shared=of([d for d in walked if (d in written and d in beside) or d in groups]),
                    contracted=of([d for d in walked if d not in written and d not in groups]),
                    out=of([d for d in walked if d in written and d not in beside]),
                )


def _model_dims(weights: tuple[Weight, ...]) -> frozenset[int]:
    """The dim that most weights share, if enough weights have it.

    Otherwise that dim and the dim that most of the other weights share, as in an encoder and a decoder, if enough
    weights have one of the two and no weight maps one to the other, as within a layer.
    """
    of = [{*w.contracted, *w.out} for w in weights]
    found: set[int] = set()
    for _ in range(2):
        counts = Counter(c for dims in of if not dims & found for c in dims)
        best, count = counts.most_common(1)[0] if counts else (-1, 0)
        if (found and count < _FEWEST) or len(of) < _FEWEST:
            break
        found.add(best)
        if len(found) > 1 and any(found <= dims for dims in of):
            break
        if sum(bool(dims & found) for dims in of) >= _SHARE * len(of):
            return frozenset(found)
    return frozenset()


def _tensor_dims(
    graph: Graph,
    classes: dict[DimKey, int],
    weights: tuple[Weight, ...],
    model: frozenset[int],
    views: Mapping[int, frozenset[int]],
) -> tuple[set[int], set[int]]:
    """(Dims between a column weight and its row weight, dims at which look-ups start or columns end).

    views: dim -> the dims that are split in the same way.
    """
    inner: set[int] = set()
    ends: set[int] = set()
    products = [w for w in weights if w.op.kind != "conv"]
    readers = {w.node for w in products}
    rows = {w.node for w in products if model & {*w.out} and w.contracted}
    before, after = _neighbours(graph)
    for w in products:
        summed = [c for c in w.contracted if c not in model]
        if w.op.kind == "gather" and model & {*w.out}:
            ends.update(summed[:1])
        elif w.node in rows and summed:
            # The input of this weight comes from attention, so only dims that all its products share (heads) qualify.
            between = [
                graph.node[m]
                for m in _reach(before, w.node, readers)
                if m not in readers and graph.node[m].kind in ("matmul", "attention")
            ]
            each = [{classes[n.name, d.name] for d in n.space if d.kind != "replicated"} for n in between]
            shared = [c for c in summed if all(views[c] & here for here in each)] if between else summed[:1]
            inner.update(*(views[c] for c in shared))
            inner |= _factors(graph.node[w.node], between, classes, {*shared})
        elif model & {*w.contracted} and not rows & _reach(after, w.node, readers):
            ends.update([c for c in w.out if c not in model][:1])
    return inner - ends, ends


def _factors(
    reader: Node, between: Sequence[Node], classes: Mapping[DimKey, int], heads: set[int]
) -> set[int]:
    """The query heads of a group, where the reader of attention's result walks all heads in one dim."""
    walked = {
        (a.tensor, t)
        for _, a in reader.reads
        for t, walk in enumerate(a.map.walks)
        if len(walk.dims) == 1 and classes[reader.name, walk.dims[0]] in heads
    }
    return {
        classes[n.name, d]
        for n in between
        for op in n.ops
        for a in op.writes
        for t, walk in enumerate(a.map.walks)
        if (a.tensor, t) in walked
        for d in walk.dims[1:]
        if n.space[d].kind == "parallel"
    }


def _merged(
    graph: Graph,
    classes: dict[DimKey, int],
    weights: tuple[Weight, ...],
    views: Mapping[int, frozenset[int]],
    inner: frozenset[int],
) -> frozenset[int]:
    """The columns of merged products, of which some parts are these dims: queries, keys and values, or gate and up."""
    cut_into: list[tuple[int, int]] = []
    for n in graph.nodes:
        for op in n.ops:
            of = {d.name: classes[n.name, d.name] for d in n.space}
            if op.kind == "view" and isinstance(op.parameters, EqualPart | Slice) and len(op.reads) == 1:
                pairs = zip(op.reads[0].map.walks, op.writes[0].map.walks, strict=True)
                cut_into += [(of[r.dims[0]], of[w.dims[0]]) for r, w in pairs if r.dims and w.dims and r != w]
            for walk in (w for a in op.reads for w in a.map.walks if len(w.dims) > 1):
                if n.space[walk.dims[0]].kind == "replicated":  # the number of the part
                    cut_into.append((of[walk.dims[0]], of[walk.dims[1]]))
    columns = frozenset(c for w in weights if w.op.kind == "matmul" for c in w.out)
    found, before = inner, None
    while found != before:
        before = found
        found |= frozenset(
            c for whole, part in cut_into if views[part] & found for c in views[whole] & columns
        )
    return found - inner


def _neighbours(graph: Graph) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """(Predecessors, successors) of each node within one layer. Edges through parameters and carries are left out."""
    before: dict[str, list[str]] = defaultdict(list)
    after: dict[str, list[str]] = defaultdict(list)
    kinds = {n.name: n.kind for n in graph.nodes}
    for e in graph.edges:
        if kinds[e.src] not in ("parameter", "carry") and kinds[e.dst] != "carry":
            before[e.dst].append(e.src)
            after[e.src].append(e.dst)
    return before, after


def _reach(follow: Mapping[str, list[str]], start: str, stop: set[str]) -> set[str]:
    """Nodes reachable from ``start``, up to and including the next ones that read weights."""
    seen: set[str] = set()
    left = list(follow.get(start, ()))
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        if name not in stop:
            left += follow.get(name, ())
    return seen
