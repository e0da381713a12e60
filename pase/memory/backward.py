"""Peak memory over the backward pass of a step, for compilers that do not fuse light ops into products.

``pase.memory.account`` says what each node keeps. Here each part has a time. A step has these moments: the end of
forward, and then the backward of each node, from the last node to the first.

- Parameters, optimizer state and inputs live throughout.
- What backward needs lives until the backward of the node that made it, and what a loop stacks until the loop's.
- A gradient lives from the backward of its parameter's last reader to the end of the step. If micro-batches are summed,
  their sum lives throughout. On several devices, XLA makes the zeros into which a loop's backward writes gradients at
  the end of forward, because it schedules first what waits for nothing.
- At each moment, one node's operands and results (or their gradients) are in flight. In a program that runs call by
  call, it is the gradients that live then if they are more (``pase.memory.gradients``), and gradients of parameters
  that wait to be sent (``pase.memory.sending``). What such a program makes of a parameter alone has its backward at
  the end, after its gradient has been sent, and keeps what that needs until then. Then the optimizer updates one
  parameter after the other.

A product keeps an operand for backward in the layout in which it reads it. What XLA holds for collectives besides
(``_HeldForLayouts.of_compiled``) does not apply to a program that runs call by call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pase.ir import Access, Graph, Node, Op, Scope
from pase.ir.blocks import hoisted_of, micro_batches_of
from pase.ir.recompute import needs
from pase.ir.types import PRODUCTS
from pase.machine import BUCKET_BYTES, Mesh
from pase.memory.account import (
    Gathered,
    KeptPart,
    Memory,
    MemoryKind,
    flights,
    gathered,
    held_by_term,
    in_flight,
    is_gathered_again,
    is_kept_as_read,
    is_read_whole,
    kept_as_read,
    node_terms,
    prefetched_bytes,
    stored_parameter,
)
from pase.memory.gradients import gradient_bytes, gradients_after, made_of_parameters
from pase.memory.moving import arriving, arriving_again, moved_back, moved_there
from pase.memory.residuals import kept, kept_through
from pase.memory.sending import gradients_in_transit
from pase.once import once
from pase.tables.axis_layout import PARTIAL, REPLICATED
from pase.tables.layouts import (
    concrete_size,
    dim_index,
    local_bytes,
    read_rule,
    shards,
    written_and_read,
)
from pase.tables.work import parameter_reads

if TYPE_CHECKING:
    from pase.search import MemoryProfile

__all__ = ["parts", "peak", "profile"]

_MOMENTS = 16
"""The most moments at which the search's limit looks. The plan's account looks at all."""

_UPDATE_ARRAYS = {"sgd": 0, "momentum": 0, "adam": 2, "adamw": 2, "adam_master": 2, "lion": 1, "adafactor": 2}
"""Optimizer -> how many arrays of a parameter's size its update makes on the way (``torch.optim``, one parameter after
the other). Adam: the root of the second moment, and that over the correction of its bias."""

_UPDATE_KEEPS_ONE = ("adam", "adamw")
"""The optimizers of ``torch.optim`` that free the last such array only when the next parameter has its own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Course:
    """When each node's parts are alive. Moment i is the backward of node i, and the last moment is the end of forward,
    so that time runs from the last moment to 0.

    alive: per node, the first and last moment (in time: the last and the first) of each of its terms.
    order: the moment of each node's backward.
    """

    alive: Mapping[str, tuple[tuple[int, int], ...]]
    order: Mapping[str, int]

    @property
    def moments(self) -> int:
        return len(self.order) + 1


@dataclass(frozen=True, kw_only=True, eq=False)
class _ParameterRead:
    """A node's read of a parameter.

    first, last: the moments of its backward; those of the whole loop if it runs in one.
    """

    node: Node
    op: Op
    access: Access
    first: int
    last: int
    looped: bool


