"""Reads facts about the thunks of an optimized HLO module: order, data flow, and collectives' bytes and groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from pase.hlo.collectives import HloKind, kind_of, sent
from pase.hlo.groups import Groups
from pase.hlo.loops import trip_count
from pase.hlo.module import Computation, Instruction, Module, read
from pase.hlo.work import is_product, op_work
from pase.replay.types import CompiledOp, Shapes

__all__ = ["HloFacts", "read_hlo", "with_updates"]

_FREE = {
    "parameter",
    "constant",
    "get-tuple-element",
    "bitcast",
    "tuple",
    "after-all",
    "partition-id",
    "replica-id",
}
"""Opcodes that launch nothing; they only pass data on."""
_CALLS = ("while", "call", "conditional", "async-start")
_MOST_LAUNCHES = 200_000


@dataclass(frozen=True, kw_only=True)
class HloFacts:
    """Facts about the entry computation, by the op names that thunks have."""

    module: str
    order: tuple[str, ...]
    """The ops in scheduled order, including those that launch nothing."""
    reads: dict[str, tuple[str, ...]]
    """Op → launched ops whose results it reads, or whose completion it awaits."""
    kinds: dict[str, HloKind]
    """Collective → its kind. Names do not show it reliably, because JAX's names differ from XLA's."""
    nbytes: dict[str, int]
    """Collective → bytes of its larger local buffer."""
    groups: dict[str, Groups]
    """Collective → replica groups; empty for one group of all devices."""
    asynchronous: frozenset[str]
    """Collectives with a separate done op, which run on a separate stream."""
    ops: dict[str, CompiledOp]
    """Op → facts about it, for the entry computation and the bodies of its loops and branches."""
    takes: frozenset[tuple[int, ...]] = frozenset()
    """Dims of the arrays that the program is given; scalars are left out."""
    gives: frozenset[tuple[int, ...]] = frozenset()
    """Dims of the arrays that it returns."""
    launched: tuple[str, ...] = ()
    """The ops that launch something, in the order in which one execution runs them, loops unrolled."""


def read_hlo(data: bytes, where: str) -> HloFacts:
    """Reads facts from a serialized HloProto. Raises PaseError if it is not one or has no entry computation."""
    module = read(data, where)
    entry = module.entry
    reads, started = _dataflow(module, entry)
    found = [c for i in entry.instructions.values() if (c := _collective(module, entry, i)) is not None]
    ops = {i.name: _compiled(module, c, i) for c, i in _run(module, entry) if i.opcode not in _FREE}
    if any(op.part == "backward" for op in ops.values()):
        ops = _updating(ops)
    return HloFacts(
        module=module.name,
        order=tuple(_named(module, entry, i) for i in entry.instructions.values()),
        reads=reads,
        kinds={i.name: k for _, i in found if (k := kind_of(i)) is not None},
        nbytes={i.name: sum(s.nbytes for s in sent(c, i)) for c, i in found},
        groups={i.name: i.groups for _, i in found},
        asynchronous=frozenset(started & {i.name for _, i in found}),
        ops=ops,
        takes=_dims(*(i for i in entry.instructions.values() if i.opcode == "parameter")),
        gives=_dims(entry.root),
        launched=tuple(islice(_launched(module, entry), _MOST_LAUNCHES)),
    )


def _dims(*values: Instruction) -> frozenset[tuple[int, ...]]:
    return frozenset(s.dims for i in values for s in i.shape.arrays() if s.dims)


def _updating(ops: dict[str, CompiledOp]) -> dict[str, CompiledOp]:
    """What a training step computes outside of its derivative updates the parameters."""
    return {
        n: replace(op, work="optimizer") if (op.part, op.work) == ("update", "elementwise") else op
        for n, op in ops.items()
    }


def with_updates(programs: Mapping[str, HloFacts]) -> dict[str, HloFacts]:
    """Returns the facts of a run's programs, with the optimizer's work where that is in a program of its own.

    Such a program has no part of a derivative, and returns arrays with the dims of what it is given (parameters, sums
    of gradients), some of which another program returns that computes gradients.
    """
    backward = [p for p in programs.values() if any(op.part == "backward" for op in p.ops.values())]
    gradients = frozenset(dims for p in backward for dims in p.gives)
    return {
        n: replace(p, ops=_updating(p.ops))
        if p.gives & gradients and p.gives <= p.takes and all(op.part == "update" for op in p.ops.values())
        else p
        for n, p in programs.items()
    }


def _launched(module: Module, computation: Computation) -> Iterator[str]:
    """Yields the ops of one execution in order. A loop of unknown length is unrolled once."""
    for i in computation.instructions.values():
        if i.opcode == "while":
            body = module.called(i)[0]
            for _ in range(trip_count(module, computation, i) or 1):
                yield from _launched(module, body)
        elif i.opcode in _CALLS:
            for body in module.called(i):
                yield from _launched(module, body)
        elif i.opcode not in _FREE and not i.opcode.endswith("-done"):
            yield i.name


def _run(module: Module, computation: Computation) -> Iterator[tuple[Computation, Instruction]]:
    """Yields the instructions that are launched separately: of a computation, its loops and its branches."""
    for i in computation.instructions.values():
        yield computation, i
        if i.opcode in _CALLS:
            for body in module.called(i):
                yield from _run(module, body)


def _compiled(module: Module, computation: Computation, i: Instruction) -> CompiledOp:
    def extents(place: Computation, of: Instruction) -> Shapes:
        return tuple(s.dims for o in place.operands(of) for s in o.shape.arrays())

    inside = [(computation, i)]
    if i.opcode == "fusion":
        inside = [(c, x) for c in module.called(i) for x in c.instructions.values()]
    products = [(c, x) for c, x in inside if is_product(x)]
    product: Shapes = ()
    if len(products) == 1:
        place, dot = products[0]
        factors = extents(place, dot)[:2]
        product = (*factors, next(s.dims for s in dot.shape.arrays())) if len(factors) == 2 else ()
    names = [n for n in (i.op_name, *(x.op_name for _, x in inside)) if n]
    part: Literal["forward", "backward", "update"] = "update"
    if any("transpose(" in n for n in names[:1]) or (product and any("transpose(" in n for n in names)):
        part = "backward"
    elif any("jvp(" in n for n in names):
        part = "forward"
    made = next(iter(i.shape.arrays()), None)
    width = max(made.nbytes // max(math.prod(made.dims), 1), 1) if made is not None else 1
    does = op_work(module, computation, i)
    return CompiledOp(
        part=part,
        operands=extents(computation, i),
        product=product,
        itemsize=width,
        work=does.work,
        flops=does.flops,
        nbytes=does.nbytes,
        dtype=does.dtype,
        op_name=does.name,
        source=does.source,
    )


def _dataflow(module: Module, entry: Computation) -> tuple[dict[str, tuple[str, ...]], set[str]]:
    """Returns op → launched ops that it reads or awaits, and the ops that have a done op."""
    reads: dict[str, tuple[str, ...]] = {}
    sources: dict[int, tuple[str, ...]] = {}
    started: set[str] = set()
    waiting: list[str] = []
    for i in entry.instructions.values():
        found = tuple(dict.fromkeys(s for o in (*i.operands, *i.waits_for) for s in sources.get(o, ())))
        # An asynchronous collective runs in its start op. The done op only waits for it.
        if i.opcode.endswith("-done") and i.operands:
            start = _named(module, entry, entry.instructions[i.operands[0]])
            started.add(start)
            waiting.append(start)
        if i.opcode in _FREE or (i.opcode.endswith("-done") and i.operands):
            sources[i.id] = found
            continue
        # The compute stream waits at the done op, so the next op on it waits, too. So does a collective that is started
        # in between, because its stream waits for the compute stream.
        name = _named(module, entry, i)
        reads[name] = tuple(dict.fromkeys((*found, *waiting)))
        if _collective(module, entry, i) is None:
            waiting = []
        sources[i.id] = (name,)
    return reads, started


def _named(module: Module, entry: Computation, i: Instruction) -> str:
    """Returns the name that the op's thunk has. For a collective in an async-start, it is the inner op's name."""
    found = _collective(module, entry, i)
    return i.name if found is None else found[1].name


def _collective(module: Module, entry: Computation, i: Instruction) -> tuple[Computation, Instruction] | None:
    """Returns the collective that an op is or that an async-start contains, with its computation; else None."""
    if kind_of(i) is not None:
        return entry, i
    wrapped = module.called(i) if i.opcode == "async-start" else []
    return next(((c, x) for c in wrapped for x in c.instructions.values() if kind_of(x) is not None), None)
