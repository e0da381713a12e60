"""Reads the structure of an ONNX file without its weights, from the wire format of protocol buffers.

The file is memory-mapped and only small messages are copied, so memory use depends on the graph and not on the weights.
Field numbers are those of onnx.proto. Source: protobuf.dev, "Encoding".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from pase.errors import PaseError

__all__ = ["SMALL_BYTES", "Buffer", "Field", "Malformed", "fields", "skeleton", "varint"]

Buffer: TypeAlias = "memoryview | bytes"

SMALL_BYTES = 40_000
"""A message of at most this many bytes is kept unchanged: room for 4096 int64 values and their metadata."""

_MOST_NESTED = 60

# The messages inside of messages: message -> field number -> message. "data" is dropped if it is large.
_INSIDE: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "dropped", 25: "function"},  # 20: training_info
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": dict.fromkeys((4, 5, 6, 7, 9, 10, 11), "data"),
}


class Malformed(PaseError):
    """The bytes are no protocol buffer."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a message: its number, its wire type, and the positions of its start, its payload and its end."""

    number: int
    wire: int
    start: int
    payload: int
    end: int


def varint(buf: Buffer, at: int, end: int) -> tuple[int, int]:
    """(value, position after it) of the base-128 number at this position."""
    value = shift = 0
    while at < end and shift < 64:
        byte = buf[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise Malformed("a number is cut off or too long")


def fields(buf: Buffer, start: int, end: int) -> Iterator[Field]:
    """The fields of the message in buf[start:end]. Raises Malformed if it is not a message."""
    at = start
    while at < end:
        key, payload = varint(buf, at, end)
        number, wire = key >> 3, key & 7
        if wire == 0:
            _, stop = varint(buf, payload, end)
        elif wire == 1:
            stop = payload + 8
        elif wire == 5:
            stop = payload + 4
        elif wire == 2:
            length, payload = varint(buf, payload, end)
            stop = payload + length
        else:
            raise Malformed(f"a field has unknown wire type {wire}")
        if stop > end or number == 0:
            raise Malformed("a field extends beyond the end of the data, which may be cut off or damaged")
        yield Field(number, wire, at, payload, stop)
        at = stop


def skeleton(buf: Buffer) -> bytes:
    """The ModelProto in these bytes without the contents of its large tensors. Their names and shapes are kept."""
    return b"".join(_kept(buf, 0, len(buf), "model", 0))


def _kept(buf: Buffer, start: int, end: int, kind: str, depth: int) -> list[bytes]:
    """The message in buf[start:end] in pieces, without large data. kind: of the message, a key of _INSIDE."""
    if depth > _MOST_NESTED:
        raise Malformed(f"messages are nested more than {_MOST_NESTED} levels deep")
    if end - start <= SMALL_BYTES:
        return [bytes(buf[start:end])]
    out: list[bytes] = []
    inside = _INSIDE[kind]
    since = start  # from here on, bytes are kept unchanged
    for f in fields(buf, start, end):
        what = inside.get(f.number)
        if f.wire != 2 or what is None or (f.end - f.payload <= SMALL_BYTES and what != "dropped"):
            continue
        out.append(bytes(buf[since : f.start]))
        since = f.end
        if what not in ("data", "dropped"):
            body = _kept(buf, f.payload, f.end, what, depth + 1)
            out += [_key(f.number), _length(sum(map(len, body))), *body]
    out.append(bytes(buf[since:end]))
    return out


def _key(number: int) -> bytes:
    return _length(number << 3 | 2)


def _length(value: int) -> bytes:
    """A number in base 128.

    >>> _length(300).hex()
    'ac02'
    """
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