@once
def _around(graph: Graph) -> dict[tuple[Scope, ...], tuple[int, int]]:
    """Returns, per scope with all scopes around it, the first and last index of its nodes."""
    found: dict[tuple[Scope, ...], tuple[int, int]] = {}
    for i, n in enumerate(graph.nodes):
        for op in n.ops:
            for k in range(1, len(op.scope) + 1):
                low, high = found.get(op.scope[:k], (i, i))
                found[op.scope[:k]] = min(low, i), max(high, i)
    return found


def _loop_of(scope: Sequence[Scope]) -> tuple[Scope, ...] | None:
    """Returns the outermost loop of a scope, with all scopes around it."""
    return next((tuple(scope[: k + 1]) for k, s in enumerate(scope) if s.kind == "loop"), None)


@once
def _reads(graph: Graph) -> dict[str, list[_ParameterRead]]:
    """Returns the reads of each parameter, also those through a copy."""
    around, order = _around(graph), {n.name: i for i, n in enumerate(graph.nodes)}
    found: dict[str, list[_ParameterRead]] = {}
    for n in graph.nodes:
        for op, a in n.reads if n.kind != "copy" else ():
            source = stored_parameter(graph, graph.producer.get(a.tensor))
            if source is not None:
                loop = _loop_of(op.scope)
                low, high = around[loop] if loop else (order[n.name],) * 2
                found.setdefault(source.name, []).append(
                    _ParameterRead(node=n, op=op, access=a, first=low, last=high, looped=loop is not None)
                )
    return found


@once
def _course(graph: Graph, optimizer: str, several: bool) -> _Course:
    """several: whether the step runs on several devices."""
    order = {n.name: i for i, n in enumerate(graph.nodes)}
    around, reads, end = _around(graph), _reads(graph), len(order)
    summed = micro_batches_of(graph) > 1

    def made(r: _ParameterRead) -> int:
        """When the parameter's gradient is made of that of this read (``pase.memory.gradients``)."""
        by = graph.producer[r.access.tensor]
        return order[by.name] if graph.facts.eager and by.kind == "copy" else r.last

    def when(n: Node) -> int:
        loop = _loop_of(n.main.scope)
        return around[loop][0] if loop else order[n.name]

    read_from: dict[str, int] = {}  # also by copies
    for e in graph.edges:
        read_from[e.src] = min(read_from.get(e.src, end), when(graph.node[e.dst]))

    def alive(n: Node) -> Iterator[tuple[int, int]]:
        mine, i = node_terms(graph, optimizer)[n.name], order[n.name]
        of = reads.get(n.name, [])
        for term, region in zip(mine.terms, mine.regions, strict=True):
            if term.kind == "gradients" and not summed:
                early = several and any(r.looped for r in of)
                yield 0, end if early else max((made(r) for r in of), default=i)
            elif term.kind != "activations" or n.kind == "input":
                yield 0, end
            else:
                first = when(n)
                if n.kind == "parameter" and graph.facts.eager:
                    first = 0 if several else i
                elif n.kind == "parameter":  # what is subtracted here is counted where it is read
                    first = min(read_from.get(n.name, i), *(r.first for r in of), end)
                yield first, end if region is None else max(around[region][1], first)

    return _Course(alive={n.name: tuple(alive(n)) for n in graph.nodes}, order=order)


def _lives(
    graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray], optimizer: str
) -> Iterator[tuple[KeptPart, int, int]]:
    """Yields what the nodes keep under a strategy: (part, the last moment at which it is alive, the first)."""
    course = _course(graph, optimizer, mesh.devices > 1)
    for name, mine, held in held_by_term(graph, mesh, configs, optimizer):
        for term, region, at, nbytes in zip(mine.terms, mine.regions, course.alive[name], held, strict=True):
            if not term.as_read:
                yield KeptPart(node=name, kind=term.kind, nbytes=nbytes, region=region), *at
    strategy = _HeldForLayouts(graph=graph, mesh=mesh, configs=configs, order=course.order)
    activations = strategy.as_read() if graph.facts.eager else strategy.operands()
    for name, first, nbytes in (*strategy.weights(), *activations):
        yield KeptPart(node=name, kind="activations", nbytes=nbytes, region=None), first, course.moments - 1


