"""Gradients of activations while a program runs its backward pass call by call, as PyTorch's eager mode does.

A gradient lives from the backward of the last call that reads its tensor to that of the call that makes the tensor.
Each call that reads the tensor makes a gradient of its full size, also if it reads only a slice, and adds it to what
the calls after it have made. The sum is made in place if nothing else holds the array. A call that only adds or changes
the shape passes on the array that it gets. A call that selects from what it computes (a cross entropy, from the log
probabilities) has two derivatives, the first of which makes an array for the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from pase.ir import Graph, Node, Op, Place
from pase.ir.types import LEAF
from pase.machine import Mesh
from pase.memory.account import stored_parameter
from pase.memory.residuals import differentiated, kept
from pase.once import once
from pase.tables.layouts import local_bytes

__all__ = ["gradient_bytes", "gradients_by_call"]


@dataclass(frozen=True, kw_only=True, eq=False)
class _BackwardCall:
    """What one call of the program reads and makes. Only tensors count whose gradients are computed.

    node: the last of its nodes.
    passes: the operands whose gradient is the array of the result's gradient.
    ends: whether backward starts from what it reads.
    keeps: what it makes that backward needs, which is free after its own backward.
    selects_from: what it computes and then selects from.
    """

    node: Node
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    passes: frozenset[str]
    ends: bool
    keeps: tuple[str, ...]
    selects_from: tuple[str, ...]


@dataclass(eq=False)
class _GradientArray:
    """An array of gradients in the course of backward. Times count calls from the end of the program.

    tensor: the tensor whose size and layout it has. of: the tensors whose gradients it holds.
    """

    tensor: str
    first: int
    last: int
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

    def new(t: str, at: int) -> _GradientArray:
        every.append(_GradientArray(tensor=t, first=at, last=at))
        return every[-1]

    for at, call in enumerate(calls):
        got = next((now[t] for t in call.writes if t in now), None)
        made: dict[str, _GradientArray] = {}
        for t in call.reads if got is not None or call.ends else ():
            made[t] = (got if t in call.passes else None) or new(t, at)
            if t not in now:
                give(t, made[t])
        for t in call.selects_from if made else ():
            new(t, at)
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
            selects_from=tuple(
                a.tensor for op in ops if op.kind == "gather" for a in op.reads[:1] if a.tensor in writes
            ),
        )


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
        nbytes = _local(graph, array.tensor, mesh, configs)
        change[array.first] += nbytes
        change[array.last + 1] -= nbytes
    return np.cumsum(change)[:-1]


def _local(graph: Graph, t: str, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> float:
    n = graph.producer[t]
    access = n.write_of(t)[1]
    return float(local_bytes(n, graph.tensors[t], access, configs[n.name][None, :], mesh)[0])
