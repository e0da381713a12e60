"""Reads the events of Chrome-format JSON as a stream: typed and fast where the file is sound, repaired where it is not.

Sound parts are cut between two events and decoded by msgspec, which skips what no reader asks for. A cut is right if
what lies before it is a whole list of values. What cannot be decoded so (the end of the list, bare NaN, a cut file,
an event without end) is read by ijson, value by value, with the repairs of ``BoundedReader``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from pase.errors import needed
from pase.replay.traces.reader import BoundedReader

__all__ = ["Args", "TraceEvent", "events"]

_BYTES = 1 << 20
"""What is decoded at a time."""
_TRIES = 16
_LIST = re.compile(rb"\A\s*\[")
_IN_DOCUMENT = re.compile(rb'"traceEvents"\s*:\s*\[')
_UNSOUND = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_KEYS = {
    "input_dims": "Input Dims",
    "input_type": "Input type",
    "concrete_inputs": "Concrete Inputs",
    "collective_name": "Collective name",
    "in_elements": "In msg nelems",
    "out_elements": "Out msg nelems",
    "group_name": "Process Group Name",
    "group_id": "Process Group ID",
    "group_ranks": "Process Group Ranks",
    "root": "_r",
    "device_type": "Device Type",
    "total_allocated": "Total Allocated",
}


class Args(Struct, gc=False, rename=_KEYS):
    """The arguments of an event that some reader asks for. A file may give any of them any value."""

    name: Any = None
    correlation: Any = None
    stream: Any = UNSET
    device: Any = UNSET
    bytes: Any = UNSET
    size: Any = None
    input_dims: Any = UNSET
    input_type: Any = None
    concrete_inputs: Any = None
    collective_name: Any = None
    in_elements: Any = None
    out_elements: Any = None
    dtype: Any = ""
    group_name: Any = UNSET
    group_id: Any = ""
    group_ranks: Any = ""
    hlo_op: Any = UNSET
    hlo_module: Any = ""
    run_id: Any = ""
    program_id: Any = None
    correlation_id: Any = None
    device_ordinal: Any = UNSET
    step_num: Any = UNSET
    step: Any = None
    root: Any = None
    device_type: Any = None
    total_allocated: Any = None


class TraceEvent(Struct, gc=False):
    """An event of a trace. A file may give any field but ``args`` any value."""

    ph: Any = None
    name: Any = None
    cat: Any = None
    ts: Any = None
    dur: Any = UNSET
    pid: Any = None
    tid: Any = None
    args: Args | None = None


_EVENTS = msgspec.json.Decoder(list[TraceEvent])
_ANYTHING = msgspec.json.Decoder()


def events(stream: BoundedReader, prefix: str) -> Iterator[list[TraceEvent | None]]:
    """Yields the events of a list, many at a time; None stands for an entry that is no object.

    prefix: where the list is, in ijson's notation. Raises ijson.JSONError or ValueError if the JSON ends early.
    """
    before, held = _begin(stream, prefix)
    while before and (chunk := stream.plain()):
        held += chunk
        if len(held) < _BYTES:
            continue
        made, used = _decoded(held)
        if not used:
            break
        held = held[used:]
        stream.event_done()
        yield made
    stream.unread(before + held)
    ijson = needed("ijson", stream.where)
    for e in ijson.items(stream, prefix, use_float=True, buf_size=BoundedReader.CHUNK):
        stream.event_done()
        yield [_typed(e)]


def _begin(stream: BoundedReader, prefix: str) -> tuple[bytes, bytes]:
    """Returns what ijson has to read before the rest of the list, and the bytes after the list's bracket.

    The first is empty if it is not certain where the list begins; the second then is all that was read.
    """
    head = b""
    start, end = (_LIST, b"]") if prefix == "item" else (_IN_DOCUMENT, b"]}")
    while len(head) < _BYTES and (chunk := stream.plain()):
        head += chunk
        if found := start.search(head):
            # If these brackets complete the document, the list is at its top level and not in a value or a string.
            try:
                _ANYTHING.decode(head[: found.end()] + end)
            except _UNSOUND:
                break
            return b'{"traceEvents": [' if end == b"]}" else b"[", head[found.end() :]
    return b"", head


def _decoded(held: bytes) -> tuple[list[TraceEvent | None], int]:
    """Returns the events at the beginning of these bytes, and how many bytes they and the comma behind them take; 0 if
    none can be decoded."""
    end = len(held)
    for _ in range(_TRIES):
        end = held.rfind(b"{", 0, end)
        if end < 0:
            break
        whole = held[:end].rstrip()
        if not whole.endswith(b",") or not whole[:-1].rstrip().endswith(b"}"):
            continue
        text = b"[" + whole[:-1] + b"]"
        try:
            return list(_EVENTS.decode(text)), end
        except msgspec.ValidationError:
            pass  # an entry is no object, its arguments are none, or a number is beyond a float
        except _UNSOUND:
            continue
        try:
            return [_typed(e) for e in _ANYTHING.decode(text)], end
        except _UNSOUND:
            break
    return [], 0


def _typed(e: object) -> TraceEvent | None:
    if not isinstance(e, dict):
        return None
    if not isinstance(e.get("args"), dict):
        e = {k: v for k, v in e.items() if k != "args"}
    return msgspec.convert(e, TraceEvent)
