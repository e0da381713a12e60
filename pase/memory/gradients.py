"""Gradients of activations while a program runs its backward pass call by call, as PyTorch's eager mode does.

A gradient lives from the backward of the last call that reads its tensor to that of the call that makes the tensor.
Each call that reads the tensor makes a gradient of its full size, also if it reads only a slice, and adds it to what
the calls after it have made. The sum is made in place if nothing else holds the array. A call that only adds or changes
the shape passes on the array that it gets.

A derivative also makes arrays on the way. One that PyTorch composes of several ops (the power's: ``grad * (n *
x.pow(n - 1))``) makes one for each (``Function.scratch``). The gradient of an operand that is repeated along a dim is
made for the whole result and then summed. A call that selects from what it computes (a cross entropy, from the log
probabilities) has two derivatives, the first of which makes an array for the second.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pase.ir import Graph, Node, Op, Place
from pase.ir.functions import INTEGER_POW, POW
from pase.ir.types import LEAF
from pase.machine import Mesh
from pase.memory.account import stored_parameter
from pase.memory.residuals import differentiated, kept
from pase.once import once
from pase.tables.layouts import concrete_size, local_bytes

__all__ = ["gradient_bytes", "gradients_by_call"]


@dataclass(frozen=True, kw_only=True, eq=False)
class _BackwardCall:
    """What one call of the program reads and makes. Only tensors count whose gradients are computed.

    node: the last of its nodes.
    passes: the operands whose gradient is the array of the result's gradient.
    ends: whether backward starts from what it reads.
    keeps: what it makes that backward needs, which is free after its own backward.
    on_the_way: the arrays that its derivative makes besides gradients: the tensor whose size and layout they have, and
        how many.
    """

    node: Node
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    passes: frozenset[str]
    ends: bool
    keeps: tuple[str, ...]
    on_the_way: tuple[tuple[str, float], ...]


@dataclass(eq=False)
class _GradientArray:
    """An array of gradients in the course of backward. Times count calls from the end of the program.

    tensor: the tensor whose size and layout it has. times: how many there are.
    of: the tensors whose gradients it holds.
    """

    tensor: str
    first: int
    last: int
    times: float = 1.0
    of: set[str] = field(default_factory=set)


@once
def _arrays(graph: Graph) -> tuple[tuple[_BackwardCall, ...], tuple[_GradientArray, ...]]:
    """Returns the calls in the order of backward, and the arrays of gradients."""
    calls = tuple(reversed(list(_calls(graph))))
    every: list[_GradientArray] = []
    now: dict[str, _GradientArray] = {}

    def give(t: str, array: _GradientArray) -> None:
        now[t] = array
        array.of.add(t)

    def take(t: str, at: int) -> None:
        array = now.pop(t)
        array.of.remove(t)
        if not array.of:
            array.last = at

    def new(t: str, at: int, times: float = 1.0) -> _GradientArray:
        every.append(_GradientArray(tensor=t, first=at, last=at, times=times))
        return every[-1]

    for at, call in enumerate(calls):
        got = next((now[t] for t in call.writes if t in now), None)
        made: dict[str, _GradientArray] = {}
        for t in call.reads if got is not None or call.ends else ():
            made[t] = (got if t in call.passes else None) or new(t, at)
            if t not in now:
                give(t, made[t])
        for t, times in call.on_the_way if got is not None or call.ends else ():
            new(t, at, times)
        for t in call.writes:
            if t in now:
                take(t, at)
        for t, array in made.items():
            if now[t] is not array and now[t].of != {t}:
                take(t, at)
                give(t, new(t, at))
    for t in tuple(now):
        take(t, len(calls) - 1)
    return calls, tuple(every)


def _calls(graph: Graph) -> Iterator[_BackwardCall]:
    """Yields the calls in the order of the program."""
    trained, wanted = differentiated(graph), kept(graph)
    found: dict[Place, list[tuple[Node, Op]]] = {}
    for n in graph.nodes:
        for op in n.ops:
            if op.kind not in LEAF and op.differentiable and not op.backward:
                found.setdefault(op.eqn, []).append((n, op))
    if all(at.numbers() for at in found):
        found = dict(sorted(found.items(), key=lambda call: call[0].numbers() or ()))
    for of in found.values():
        ops = [op for _, op in of]
        made = dict.fromkeys(a.tensor for op in ops for a in op.writes)
        read = dict.fromkeys(a.tensor for op in ops for a in op.reads if a.tensor not in made)
        writes = tuple(t for t in made if t in trained)
        reads = tuple(t for t in read if t in trained and stored_parameter(graph, graph.producer[t]) is None)
        passing = all(op.kind in ("view", "copy") or op.function.hands_on for op in ops)
        whole = {graph.tensors[t].nbytes for t in writes}
        passes = frozenset(t for t in reads if passing and {graph.tensors[t].nbytes} == whole)
        node, once_kept = (
            of[-1][0],
            (t for t in made if t in wanted and graph.tensors[t].role == "activation"),
        )
        keeps = tuple(t for t in once_kept if wanted[t].times == 1 and wanted[t].region is None)
        yield _BackwardCall(
            node=node,
            reads=reads,
            writes=writes,
            passes=passes,
            ends=not made,
            keeps=tuple(
                t for t in keeps if graph.producer[t] is node and node.kind not in ("parameter", "copy")
            ),
            on_the_way=tuple(_on_the_way(graph, ops, trained)),
        )


def _on_the_way(graph: Graph, ops: Sequence[Op], trained: Collection[str]) -> Iterator[tuple[str, float]]:
    """Yields the arrays that a call's derivative makes besides gradients, as in ``_BackwardCall``.

    A call of several ops has one kernel for its derivative, except that it first unselects what it selects.
    """
    made = {a.tensor for op in ops for a in op.writes}
    if len(ops) > 1:
        chosen = (op.reads[0].tensor for op in ops if op.kind == "gather")
        yield from ((t, 1.0) for t in chosen if t in made and t in trained)
    elif ops[0].kind in ("elementwise", "sequential") and not ops[0].function.hands_on:
        op = ops[0]
        result = op.writes[0].tensor
        by_number = any(x is not None for x in op.literals or ())
        scratch = min(
            op.function.scratch, 2.0 * (op.function in (POW, INTEGER_POW)) if by_number else math.inf
        )
        whole = concrete_size(graph.tensors[result].elements, result)
        repeated = sum(
            a.tensor in trained and concrete_size(graph.tensors[a.tensor].elements, a.tensor) < whole
            for a in op.reads
        )
        if scratch + repeated:
            yield result, scratch + repeated


def gradient_bytes(graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns, per node, the most bytes of gradients that live at once during its calls' backward, less what the node
    keeps for backward and has freed by then.

    configs: node name -> int8 [axes].
    """
    calls, _ = _arrays(graph)
    out: dict[str, float] = {}
    freed: dict[str, float] = {}
    for call, nbytes in zip(calls, gradients_by_call(graph, mesh, configs), strict=True):
        name = call.node.name
        before = freed.get(name, 0.0)
        out[name] = max(out.get(name, 0.0), float(nbytes) - before)
        freed[name] = before + sum(_local(graph, t, mesh, configs) for t in call.keeps)
    return out


def gradients_by_call(graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the bytes of gradients of activations during each call's backward, in the order of backward.

    configs: node name -> int8 [axes].
    """
    calls, arrays = _arrays(graph)
    change = np.zeros(len(calls) + 1)
    for array in arrays:
        nbytes = array.times * _local(graph, array.tensor, mesh, configs)
        change[array.first] += nbytes
        change[array.last + 1] -= nbytes
    return np.cumsum(change)[:-1]


def _local(graph: Graph, t: str, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> float:
    n = graph.producer[t]
    access = n.write_of(t)[1]
    return float(local_bytes(n, graph.tensors[t], access, configs[n.name][None, :], mesh)[0])
