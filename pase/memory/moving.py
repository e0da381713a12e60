"""What a program that runs call by call (PyTorch's) holds while tensors move to the layout in which a node reads them.

A moved tensor takes an array of its own. Collectives take and give parts of the first dim in memory: where another dim
is cut or joined, there is one more array on the way. Gradients go the same way back.

Parameters that are gathered travel in messages, which are asked for one message ahead. When one arrives it is cut into
parameters, each an array of its own, and those that are split along another dim than the first are joined. They wait
for their readers then. What readers keep is counted from then on where it is kept (``pase.memory.backward``). If
backward gathers parameters again, the same messages come in the opposite order, without what it does not need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pase.ir import Graph, Node, Op
from pase.ir.blocks import hoisted_of
from pase.machine import FIRST_BUCKET_BYTES, Mesh
from pase.memory.account import gathered, is_gathered_again, is_kept_as_read, is_made_by_call, kept_as_read
from pase.memory.residuals import differentiated, kept, kept_through
from pase.once import once
from pase.tables.axis_layout import REPLICATED, tensor_dim
from pase.tables.layouts import local_bytes, written_and_read
from pase.tables.work import parameter_reads

__all__ = ["arriving", "arriving_again", "moved_back", "moved_there"]


@dataclass(frozen=True, kw_only=True)
class _ArrivingParameter:
    """A parameter that a message gathers.

    at: the moment at which it is read. nbytes: its bytes as it is read. kept: whether its reader keeps it.
    again: whether backward gathers it again. joined: whether its parts are joined along another dim than the first.
    """

    at: int
    nbytes: float
    kept: bool
    again: bool
    joined: bool


def arriving(graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray], bucket_bytes: float) -> np.ndarray:
    """Returns the bytes of gathered parameters on their way during each node's forward, float64 [nodes + 1].

    configs: node name -> int8 [axes].
    """
    out = np.zeros(len(graph.nodes) + 1)
    asked = 0
    for message in _messages(graph, mesh, configs, bucket_bytes):
        at = message[0].at
        wire = sum(x.nbytes for x in message)
        out[asked:at] += wire
        there = sum(x.nbytes for x in message if not (x.kept and x.at == at))
        for x in message:
            out[at + 1 : x.at + (not x.kept)] += x.nbytes
        out[at] += wire + there + _joined(message)
        asked = at
    for at, nbytes in _again_alone(graph, mesh, configs):
        out[at] += nbytes
    return out


def arriving_again(
    graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray], bucket_bytes: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of parameters that are gathered again, float64 [nodes + 1] each: during each node's backward,
    and when its message has just arrived, before its backward runs (0 without one)."""
    during, before = np.zeros(len(graph.nodes) + 1), np.zeros(len(graph.nodes) + 1)
    if not graph.facts.frees_gathered:
        return during, before
    every = _messages(graph, mesh, configs, bucket_bytes)
    messages = list(filter(None, ([x for x in m if x.again] for m in reversed(every))))
    wires = [sum(x.nbytes for x in m) for m in messages]
    for i, message in enumerate(messages):
        at = message[-1].at
        before[at] = 2 * wires[i] + _joined(message)
        for x in message:
            during[x.at : at + 1] += x.nbytes
        if i + 1 < len(messages):  # it is asked for when this one has arrived
            during[messages[i + 1][-1].at + 1 : at + 1] += wires[i + 1]
    for at, nbytes in _again_alone(graph, mesh, configs):
        during[at] += nbytes
    return during, before


def _joined(message: Sequence[_ArrivingParameter]) -> float:
    """Returns the bytes of one more array while parts of a message are joined."""
    return max((x.nbytes for x in message if x.joined), default=0.0)


def _messages(
    graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray], bucket_bytes: float
) -> list[list[_ArrivingParameter]]:
    """Returns what each message gathers, in the order of its readers. The messages are in the order of their first."""
    messages: list[list[_ArrivingParameter]] = []
    open_: dict[object, list[_ArrivingParameter]] = {}
    for key, parameter in sorted(_arriving(graph, mesh, configs), key=lambda found: found[1].at):
        mine = open_.setdefault(key, [])
        mine.append(parameter)
        full = bucket_bytes if messages else min(FIRST_BUCKET_BYTES, bucket_bytes)
        if sum(x.nbytes for x in mine) >= full:
            messages.append(open_.pop(key))
    return sorted([*messages, *open_.values()], key=lambda m: m[0].at)


