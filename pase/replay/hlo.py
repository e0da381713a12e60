"""What an optimized HLO module says of its thunks: order, data flow, bytes and groups of collectives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pase.errors import PaseError
from pase.replay.protos import parse

__all__ = ["HloFacts", "read_hlo"]

_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 10: 2, 11: 4, 12: 8, 15: 8, 16: 2, 18: 16}
"""Bytes of xla.PrimitiveType: pred, s8…s64, u8…u64, f16, f32, f64, c64, bf16, c128; 8-bit floats: 19 up."""

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


@dataclass(frozen=True, kw_only=True)
class HloFacts:
    """Facts about the entry computation, by op name as the thunks carry it."""

    module: str
    order: tuple[str, ...]
    """Scheduled order of the ops, free ones included."""
    reads: dict[str, tuple[str, ...]]
    """Op → launched ops whose results it reads, or whose completion it awaits."""
    nbytes: dict[str, int]
    """Collective → bytes of its larger local buffer."""
    groups: dict[str, tuple[tuple[int, ...], ...]]
    """Collective → replica groups; empty for one group of all devices."""
    asynchronous: frozenset[str]
    """Collectives with a separate done op: they run on a stream of their own."""


def _bytes(shape: Any) -> int:
    if shape.tuple_shapes:
        return sum(_bytes(s) for s in shape.tuple_shapes)
    return math.prod(shape.dimensions) * _BYTES.get(shape.element_type, 1)


def read_hlo(data: bytes, where: str) -> HloFacts:
    """Facts from a serialized HloProto. PaseError where it is not one or has no entry computation."""
    module = parse("HloProto", data, where).hlo_module
    entry = next((c for c in module.computations if c.id == module.entry_computation_id), None)
    if entry is None:
        raise PaseError(f"{where}: the HLO module names no entry computation")
    by_id = {i.id: _unwrapped(i, module) for i in entry.instructions}
    scheduled = module.schedule.sequences
    ids = list(scheduled[entry.id].instruction_ids) if entry.id in scheduled else list(by_id)
    order = [by_id[i] for i in ids if i in by_id]
    # An async collective is its start op; the done op only waits for it.
    done_of: dict[int, int] = {}
    for i in order:
        if i.opcode.endswith("-done") and i.operand_ids:
            done_of[i.id] = i.operand_ids[0]
    free = {i.id for i in by_id.values() if i.opcode in _FREE} | set(done_of)
    reads: dict[str, tuple[str, ...]] = {}
    sources: dict[int, tuple[str, ...]] = {}
    waiting: list[str] = []
    for i in order:
        found: dict[str, None] = {}
        for o in (*i.operand_ids, *i.control_predecessor_ids):
            for s in sources.get(o, ()):
                found[s] = None
        if i.id in free:
            sources[i.id] = tuple(found)
            if i.id in done_of and done_of[i.id] in by_id:
                waiting.append(by_id[done_of[i.id]].name)
        else:
            # The compute stream waits at the done op, so what it is given next waits too; and so does a
            # collective started in between, as its stream waits for the compute stream.
            reads[i.name] = tuple(dict.fromkeys((*found, *waiting)))
            if not _is_collective(i.opcode):
                waiting = []
            sources[i.id] = (i.name,)
    started = {by_id[o].name for o in done_of.values() if o in by_id}
    collectives = [i for i in order if _is_collective(i.opcode)]
    return HloFacts(
        module=module.name,
        order=tuple(i.name for i in order),
        reads=reads,
        nbytes={i.name: _collective_bytes(i, by_id) for i in collectives},
        groups={i.name: tuple(tuple(g.replica_ids) for g in i.replica_groups) for i in collectives},
        asynchronous=frozenset(i.name for i in collectives if i.name in started),
    )


def _unwrapped(i: Any, module: Any) -> Any:
    """An async-start as the collective that it wraps: its thunk carries the inner op's name."""
    if i.opcode != "async-start" or not i.called_computation_ids:
        return i
    called = next((c for c in module.computations if c.id == i.called_computation_ids[0]), None)
    inner = next((x for x in called.instructions if _is_collective(x.opcode)), None) if called else None
    if inner is not None:
        i.name, i.opcode = inner.name, inner.opcode + "-start"
        i.replica_groups.MergeFrom(inner.replica_groups)
    return i


def _is_collective(opcode: str) -> bool:
    return opcode.startswith(
        ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-", "ragged-all-to-all")
    ) and not opcode.endswith("-done")


def _collective_bytes(i: Any, by_id: dict[int, Any]) -> int:
    read = sum(_bytes(by_id[o].shape) for o in i.operand_ids if o in by_id)
    written = _bytes(i.shape)
    if i.opcode.endswith("-start") and i.shape.tuple_shapes:
        # A start op's tuple may list its operands next to its results; the larger half is the buffer.
        written = max(_bytes(s) for s in i.shape.tuple_shapes)
        if len(i.shape.tuple_shapes) == 2 and all(s.tuple_shapes for s in i.shape.tuple_shapes):
            written = _bytes(i.shape.tuple_shapes[1])
        elif i.opcode == "all-reduce-start":
            written = _bytes(i.shape)
    return max(read, written)