def parts(
    graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray], optimizer: str = "adam"
) -> Iterator[KeptPart]:
    """Yields what the nodes keep under a strategy. configs: node name -> int8 [axes]."""
    return (part for part, _, _ in _lives(graph, mesh, configs, optimizer))


def peak(
    graph: Graph,
    mesh: Mesh,
    configs: Mapping[str, np.ndarray],
    optimizer: str = "adam",
    prefetch: bool = False,
    workspace: int = 0,
    bucket_bytes: float = BUCKET_BYTES,
) -> Memory:
    """Returns the predicted bytes on one device at the step's worst moment.

    configs: node name -> int8 [axes].
    prefetch: whether loops gather parameters one iteration early.
    workspace: the bytes that the library of products takes for itself.
    bucket_bytes: the size of the messages in which a program that runs call by call sends gradients of parameters.
    """
    held, buffers = _over_time(graph, mesh, configs, optimizer, bucket_bytes)
    buffers = buffers + workspace + (prefetched_bytes(graph, configs, mesh) if prefetch else 0.0)
    worst = int(np.argmax(sum(held.values(), buffers)))
    whole: dict[str, int] = dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), 0)
    there = {kind: round(float(v[worst])) for kind, v in held.items()}
    found = Memory(**whole | there, buffers=round(float(buffers[worst])))
    if not graph.facts.eager:
        return found
    forward = _forward(graph, mesh, configs, held, bucket_bytes)
    forward = replace(forward, buffers=forward.buffers + workspace)
    update = _update(graph, mesh, configs, optimizer, {k: float(v[0]) for k, v in held.items()})
    stays = gradients_in_transit(graph, mesh, configs, bucket_bytes).stays
    update = replace(update, buffers=round(update.buffers + stays + workspace))
    return max(found, forward, update, key=lambda m: m.total)


def _forward(
    graph: Graph,
    mesh: Mesh,
    configs: Mapping[str, np.ndarray],
    held: Mapping[MemoryKind, np.ndarray],
    bucket_bytes: float,
) -> Memory:
    """Returns the bytes on one device at the worst moment of forward. held: at each moment, by kind."""
    buffers = np.zeros(len(graph.nodes) + 1)
    if mesh.devices > 1:
        buffers = moved_there(graph, mesh, configs)
        buffers += arriving(graph, mesh, configs, bucket_bytes)
    there = {k: v if k == "activations" else np.full(len(v), v[-1]) for k, v in held.items()}
    worst = int(np.argmax(sum(there.values(), buffers)))
    whole: dict[str, int] = dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), 0)
    kinds = {k: round(float(v[worst])) for k, v in there.items()}
    return Memory(**whole | kinds, buffers=round(float(buffers[worst])))


def _update(
    graph: Graph,
    mesh: Mesh,
    configs: Mapping[str, np.ndarray],
    optimizer: str,
    held: Mapping[MemoryKind, float],
) -> Memory:
    """Returns the bytes on one device during the optimizer's update, parameter by parameter.

    held: what is held at the end of backward.
    """
    inputs, most, before = 0.0, 0.0, 0.0
    for part, _, _ in _lives(graph, mesh, configs, optimizer):
        kind = graph.node[part.node].kind
        inputs += part.nbytes if part.kind == "activations" and kind == "input" else 0.0
        if part.kind == "gradients":
            most = max(most, _UPDATE_ARRAYS[optimizer] * part.nbytes + before)
            before = part.nbytes * (optimizer in _UPDATE_KEEPS_ONE)
    kinds = {k: round(v) for k, v in held.items() if k != "activations"}
    whole: dict[str, int] = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    return Memory(**whole | kinds, activations=round(inputs), buffers=round(most))


