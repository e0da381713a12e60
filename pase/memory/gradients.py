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
from dataclasses import dataclass, field, replace

import numpy as np

from pase.ir import Access, Graph, Node, Op, Place
from pase.ir.functions import INTEGER_POW, POW
from pase.ir.types import LEAF, PRODUCTS
from pase.machine import Mesh
from pase.memory.account import is_kept_as_read, order_in_memory
from pase.memory.residuals import differentiated, kept
from pase.once import once
from pase.tables.axis_layout import PARTIAL, gradient_states
from pase.tables.layouts import concrete_size, local_bytes, read_rule, write_rule

__all__ = ["gradient_bytes", "gradients_after", "gradients_by_call", "made_of_parameters"]


@dataclass(frozen=True, kw_only=True, eq=False)
class _BackwardCall:
    """What one call of the program reads and makes. Only tensors count whose gradients are computed.

    node: the last of its nodes.
    passes: the operands whose gradient is the array of the result's gradient.
    ends: whether backward starts from what it reads.
    keeps: what it makes that backward needs, which is free after its own backward.
    on_the_way: the arrays that its derivative makes besides gradients: the tensor whose size and layout they have, and
        how many.
    given: what it makes whose gradient has arrived before (``made_of_parameters``).
    products: the operands of its products that have such a gradient.
    others: those of its other ops, each once.
    parameters: those whose gradients it makes, with whether its node is their last reader.
    """

    node: Node
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    passes: frozenset[str]
    ends: bool
    keeps: tuple[str, ...]
    on_the_way: tuple[tuple[str, float], ...]
    given: tuple[str, ...]
    products: tuple[tuple[Node, Op, Access], ...]
    others: tuple[tuple[Node, Op, Access], ...]
    parameters: tuple[tuple[Node, Access, bool], ...]


@dataclass(eq=False)
class _GradientArray:
    """An array of gradients in the course of backward. Times count calls from the end of the program.

    tensor: the tensor whose size and layout it has. times: how many there are.
    of: the tensors whose gradients it holds. arrived: whether it comes from other devices.
    """

    tensor: str
    first: int
    last: int
    times: float = 1.0
    arrived: bool = False
    of: set[str] = field(default_factory=set)


@once
def _arrays(graph: Graph) -> tuple[tuple[_BackwardCall, ...], tuple[_GradientArray, ...]]:
    """Returns the calls in the order of backward, and the arrays of gradients."""
    calls = tuple(c for c in reversed(_calls(graph)) if c.node.kind != "parameter")
    copied = {a.tensor for n in graph.nodes if n.kind == "copy" for op in n.ops[:1] for a in op.writes}
    return calls, _followed(calls, copied)


@once
def _arrays_of_parameters(
    graph: Graph, of: frozenset[str], late: bool
) -> tuple[tuple[_BackwardCall, ...], tuple[_GradientArray, ...]]:
    """Returns the same for the calls that make something of these parameters alone. late: as in ``made_of_parameters``.
    Gradients that have arrived are held until all are used. Where views changed the order of a parameter's dims, its
    gradient is copied back into it."""
    calls = tuple(c for c in reversed(_calls(graph)) if c.node.kind == "parameter" and c.node.name in of)
    if late:
        calls = tuple(x for c in calls for x in (c, *_reordered(c)))
    arrays = _followed(calls)
    for array in arrays:
        array.last = len(calls) - 1 if late and array.arrived else array.last
    return calls, arrays


def _followed(calls: Sequence[_BackwardCall], copied: Collection[str] = ()) -> tuple[_GradientArray, ...]:
    """Returns the arrays of gradients that these calls make.

    calls: in the order of backward.
    copied: copies of parameters, whose gradients are the parameters' when all calls that read them have run.
    """
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

    def new(t: str, at: int, times: float = 1.0, arrived: bool = False) -> _GradientArray:
        every.append(_GradientArray(tensor=t, first=at, last=at, times=times, arrived=arrived))
        return every[-1]

    taken = {t: at for at, call in enumerate(calls) for t in call.reads if t in copied}
    for at, call in enumerate(calls):
        for t in call.given:
            if t not in now:
                give(t, new(t, at, arrived=True))
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
        for t in call.reads:
            if taken.get(t) == at and t in now:
                take(t, at - (call.node.kind == "copy"))
    for t in tuple(now):
        take(t, len(calls) - 1)
    return tuple(every)


@once
def _calls(graph: Graph) -> tuple[_BackwardCall, ...]:
    """Returns the calls in the order of the program."""
    return tuple(_in_order(graph))


