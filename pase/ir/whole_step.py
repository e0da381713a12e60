"""The passes of a graph that is a whole train step: forward, backward and update.

A whole step makes its own gradients, so that its ops tell nothing of passes. They follow from what reads what:

- Forward is what the loss is made of.
- The update is what comes after the gradients: the largest set of other nodes that has no product, that only the update
  reads, and that reads nothing of forward and backward but numbers and tensors like a parameter: of a parameter's size,
  along dims of parameters alone.
- Backward is the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from pase.ir.batch_dims import batch_dims
from pase.ir.types import LEAF, PRODUCTS, Edge, Graph, Node, Op
from pase.once import once

__all__ = ["StepPass", "handed_on", "loss_of", "sums_gradient", "whole_step"]

StepPass = Literal["forward", "backward", "update"]

_IN_ORDER: tuple[StepPass, ...] = ("forward", "backward", "update")


def loss_of(graph: Graph, numbers: Iterable[str]) -> str:
    """The loss of a whole step: the number with the most products in it, among those that are made without gradients.

    A step may also return an accuracy, a part of the loss (fewer products, or as many and fewer nodes), or the norm of
    its gradients. numbers: tensors of one element that the step returns. "" if no number is made with a product and
    without gradients.
    """
    like_parameter, update = _like_parameter(graph), _update(graph, set())
    gradients = {
        name
        for name in update
        for t, source in _sources(graph, graph.node[name])
        if source.kind not in LEAF and source.name not in update and like_parameter(t)
    }
    found: dict[str, tuple[int, int]] = {}
    for tensor in numbers:
        made_of = _made_of(graph, tensor)
        products = sum(op.kind in PRODUCTS for name in made_of for op in graph.node[name].ops)
        if products and not made_of & gradients:
            found[tensor] = products, len(made_of)
    return max(found, key=lambda t: found[t], default="")


@once
def whole_step(graph: Graph) -> Mapping[str, StepPass]:
    """The pass in which each node of a whole step runs; empty for other graphs and if the step has no known loss.

    A leaf, or a copy of one, belongs to the first pass that reads it.
    """
    if graph.facts.loss not in graph.producer:
        return {}
    forward = _made_of(graph, graph.facts.loss)
    update = _update(graph, forward)
    backward = {n.name for n in graph.nodes if n.kind not in LEAF} - forward - update
    reads = {"forward": forward, "backward": backward, "update": update}
    out: dict[str, StepPass] = {name: when for when in _IN_ORDER for name in reads[when]}
    first: dict[str, StepPass] = {}
    for when in reversed(_IN_ORDER):
        first |= {s.name: when for name in reads[when] for _, s in _sources(graph, graph.node[name])}
    return out | {n.name: first.get(n.name, "update") for n in graph.nodes if n.kind in LEAF}


def sums_gradient(graph: Graph, edge: Edge) -> bool:
    """Whether an edge of a whole step has a parameter's gradient on its way to the update, which may be a partial sum.

    A gradient that its own node sums (a bias's) is none.
    """
    passes = whole_step(graph)
    if passes.get(edge.src) != "backward" or passes[edge.dst] != "update":
        return False
    op, made = graph.node[edge.src].write_of(edge.tensor)
    return not set(op.dims) <= set(made.map.dims)


def handed_on(graph: Graph, node: Node, op: Op) -> bool:
    """Whether an op of a parameter's or an input's node, or of a copy of one, takes its value for the next step."""
    if op.kind != "carry" or not node.ops[0].writes:
        return False
    own = graph.tensors[node.ops[0].writes[0].tensor]
    return graph.tensors[own.original].role in ("parameter", "input")


def _sources(graph: Graph, n: Node) -> Iterable[tuple[str, Node]]:
    """The tensors that a node reads in its own step, with the nodes that make them."""
    reads = (a.tensor for op, a in n.reads if not handed_on(graph, n, op))
    return ((t, graph.producer[t]) for t in reads if t in graph.producer)


def _made_of(graph: Graph, tensor: str) -> set[str]:
    """The nodes that a tensor is made of, without leaves."""
    found: set[str] = set()
    todo = [graph.producer[tensor]] if tensor in graph.producer else []
    while todo:
        n = todo.pop()
        if n.kind not in LEAF and n.name not in found:
            found.add(n.name)
            todo += (source for _, source in _sources(graph, n))
    return found


def _update(graph: Graph, forward: set[str]) -> set[str]:
    """The nodes of the update. forward: the nodes of forward, which are none of it."""
    like_parameter = _like_parameter(graph)
    readers: dict[str, set[str]] = {}
    for n in graph.nodes:
        for _, source in _sources(graph, n):
            readers.setdefault(source.name, set()).add(n.name)
    out = {
        n.name
        for n in graph.nodes
        if n.kind not in LEAF and n.name not in forward and not any(op.kind in PRODUCTS for op in n.ops)
    }
    todo = sorted(out)
    while todo:
        n = graph.node[todo.pop()]
        if n.name not in out:
            continue
        given = [t for t, s in _sources(graph, n) if s.name not in out and s.kind != "parameter"]
        fits = all(math.prod(graph.tensors[t].shape) == 1 or like_parameter(t) for t in given)
        if not fits or not readers.get(n.name, set()) <= out:
            out.remove(n.name)
            todo += (s.name for _, s in _sources(graph, n))
            todo += readers.get(n.name, ())
    return out


@once
def _like_parameter(graph: Graph) -> Callable[[str], bool]:
    """A function that tells whether a tensor is like a parameter, as a gradient is: it has as many elements as one,
    more than 1, and each of its dims walks what some parameter's dim walks. An activation may well have as many
    elements, but the batch or the positions are in no parameter."""
    digits = {dim: {digit for digit, _ in held} for dim, held in batch_dims(graph, ()).walked.items()}
    parameters = [n for n in graph.nodes if n.kind == "parameter"]
    own = {x for n in parameters for d in n.space for x in digits[n.name, d.name]}
    sizes = {math.prod(t.shape) for t in graph.tensors.values() if t.role == "parameter"} - {1}

    def told(tensor: str) -> bool:
        if math.prod(graph.tensors[tensor].shape) not in sizes:
            return False
        made = graph.producer[tensor]
        _, write = made.write_of(tensor)
        return all(digits[made.name, d] <= own for d in write.map.dims)

    return told