def _over_time(
    graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray], optimizer: str, bucket_bytes: float
) -> tuple[dict[MemoryKind, np.ndarray], np.ndarray]:
    """Returns the bytes at each moment: (kept, by kind; in flight)."""
    course = _course(graph, optimizer, mesh.devices > 1)
    change: dict[MemoryKind, np.ndarray] = {}
    for part, first, last in _lives(graph, mesh, configs, optimizer):
        of = change.setdefault(part.kind, np.zeros(course.moments + 1))
        of[first] += part.nbytes
        of[last + 1] -= part.nbytes
    buffers = np.zeros(course.moments)
    for name, nbytes in in_flight(graph, configs, mesh, gradients=not graph.facts.eager).items():
        buffers[course.order[name]] = nbytes
    if graph.facts.eager:
        for name, nbytes in gradient_bytes(graph, mesh, configs).items():
            buffers[course.order[name]] = max(buffers[course.order[name]], nbytes)
        on_the_way = gradients_in_transit(graph, mesh, configs, bucket_bytes)
        buffers += on_the_way.waits
        after, back = gradients_after(graph, mesh, configs), moved_back(graph, mesh, configs)
        for name, at in course.order.items():
            sends = max(on_the_way.sends[at], on_the_way.waits[at] + back[at])
            buffers[at] = max(buffers[at], after.get(name, 0.0) + sends)
        at_end = made_of_parameters(graph, mesh, configs, on_the_way.of, late=True)
        buffers[0] = max(buffers[0], *at_end.values(), 0.0)
        others = frozenset(n.name for n in graph.nodes if n.kind == "parameter") - on_the_way.of
        for name, nbytes in made_of_parameters(graph, mesh, configs, others, late=False).items():
            buffers[course.order[name]] = max(buffers[course.order[name]], nbytes)
        again, arrived = arriving_again(graph, mesh, configs, bucket_bytes)
        buffers += again
        living = 0.0  # gradients, before the node's backward
        for name in reversed(list(course.order)):
            at = course.order[name]
            if arrived[at]:
                buffers[at] = max(buffers[at], living + on_the_way.waits[at] + arrived[at])
            living = after.get(name, living)
    if mesh.devices > 1 and not graph.facts.eager:
        buffers += _HeldForLayouts(graph=graph, mesh=mesh, configs=configs, order=course.order).of_compiled()
    return {kind: np.cumsum(v)[:-1] for kind, v in change.items()}, buffers