def _in_order(graph: Graph) -> Iterator[_BackwardCall]:
    """Yields the calls in the order of the program."""
    trained, wanted = differentiated(graph), kept(graph)
    found: dict[Place, list[tuple[Node, Op]]] = {}
    for n in graph.nodes:
        for op in n.ops:
            if op.kind not in (*LEAF, "copy") and op.differentiable and not op.backward:
                found.setdefault(op.eqn, []).append((n, op))
    if all(at.numbers() for at in found):
        found = dict(sorted(found.items(), key=lambda call: call[0].numbers() or ()))
    for of in found.values():
        ops = [op for _, op in of]
        made = dict.fromkeys(a.tensor for op in ops for a in op.writes)
        read = dict.fromkeys(a.tensor for op in ops for a in op.reads if a.tensor not in made)
        writes = tuple(t for t in made if t in trained)
        own = of[-1][0] if len({n.name for n, _ in of}) == 1 and of[-1][0].kind == "parameter" else None
        reads = tuple(t for t in read if t in trained and _is_followed(graph, t, own))
        passing = all(op.kind in ("view", "copy") or op.function.hands_on for op in ops)
        whole = {graph.tensors[t].nbytes for t in writes}
        passes = frozenset(t for t in reads if passing and {graph.tensors[t].nbytes} == whole)
        node, once_kept = (
            of[-1][0],
            (t for t in made if t in wanted and graph.tensors[t].role == "activation"),
        )
        keeps = (t for t in once_kept if wanted[t].times == 1 and wanted[t].region is None)
        operands = {a.tensor: (n, op, a) for n, op in of for a in op.reads if a.tensor in reads}
        yield _BackwardCall(
            node=node,
            reads=reads,
            writes=writes,
            passes=passes,
            ends=not made,
            keeps=tuple(
                t
                for t in keeps
                if graph.producer[t] is node and node.kind != "copy" and not is_kept_as_read(graph, t)
            ),
            on_the_way=tuple(_on_the_way(graph, ops, trained)),
            given=tuple(t for t in writes if own is not None and graph.read_outside(own, t)),
            products=tuple(
                (n, op, a)
                for n, op in of
                if op.kind in PRODUCTS
                for a in op.reads
                if a.tensor in trained and _is_followed(graph, a.tensor, own)
            ),
            others=tuple(x for x in operands.values() if x[1].kind not in PRODUCTS),
            parameters=tuple(_parameters_of(graph, of, trained)),
        )


def _parameters_of(
    graph: Graph, of: Sequence[tuple[Node, Op]], trained: Collection[str]
) -> Iterator[tuple[Node, Access, bool]]:
    """Yields the reads of a call's parameters, as in ``_BackwardCall``."""
    seen: set[str] = set()
    for n, op in of:
        for a in op.reads if n.kind != "parameter" else ():
            if a.tensor not in trained or a.tensor in seen:
                continue
            seen.add(a.tensor)
            maker = graph.producer[a.tensor]
            if maker.kind == "parameter":
                yield n, a, _last_readers(graph)[maker.name] is n
            elif maker is n and n.kind == "copy" and maker.write_of(a.tensor)[0].kind == "copy":
                yield n, a, True


@once
def _last_readers(graph: Graph) -> dict[str, Node]:
    """Returns, by node, the last node that reads anything of it."""
    return {
        graph.producer[a.tensor].name: n
        for n in graph.nodes
        for _, a in n.reads
        if a.tensor in graph.producer
    }


def _reordered(call: _BackwardCall) -> Iterator[_BackwardCall]:
    """Yields the copy of a parameter's gradient in the order of its dims, if views changed this order."""
    stored = call.node.ops[0].writes[0].tensor
    orders = [order_in_memory(call.node, a.tensor) for op in call.node.ops for a in op.writes]
    if stored in call.reads and any(list(order) != sorted(order) for order in orders):
        yield replace(
            call, reads=(), writes=(), given=(), keeps=(), ends=True, on_the_way=((stored, 1.0),), others=()
        )


