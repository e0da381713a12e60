"""Opens untrusted trace files: every read is bounded, and errors say what is wrong."""

from __future__ import annotations

import codecs
import math
import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from pase.errors import PaseError, needed
from pase.files.codec import parse_json

__all__ = ["LIMITS", "BoundedReader", "Limits", "open_stream", "read_member", "read_small_json"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on a trace. Beyond them, it is rejected, or events are left out."""

    file_bytes: int = 16 << 30
    """Bytes of one file after decompression."""
    ratio: float = 250.0
    """Ratio of decompressed to compressed bytes beyond the first 64 MiB. Real traces reach 30, zip bombs 1000."""
    header_bytes: int = 256 << 20
    """Bytes before the first event."""
    event_bytes: int = 4 << 20
    """Bytes between two complete events. A longer part is a single huge string or nested value."""
    depth: int = 500
    """Nesting depth of JSON values."""
    lanes: int = 20_000
    """Distinct threads and streams of one rank."""
    names: int = 1_000_000
    """Distinct event names of one rank. Events with further names share one name."""
    name_chars: int = 400
    events: int = 50_000_000
    archive_members: int = 20_000

    def unpacked(self, compressed: int) -> float:
        """Returns the largest decompressed size that is allowed for a compressed size."""
        return max(64 << 20, self.ratio * compressed)


LIMITS = Limits()

_BAD_NUMBER = re.compile(rb"(\A|[:\[,]\s*)-?(?:nan|inf|infinity)(?=\s*[,}\]])", re.IGNORECASE)

_MAYBE_BAD = re.compile(rb"(?:nan|inf|infinity)\s*[,}\]]")
"""A faster test on lower-case bytes of whether the expression above can match."""
_MAYBE_LARGE = re.compile(rb"\d{19}|[0-9][eE]\+?\d{3}")
_NUMBER = re.compile(rb"(?<=[:\[,\s])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?=\s*[,}\]])")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_ZSTD = b"\x28\xb5\x2f\xfd"
_BLOCK = 64
_STEP = np.zeros(256, dtype=np.int8)
_STEP[[ord("["), ord("{")]] = 1
_STEP[[ord("]"), ord("}")]] = -1


class _Source(Protocol):
    def read(self, n: int, /) -> bytes: ...

    def close(self) -> None: ...


class _Again:
    """A source that gives some bytes before those of another."""

    def __init__(self, data: bytes, then: _Source) -> None:
        self.data, self.then = data, then

    def read(self, n: int) -> bytes:
        if not self.data:
            return self.then.read(n)
        out, self.data = self.data[:n], self.data[n:]
        return out

    def close(self) -> None:
        self.then.close()


class BoundedReader:
    """A byte stream with limits, for an incremental parser.

    A read beyond a limit raises PaseError. A truncated file (such as a cut gzip) ends the stream and sets ``broken``.

    Some values that profilers write are not valid JSON or not accepted by the parser. They are replaced: bare NaN and
    Infinity, and numbers out of the range of a float, by null; unsigned 64-bit integers by the signed ones with the
    same bits, and longer ones by floats; bytes that are not UTF-8 by U+FFFD. Nulls and bytes are counted. A byte order
    mark is removed. Digits in a string that looks like a list of numbers may change in the same way.
    """

    CHUNK = 1 << 18

    def __init__(self, source: _Source, where: str, compressed: int | None, limits: Limits) -> None:
        self.source, self.where, self.compressed, self.limits = source, where, compressed, limits
        self.total = 0
        self.since_event = 0
        self.events = 0
        self.broken = ""
        self.not_numbers = 0
        self.not_text = 0
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self.tail = b""
        self.recent = b""
        """The bytes that were read last, at most ``CHUNK``."""
        self._rest = b""
        self._depth = 0

    def plain(self) -> bytes:
        """Returns the next bytes as they are, within the limits. They may end anywhere."""
        chunk = self._bounded()
        self.recent = (self.recent + chunk)[-self.CHUNK :]
        self.tail = (self.tail + chunk)[-4096:]
        return chunk

    def unread(self, data: bytes) -> None:
        """Puts bytes back, to be read again."""
        self.source = _Again(data, self.source)
        self.total -= len(data)
        self.since_event = max(self.since_event - len(data), 0)

    def read(self, n: int = -1) -> bytes:
        if n == 0:
            return b""
        chunk = self._raw()
        if _MAYBE_BAD.search(chunk.lower()):
            # No literal is split between two chunks, because ``_raw`` cuts after a separator.
            chunk, count = _BAD_NUMBER.subn(rb"\1null", chunk)
            self.not_numbers += count
        if _MAYBE_LARGE.search(chunk):
            chunk = _NUMBER.sub(self._representable, chunk)
        self.recent = (self.recent + chunk)[-self.CHUNK :]
        return chunk

    def _representable(self, found: re.Match[bytes]) -> bytes:
        """Returns a number in a form that the parser accepts."""
        text = found[0]
        if text.lstrip(b"-").isdigit():
            number = int(text) if len(text) < 21 else 2**64
            if (
                number < 2**64 and number != 2**63 and number > -(2**63)
            ):  # the parser rejects the smallest integer
                return text if number < 2**63 else b"%d" % (number - 2**64)
            text += b".0"
        if math.isfinite(float(text)):
            return text
        self.not_numbers += 1
        return b"null"

    def _bounded(self) -> bytes:
        """Returns the next bytes. Raises PaseError if there are too many of them."""
        try:
            chunk = self.source.read(self.CHUNK)
        except (EOFError, zlib.error, OSError, zipfile.BadZipFile) as e:
            self.broken = self.broken or f"{type(e).__name__}: {e}"
            chunk = b""
        if not self.total:
            chunk = chunk.removeprefix(codecs.BOM_UTF8)
            if chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise PaseError(
                    "it is UTF-16, but JSON must be UTF-8",
                    where=self.where,
                    fix="convert it with iconv -f utf-16 -t utf-8",
                )
        self.total += len(chunk)
        self.since_event += len(chunk)
        if self.total > self.limits.file_bytes:
            raise PaseError(
                f"more than {self.limits.file_bytes >> 20} MiB of JSON",
                where=self.where,
                fix="profile fewer steps",
            )
        if self.compressed and self.total > self.limits.unpacked(self.compressed):
            raise _bomb(self.where, self.compressed, self.total)
        if self.since_event > (self.limits.event_bytes if self.events else self.limits.header_bytes):
            raise PaseError(
                f"{self.since_event >> 20} MiB without an event near byte {self.total}, so it is not a trace",
                where=self.where,
            )
        return chunk

    def _raw(self) -> bytes:
        chunk = self._bounded()
        self._check_depth(chunk)
        # Cut after the last separator, so that no token that ``read`` replaces is split.
        data = self._rest + self._utf8(chunk)
        cut = max(data.rfind(b","), data.rfind(b"}")) + 1
        if not chunk or cut < len(data) - 4096 or cut < 1:
            cut = len(data)
        out, self._rest = data[:cut], data[cut:]
        self.tail = (self.tail + out)[-4096:]
        return out

    def _utf8(self, chunk: bytes) -> bytes:
        """Returns the chunk as valid UTF-8. A character that is cut at the end is returned with the next chunk."""
        if chunk.isascii() and self._text.getstate() == (b"", 0):
            return chunk
        text = self._text.decode(chunk, final=not chunk)
        self.not_text += max(text.count("\ufffd") - chunk.count("\ufffd".encode()), 0)
        return text.encode()

    def _check_depth(self, chunk: bytes) -> None:
        """Raises PaseError on deep nesting, before the parser sees it: its memory grows with the depth squared."""
        carried = self._depth if self.since_event > len(chunk) else 0
        self._depth, deepest = _depth(chunk, carried)
        if deepest > self.limits.depth:
            # The fast check counts brackets inside strings, too, so repeat it without strings.
            self._depth, deepest = _depth(_STRING.sub(b"", chunk), carried)
        if deepest > self.limits.depth:
            raise PaseError(
                f"values are nested {deepest} deep near byte {self.total}, so it is not a trace",
                where=self.where,
            )

    def __enter__(self) -> BoundedReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.source.close()

    def repairs(self) -> list[str]:
        """Returns descriptions of the replaced values."""
        out = []
        if self.not_numbers:
            out.append(
                f"{self.not_numbers} bare NaN or Infinity values, or numbers beyond a float, are read as null"
            )
        if self.not_text:
            out.append(f"{self.not_text} bytes that are not UTF-8 are read as U+FFFD")
        return out

    def event_done(self) -> None:
        self.events += 1
        self.since_event = 0


def _depth(chunk: bytes, carried: int) -> tuple[int, int]:
    """Returns the nesting depth at the end of the chunk, and the largest depth, to within a block."""
    if not chunk:
        return carried, carried
    steps = _STEP[np.frombuffer(chunk, dtype=np.uint8)]
    blocks = np.add.reduceat(steps, np.arange(0, len(steps), _BLOCK), dtype=np.int32)
    level = np.cumsum(blocks) + carried
    above = level - np.minimum(np.minimum.accumulate(level), 0)
    return int(above[-1]), int(above.max())


def _bomb(where: object, compressed: int, total: int) -> PaseError:
    return PaseError(
        f"{compressed} compressed bytes contain {total} or more, like a zip bomb or one event repeated",
        where=str(where),
        fix="decompress it first if you trust it",
    )


_PROBED_BYTES = 1 << 20
"""The number of compressed bytes that are decompressed in advance, to check their decompressed size."""


def _refuse_bomb(path: Path, raw: IO[bytes], limits: Limits) -> None:
    """Raises PaseError for a zip bomb before it is parsed, because parsing takes a hundred times as long.

    Only the beginning of a large file is checked; its reader checks the rest. The size that a gzip file records is not
    used, because in a truncated file it is four arbitrary bytes.
    """
    compressed = path.stat().st_size
    most = limits.unpacked(min(compressed, _PROBED_BYTES))
    total, stream = 0, _Gunzip(raw)
    try:
        while total <= most and raw.tell() <= _PROBED_BYTES and (chunk := stream.read(1 << 20)):
            total += len(chunk)
    except (EOFError, zlib.error, OSError):
        return  # the reader reports the fault
    finally:
        raw.seek(0)
    if total > most:
        raise _bomb(path, compressed, total)


class _Gunzip:
    """A gzip stream that returns all available data before it reports that the file is truncated."""

    def __init__(self, raw: IO[bytes]) -> None:
        self.raw, self.member = raw, zlib.decompressobj(31)

    def close(self) -> None:
        self.raw.close()

    def read(self, n: int) -> bytes:
        while True:
            if self.member.eof:
                more = self.member.unused_data or self.raw.read(1 << 16)
                if not more.startswith(b"\x1f\x8b"):
                    return b""
                self.member = zlib.decompressobj(31)
            else:
                more = self.member.unconsumed_tail or self.raw.read(1 << 16)
            if not more:
                raise EOFError("the gzip stream is truncated")
            out = self.member.decompress(more, n)
            if out:
                return out


def open_stream(path: Path, limits: Limits = LIMITS) -> BoundedReader:
    """Opens a bounded stream of the file's JSON bytes, a context manager. Compression is detected by content."""
    try:
        raw: IO[bytes] = path.open("rb")
    except OSError as e:
        raise PaseError(f"it cannot be read ({e.strerror or e})", where=str(path)) from e
    magic = raw.read(4)
    raw.seek(0)
    if magic == _ZSTD:
        pa = needed("pyarrow", str(path))
        unpacked = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
        return BoundedReader(unpacked, str(path), path.stat().st_size, limits)
    magic = magic[:2]
    if magic == b"PK":
        raw.close()
        return _zipped(path, limits)
    if magic == b"\x1f\x8b":
        _refuse_bomb(path, raw, limits)
        return BoundedReader(_Gunzip(raw), str(path), path.stat().st_size, limits)
    return BoundedReader(raw, str(path), None, limits)


def _zipped(path: Path, limits: Limits) -> BoundedReader:
    """Opens the only JSON file in a zip archive as a stream."""
    try:
        archive = zipfile.ZipFile(path)
        members = [m for m in archive.infolist() if m.filename.endswith(".json")]
        if len(members) != 1:
            raise PaseError(
                "it is not an nsys-jax archive (it has no nvtx_gpu_proj_trace/trace.parquet), and it has "
                f"{len(members)} .json files instead of one",
                where=str(path),
                fix="unpack it and give the folder",
            )
        compressed = path.stat().st_size
        if members[0].file_size > limits.unpacked(compressed):
            raise _bomb(path, compressed, members[0].file_size)
        stream = archive.open(members[0])
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError) as e:
        raise PaseError(f"it cannot be decompressed ({type(e).__name__}: {e})", where=str(path)) from e
    return BoundedReader(stream, str(path), compressed, limits)