_ArrayHeld = tuple[str, int, float]
"""An array that is kept: (node, the last moment of backward that needs it, bytes)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _HeldForLayouts:
    """What a step holds because nodes read tensors in another layout than they are made or stored in."""

    graph: Graph
    mesh: Mesh
    configs: Mapping[str, np.ndarray]
    order: Mapping[str, int]

    def weights(self) -> Iterator[tuple[str, int, float]]:
        """Yields the parameters that backward reads gathered or cast: (reader, the last moment of that, bytes)."""
        stays = self.graph.facts.eager or hoisted_of(self.graph) != "none"
        for n in self.graph.nodes:
            for ops, a, _ in parameter_reads(self.graph, n):
                again = any(is_gathered_again(self.graph, op, a.tensor) for op in ops)
                if not (again or kept_as_read(self.graph, n, ops, a.tensor)):
                    continue
                source = self.graph.producer[a.tensor]
                g = gathered(self.graph, n, ops[0], a, source)
                waits, moved = self._waits_for_sum(n, ops[0], a), self._moves(g, source, n)
                times = concrete_size(ops[0].times, n.name) / micro_batches_of(self.graph)
                # What it begins with is kept: the cast.
                if again and g.arrives(self._config(source), self._config(n), self.mesh):
                    _, made = source.write_of(a.tensor)
                    nbytes = self._local(source, made) * times if g.cast else 0.0
                    yield n.name, self._last(n, ops[0]), nbytes
                    continue
                if moved or (g.cast and (stays or any(is_read_whole(n, op) for op in ops))):
                    last = 0 if waits and not moved else self._last(n, ops[0])
                    yield n.name, last, self._local(n, a) * times
                if moved and waits:
                    _, made = source.write_of(a.tensor)
                    yield n.name, 0, self._local(source, made) * times

    def _waits_for_sum(self, n: Node, op: Op, a: Access) -> bool:
        """Whether a compiled step keeps what it makes of a parameter (its tanh) until the sum of its gradient over
        devices has arrived, because the derivative needs it. Sums are joined and arrive at the end."""
        source = self.graph.producer[a.tensor]
        made = {w.tensor: by for by in source.ops for w in by.writes}
        t = a.tensor
        while made[t].kind == "view":
            t = made[t].reads[0].tensor
        if self.graph.facts.eager or t not in needs(made[t], self.graph.tensors):
            return False
        return bool((read_rule(n, op, a).states(self._config(n), self.mesh) == PARTIAL).any())

    def operands(self) -> Iterator[tuple[str, int, float]]:
        """Yields the operands of products that backward needs in another layout than they were made in, in the same
        form."""
        wanted = kept(self.graph)
        seen: set[tuple[str, str]] = set()
        for e in self.graph.edges:
            n, source, k = self.graph.node[e.dst], self.graph.node[e.src], wanted.get(e.tensor)
            if k is None or k.region is not None or (e.dst, e.tensor) in seen:
                continue
            if e.op.kind not in PRODUCTS or source.kind in ("parameter", "copy"):
                continue
            written, read_as = written_and_read(self.graph, n, e.op, e.access, self.configs, self.mesh)
            if (written != read_as).any():
                seen.add((e.dst, e.tensor))
                yield n.name, self._last(n, e.op), self._local(n, e.access) * k.times

    def as_read(self) -> Iterator[tuple[str, int, float]]:
        """Yields the activations that calls keep as other nodes read them, in the same form. An array that a read moves
        to another layout is one of its own, for all that read it so. So is a device's part of an array that is not
        split, unless the whole array is kept, or the parts are no less (``backends/torch/spmd/parts.py``)."""
        wanted = kept(self.graph)
        for root, ways in kept_through(self.graph).items():
            k, maker = wanted[root], self.graph.producer[root]
            if k.region is not None or maker.kind == "copy":
                continue
            arrays: dict[object, _ArrayHeld] = {}
            parts: dict[object, tuple[_ArrayHeld, dict[object, _ArrayHeld]]] = {}
            for way in ways:
                (key, found), part = self._array(root, way)
                into = arrays
                if part is not None:
                    into = parts.setdefault(key, (found, {}))[1]
                    key, found = part
                into[key] = min(into.get(key, found), found, key=lambda x: x[1])
            if not is_kept_as_read(self.graph, root):  # its maker's account has it
                arrays.pop(root, None)
                parts.pop(root, None)
            for key, (whole, taken) in parts.items():
                if key not in arrays and sum(x[2] for x in taken.values()) < whole[2]:
                    arrays |= taken
                    continue
                first = min(x[1] for x in (arrays.get(key, whole), *taken.values()))
                arrays[key] = whole[0], first, whole[2]
            yield from ((name, first, nbytes * k.times) for name, first, nbytes in arrays.values())

    def _array(
        self, root: str, way: Sequence[tuple[str, str]]
    ) -> tuple[tuple[object, _ArrayHeld], tuple[object, _ArrayHeld] | None]:
        """Returns which array a call reads that needs an activation this way, and which part of it if it reads a
        device's part of an array that is not split. Each is (what tells it from others, its form as in ``weights``)."""
        last = self.order[way[0][0]] if way else 0
        part = None
        for name, read in way:
            n = self.graph.node[name]
            op, a = next((op, a) for op, a in n.reads if a.tensor == read)
            written, to = written_and_read(self.graph, n, op, a, self.configs, self.mesh)
            moves = to != written
            array = (read, tuple(to)), (name, last, self._local(n, a))
            if (moves & (written != REPLICATED)).any() and not is_gathered_again(self.graph, op, read):
                return array, part
            if moves.any() and part is None:
                part = array
        maker = self.graph.producer[root]
        return (root, (maker.name, last, self._local(maker, maker.write_of(root)[1]))), part

    def _last(self, n: Node, op: Op) -> int:
        """Returns the last moment of an op's backward; that of its loop if it runs in one."""
        loop = _loop_of(op.scope)
        return _around(self.graph)[loop][0] if loop else self.order[n.name]

    def of_compiled(self) -> np.ndarray:
        """Returns the bytes at each moment that XLA's program holds besides one node's operands and results.

        Read in XLA's buffer assignments for H100s (``bench/audit/gpu.py``).
        """
        return self._stacks() + self._scattered() + self._cast()

    def _local(self, n: Node, a: Access) -> float:
        """Returns the bytes of a tensor on a device, as the node reads it."""
        return float(local_bytes(n, self.graph.tensors[a.tensor], a, self._config(n), self.mesh)[0])

    def _config(self, n: Node) -> np.ndarray:
        return self.configs[n.name][None, :]

    def _stacks(self) -> float:
        """Returns the copies of a loop's stacks of weights whose slices are gathered along a later dim.

        Collectives want the gathered dim to be the slowest in memory. XLA stores the whole stack that way for the loop.
        There is no such loop if there are two iterations: one is peeled off for the gathers of the next.
        """
        total = 0.0
        for name, reads in _reads(self.graph).items():
            n = self.graph.node[name]
            write = n.ops[0].writes[0]
            ways = [
                float(shards(self._config(n), dim_index(n, w.dims), self.mesh)[0]) for w in write.map.walks
            ]
            for r in reads:
                if not r.looped or self.graph.producer[r.access.tensor] is not n:
                    continue
                g = gathered(self.graph, r.node, r.op, r.access, n)
                stacked = len(write.map.walks) > len(r.access.map.walks)
                long = concrete_size(r.op.times, name) > 2 * micro_batches_of(self.graph)
                if long and any(w > 1 for w in ways[1 + stacked :]) and self._moves(g, n, r.node):
                    t = self.graph.tensors[write.tensor]
                    total += concrete_size(t.nbytes, t.name) / float(np.prod(ways))
                    break
        return total

    def _moves(self, g: Gathered, source: Node, reader: Node) -> bool:
        return g.resharded(self._config(source), self._config(reader), self.mesh)

    def _arrives(self, n: Node, op: Op, a: Access) -> bool:
        """Whether this read is of a parameter that gets to the node by collectives, also if a copy is in between."""
        source = self.graph.producer.get(a.tensor)
        if source is None or source.kind not in ("parameter", "copy"):
            return False
        if self._moves(gathered(self.graph, n, op, a, source), source, n):
            return stored_parameter(self.graph, source) is not None
        return source.kind == "copy" and self._arrives(source, source.ops[0], source.ops[0].reads[0])

    def _scattered(self) -> np.ndarray:
        """Returns the gradients that wait to be scattered: while one is computed, the message of two is under way."""
        waits = np.zeros(len(self.order) + 1)
        for name, flight in flights(self.graph).items():
            sources = iter(flight.sources)
            for term, g in flight.terms:
                source = self.graph.node[next(sources)] if g is not None else None
                if g is None or source is None or not g.trained:
                    continue
                if self._moves(g, source, self.graph.node[name]):
                    nbytes = float(term.held(self._config(self.graph.node[name]), self.mesh)[0])
                    waits[self.order[name]] = max(waits[self.order[name]], nbytes)
        out, before = np.zeros(len(waits)), [0.0, 0.0]
        for i in range(len(waits) - 1, -1, -1):
            out[i] = sum(before)
            if waits[i]:
                before = [before[1], waits[i]]
        return out

    def _cast(self) -> np.ndarray:
        """Returns the weights that are cast to their product's wider result for its backward.

        If they are gathered, this is done as soon as they arrive, while the two nodes after it are in backward.
        """
        out = np.zeros(len(self.order) + 1)
        for n in self.graph.nodes:
            for op, a in n.reads if n.kind == "matmul" else ():
                t, wide = self.graph.tensors[a.tensor], self.graph.tensors[op.writes[0].tensor].itemsize
                if op.kind == "matmul" and t.itemsize < wide and self._arrives(n, op, a):
                    out[self.order[n.name] : self.order[n.name] + 3] += self._local(n, a) * wide / t.itemsize
        return out