def _is_followed(graph: Graph, t: str, own: Node | None) -> bool:
    """Whether the gradient of what a call reads is one of activations, or of a parameter inside of its node.

    own: the parameter's node, if the call is of it alone.
    """
    maker = graph.producer[t]
    return maker.kind != "parameter" if own is None else maker is own


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
    later = dict.fromkeys((c.node.name for c in calls), 0.0)  # gradients of parameters that are not made yet

    def of_parameters(call: _BackwardCall) -> float:
        """Those of a call, as far as they count from the backward of its node on."""
        total = 0.0
        for n, a, is_last in call.parameters:
            made = float(local_bytes(n, graph.tensors[a.tensor], a, configs[n.name][None, :], mesh)[0])
            total += made if is_last else max(made - _local(graph, a.tensor, mesh, configs), 0.0)
        return total

    for call in calls:
        later[call.node.name] += of_parameters(call)
    for call, nbytes in zip(calls, gradients_by_call(graph, mesh, configs), strict=True):
        name = call.node.name
        before = freed.get(name, 0.0)
        sums = sum(_summed(graph, *product, mesh, configs) for product in call.products)
        sums += sum(
            max(
                float(local_bytes(n, graph.tensors[a.tensor], a, configs[n.name][None, :], mesh)[0])
                - _local(graph, a.tensor, mesh, configs),
                0.0,
            )
            for n, _, a in call.others
            if call.writes  # a gradient has the size of what is read, until it moves back
        )
        later[name] -= of_parameters(call)
        out[name] = max(out.get(name, 0.0), float(nbytes) + sums - before - later[name])
        freed[name] = before + sum(_local(graph, t, mesh, configs) for t in call.keeps)
    return out


def _summed(graph: Graph, n: Node, op: Op, a: Access, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> float:
    """Returns the bytes of the sum over devices of a product's gradient, and of the copy that is sent if the operand is
    not in the order of its dims in memory."""
    states = read_rule(n, op, a).states(configs[n.name][None, :], mesh)
    if not (states == PARTIAL).any():
        return 0.0
    maker = graph.producer[a.tensor]
    into = gradient_states(
        write_rule(maker, *maker.write_of(a.tensor)).states(configs[maker.name][None, :], mesh)
    )
    if maker is not n and not ((states == PARTIAL) & (into != PARTIAL)).any():
        return 0.0
    order = order_in_memory(maker, a.tensor)
    arrays = 1 + (list(order) != sorted(order))
    return arrays * float(local_bytes(n, graph.tensors[a.tensor], a, configs[n.name][None, :], mesh)[0])


def gradients_after(graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns, per node, the bytes of gradients of activations that live when the backward of its calls has ended.

    configs: node name -> int8 [axes].
    """
    calls, arrays = _arrays(graph)
    live = _over_calls(
        graph, calls, [replace(a, last=a.last - 1) for a in arrays if a.last > a.first], mesh, configs
    )
    return {call.node.name: float(nbytes) for call, nbytes in zip(calls, live, strict=True)}


def gradients_by_call(graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the bytes of gradients of activations during each call's backward, in the order of backward.

    configs: node name -> int8 [axes].
    """
    return _over_calls(graph, *_arrays(graph), mesh, configs)


def made_of_parameters(
    graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray], of: frozenset[str], late: bool
) -> dict[str, float]:
    """Returns, per node, the most bytes of gradients during the backward of what calls make of parameters alone,
    besides one gradient of each parameter and less what the calls keep and have freed by then.

    configs: node name -> int8 [axes].
    of: the nodes of the parameters.
    late: whether all of this runs when backward has ended, because the gradients of what is made are sent first.
    """
    calls, arrays = _arrays_of_parameters(graph, of, late)

    def nbytes(*tensors: str) -> float:
        return sum(_local(graph, t, mesh, configs) for t in tensors)

    waits = dict.fromkeys((c.node.name for c in calls), 0.0)
    for c in calls:
        waits[c.node.name] += nbytes(*c.given)
    counted = {c.node.name: nbytes(c.node.ops[0].writes[0].tensor) for c in calls}
    out, freed = dict.fromkeys(counted, 0.0), dict.fromkeys(counted, 0.0)
    begun = dict.fromkeys(counted, late)
    for call, live in zip(calls, _over_calls(graph, calls, arrays, mesh, configs), strict=True):
        name = call.node.name
        begun[name] = True
        waits[name] = 0.0
        others = sum(n for at, n in waits.items() if begun[at]) - sum(
            n for at, n in counted.items() if begun[at]
        )
        out[name] = max(out[name], float(live) + others - (sum(freed.values()) if late else freed[name]))
        freed[name] += nbytes(*call.keeps)
    return out


def _over_calls(
    graph: Graph,
    calls: Sequence[_BackwardCall],
    arrays: Sequence[_GradientArray],
    mesh: Mesh,
    configs: Mapping[str, np.ndarray],
) -> np.ndarray:
    """Returns the bytes of these arrays during each of the calls."""
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