def _again_alone(graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> Iterator[tuple[int, float]]:
    """Yields what is gathered again in no message: (the moment at which it is read, its bytes)."""
    for at, n in enumerate(graph.nodes if graph.facts.frees_gathered else ()):
        seen: set[str] = set()
        for op, a in n.reads:
            if not is_gathered_again(graph, op, a.tensor) or a.tensor in seen:
                continue
            seen.add(a.tensor)
            source, ops = graph.producer[a.tensor], [op for op, b in n.reads if b.tensor == a.tensor]
            written, to = written_and_read(graph, n, op, a, configs, mesh)
            if ((written != to) & (written != REPLICATED)).any() and not _is_joined_in_messages(
                graph, ops, source, a.tensor
            ):
                yield at, float(local_bytes(n, graph.tensors[a.tensor], a, configs[n.name][None, :], mesh)[0])


def _arriving(
    graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]
) -> Iterator[tuple[object, _ArrivingParameter]]:
    """Yields the parameters that messages gather, with a key that is equal for those that one message may carry."""
    for at, n in enumerate(graph.nodes):
        for ops, a, _ in parameter_reads(graph, n):
            source, tensor = graph.producer[a.tensor], graph.tensors[a.tensor]
            way = gathered(graph, n, ops[0], a, source)
            written, to = written_and_read(graph, n, ops[0], a, configs, mesh)
            moved = written != to
            if not _is_joined_in_messages(graph, ops, source, a.tensor) or not moved.any():
                continue
            if way.trained and (to[moved] == REPLICATED).all():
                nbytes = float(local_bytes(n, tensor, a, configs[n.name][None, :], mesh)[0])
                yield (
                    (tuple(np.flatnonzero(moved)), tensor.itemsize),
                    _ArrivingParameter(
                        at=at,
                        nbytes=nbytes,
                        kept=kept_as_read(graph, n, ops, a.tensor),
                        again=any(is_gathered_again(graph, op, a.tensor) for op in ops),
                        joined=bool(tensor_dim(written[moved]).any()),
                    ),
                )


def _is_joined_in_messages(graph: Graph, ops: list[Op], source: Node, read: str) -> bool:
    """Whether a gather of a parameter may travel with others."""
    plain = source.kind == "parameter" and not is_made_by_call(source, read)
    return plain and hoisted_of(graph) == "none" and not any(op.scope for op in ops)


@dataclass(frozen=True, kw_only=True)
class _MovedRead:
    """A read of an activation in another layout than it is written in.

    written, read: its bytes in these layouts. wire: the bytes of one more array on the way.
    kept: whether the reader keeps it as it reads it. stays: whether it is kept as it is written.
    """

    written: float
    read: float
    wire: float
    kept: bool
    stays: bool


@once
def _kept_by_readers(graph: Graph) -> frozenset[tuple[str, str]]:
    """Returns the reads of activations that backward needs: (reader, tensor)."""
    return frozenset(way[0] for ways in kept_through(graph).values() for way in ways if way)


def _moved(
    graph: Graph, n: Node, mesh: Mesh, configs: Mapping[str, np.ndarray], trained: bool
) -> Iterator[_MovedRead]:
    """Yields a node's reads that move activations. trained: whether only those count that have a gradient."""
    seen: set[str] = set()
    for op, a in n.reads:
        source, tensor = graph.producer.get(a.tensor), graph.tensors[a.tensor]
        if source is None or source.kind in ("parameter", "constant", "copy") or a.tensor in seen:
            continue
        if trained and (a.tensor not in differentiated(graph) or not op.differentiable):
            continue
        seen.add(a.tensor)
        written, to = written_and_read(graph, n, op, a, configs, mesh)
        moved = written != to
        if not moved.any() or (written[moved] == REPLICATED).all():  # a part of it is a view
            continue
        before = local_bytes(
            source, tensor, source.write_of(a.tensor)[1], configs[source.name][None, :], mesh
        )
        after = local_bytes(n, tensor, a, configs[n.name][None, :], mesh)
        inner = [*tensor_dim(written[moved & (written >= 0)]), *tensor_dim(to[moved & (to >= 0)])]
        yield _MovedRead(
            written=float(before[0]),
            read=float(after[0]),
            wire=max(float(before[0]), float(after[0])) * any(inner),
            kept=(n.name, a.tensor) in _kept_by_readers(graph),
            stays=a.tensor in kept(graph) and not is_kept_as_read(graph, a.tensor),
        )


def moved_there(graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the most bytes that live while activations move to each node, besides what is kept, float64 [nodes + 1].

    configs: node name -> int8 [axes].
    """
    out = np.zeros(len(graph.nodes) + 1)
    for at, n in enumerate(graph.nodes):
        there = 0.0
        for m in _moved(graph, n, mesh, configs, trained=False):
            own = m.read * (not m.kept)
            out[at] = max(out[at], there + own + m.wire + m.written * (not m.stays))
            there += own
    return out


def moved_back(graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the most bytes that live while a gradient moves from a node back, besides the gradient in the layout in
    which the activation is written and less what the node kept of it, float64 [nodes + 1].

    configs: node name -> int8 [axes].
    """
    out = np.zeros(len(graph.nodes) + 1)
    for at, n in enumerate(graph.nodes):
        for m in _moved(graph, n, mesh, configs, trained=True):
            out[at] = max(out[at], m.read + m.wire - m.read * m.kept)
    return out