def profile(
    graph: Graph, mesh: Mesh, configs: Sequence[np.ndarray], limit_bytes: float, optimizer: str = "adam"
) -> MemoryProfile:
    """Returns the same account as a limit for the search. It is a lower bound: it looks at some moments, and leaves out
    what depends on the configs of two nodes.

    A node has one interval for each span of moments during which it holds something.

    configs: per node, its int8 [K, axes].
    """
    from pase.search import MemoryProfile

    several = mesh.devices > 1
    terms, course, flying = node_terms(graph, optimizer), _course(graph, optimizer, several), flights(graph)
    moments = _worst_moments(graph, optimizer, several)
    time = {m: t for t, m in enumerate(reversed(moments))}
    made: dict[tuple[int, tuple[int, ...], int], np.ndarray] = {}  # nodes of equal layers share an array
    flown: dict[tuple[int, int], np.ndarray] = {}
    intervals: list[tuple[int, int, int, np.ndarray]] = []
    for v, (n, cfg) in enumerate(zip(graph.nodes, configs, strict=True)):
        mine = terms[n.name]
        spans: dict[tuple[int, int], list[int]] = {}
        for i, (first, last) in enumerate(course.alive[n.name]):
            there = [time[m] for m in moments if first <= m <= last]
            if there:
                spans.setdefault((min(there), max(there) + 1), []).append(i)
        parts = []
        for span, which in spans.items():
            key = (mine.number, tuple(which), id(cfg))
            if key not in made:
                made[key] = sum((mine.terms[i].held(cfg, mesh) for i in which), np.zeros(len(cfg)))
            parts.append((span, made[key]))
        if course.order[n.name] in time:
            at, flight = time[course.order[n.name]], flying[n.name]
            if (flight.number, id(cfg)) not in flown:
                own = (t.held(cfg, mesh) for t, g in flight.terms if g is None)
                flown[flight.number, id(cfg)] = sum(own, np.zeros(len(cfg)))
            parts.append(((at, at + 1), flown[flight.number, id(cfg)]))
        for (first, last), held in parts or [((0, 0), np.zeros(len(cfg)))]:
            intervals.append((v, first, last, held))
    return MemoryProfile.of(intervals, limit_bytes)


@once
def _worst_moments(graph: Graph, optimizer: str, several: bool) -> tuple[int, ...]:
    """Returns the moments at which the search's limit looks, in order.

    They are those that hold the most if nothing is split, and some in between. Any choice gives a lower bound.
    """
    course = _course(graph, optimizer, several)
    total = np.zeros(course.moments + 1)
    for name, mine in node_terms(graph, optimizer).items():
        for term, (first, last) in zip(mine.terms, course.alive[name], strict=True):
            total[first] += term.nbytes * term.times / term.over
            total[last + 1] -= term.nbytes * term.times / term.over
    total = np.cumsum(total)[:-1]
    for name, flight in flights(graph).items():
        total[course.order[name]] += sum(t.nbytes for t, g in flight.terms if g is None)
    most = np.argsort(-total, kind="stable")[: _MOMENTS // 2]
    between = np.linspace(0, course.moments - 1, _MOMENTS // 2).round().astype(int)
    return tuple(sorted({*map(int, most), *map(int, between)}))
