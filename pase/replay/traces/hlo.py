"""What an optimized HLO module says of its thunks: order, data flow, bytes and groups of collectives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pase.hlo.collectives import HloKind, kind_of, sent
from pase.hlo.groups import Groups
from pase.hlo.module import Computation, Instruction, Module, read
from pase.replay.types import CompiledOp, Shapes

__all__ = ["HloFacts", "read_hlo"]

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
"""Opcodes that launch nothing: data passes through them."""
_CALLS = ("while", "call", "conditional", "async-start")
_PRODUCTS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8", "__onednn$matmul")
"""Targets of custom calls that are matrix products: their first two operands are the factors."""


@dataclass(frozen=True, kw_only=True)
class HloFacts:
    """Facts about the entry computation, by op name as the thunks carry it."""

    module: str
    order: tuple[str, ...]
    """Scheduled order of the ops, free ones included."""
    reads: dict[str, tuple[str, ...]]
    """Op → launched ops whose results it reads, or whose completion it awaits."""
    kinds: dict[str, HloKind]
    """Collective → its kind, whatever its name is: JAX's own names are not XLA's."""
    nbytes: dict[str, int]
    """Collective → bytes of its larger local buffer."""
    groups: dict[str, Groups]
    """Collective → replica groups; empty for one group of all devices."""
    asynchronous: frozenset[str]
    """Collectives with a separate done op: they run on a stream of their own."""
    ops: dict[str, CompiledOp]
    """Op → what it is, of the entry computation and of the bodies of its loops and branches."""


def read_hlo(data: bytes, where: str) -> HloFacts:
    """Facts from a serialized HloProto. PaseError where it is not one or has no entry computation."""
    module = read(data, where)
    entry = module.entry
    reads, started = _dataflow(module, entry)
    found = [c for i in entry.instructions.values() if (c := _collective(module, entry, i)) is not None]
    return HloFacts(
        module=module.name,
        order=tuple(_named(module, entry, i) for i in entry.instructions.values()),
        reads=reads,
        kinds={i.name: k for _, i in found if (k := kind_of(i)) is not None},
        nbytes={i.name: sum(s.nbytes for s in sent(c, i)) for c, i in found},
        groups={i.name: i.groups for _, i in found},
        asynchronous=frozenset(started & {i.name for _, i in found}),
        ops={i.name: _compiled(module, c, i) for c, i in _run(module, entry) if i.opcode not in _FREE},
    )


def _run(module: Module, computation: Computation) -> Iterator[tuple[Computation, Instruction]]:
    """Instructions that run by themselves: of a computation, and of what its loops and branches call."""
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
    products = [(c, x) for c, x in inside if x.opcode == "dot" or x.custom_call_target in _PRODUCTS]
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
    return CompiledOp(part=part, operands=extents(computation, i), product=product, itemsize=width)


def _dataflow(module: Module, entry: Computation) -> tuple[dict[str, tuple[str, ...]], set[str]]:
    """(op -> launched ops that it reads or awaits; ops that a done op waits for)."""
    reads: dict[str, tuple[str, ...]] = {}
    sources: dict[int, tuple[str, ...]] = {}
    started: set[str] = set()
    waiting: list[str] = []
    for i in entry.instructions.values():
        found = tuple(dict.fromkeys(s for o in (*i.operands, *i.waits_for) for s in sources.get(o, ())))
        # An async collective is its start op; the done op only waits for it.
        if i.opcode.endswith("-done") and i.operands:
            start = _named(module, entry, entry.instructions[i.operands[0]])
            started.add(start)
            waiting.append(start)
        if i.opcode in _FREE or (i.opcode.endswith("-done") and i.operands):
            sources[i.id] = found
            continue
        # The compute stream waits at the done op, so what it is given next waits too; and so does a
        # collective started in between, as its stream waits for the compute stream.
        name = _named(module, entry, i)
        reads[name] = tuple(dict.fromkeys((*found, *waiting)))
        if _collective(module, entry, i) is None:
            waiting = []
        sources[i.id] = (name,)
    return reads, started


def _named(module: Module, entry: Computation, i: Instruction) -> str:
    """The name that its thunk carries: of a collective that an async-start wraps, the inner op's."""
    found = _collective(module, entry, i)
    return i.name if found is None else found[1].name


def _collective(module: Module, entry: Computation, i: Instruction) -> tuple[Computation, Instruction] | None:
    """The collective that an op is, or that an async-start wraps, with where it stands; None of any other op."""
    if kind_of(i) is not None:
        return entry, i
    wrapped = module.called(i) if i.opcode == "async-start" else []
    return next(((c, x) for c in wrapped for x in c.instructions.values() if kind_of(x) is not None), None)