def read_small_json(path: Path, limit: int = 1 << 30) -> Any:
    """Reads a whole JSON document written by pase, gzipped or not. Errors name the file and the position."""
    parts: list[bytes] = []
    with open_stream(path, Limits(header_bytes=limit, file_bytes=limit)) as stream:
        while chunk := stream.read():
            parts.append(chunk)
    if stream.broken:
        raise PaseError(
            f"the file is cut or damaged ({stream.broken})", where=str(path), fix="write it again"
        )
    return parse_json(b"".join(parts), str(path))


def read_member(archive: zipfile.ZipFile, name: str, limit: int = 512 << 20) -> bytes:
    """Reads one member of a zip archive. Raises PaseError if it really has more than ``limit`` bytes."""
    where = f"{archive.filename}:{name}"
    try:
        info = archive.getinfo(name)
        if info.file_size > limit:
            raise PaseError(
                f"{info.file_size >> 20} MiB unpacked, but at most {limit >> 20} MiB are allowed", where=where
            )
        with archive.open(info) as f:
            data = f.read(limit + 1)
    except (
        KeyError,
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        NotImplementedError,
        RuntimeError,
        OSError,
    ) as e:
        raise PaseError(f"it cannot be decompressed ({type(e).__name__}: {e})", where=where) from e
    if len(data) > limit:
        raise PaseError(f"it has more than {limit >> 20} MiB unpacked", where=where)
    return data
