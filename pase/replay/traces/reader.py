"""Open trace files without trusting them: every read is bounded, and what goes wrong is said plainly."""

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

from pase.errors import PaseError
from pase.files.codec import parse_json

__all__ = ["LIMITS", "BoundedReader", "Limits", "open_stream", "read_member", "read_small_json"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a trace may ask of the machine before it is refused or cut."""

    file_bytes: int = 16 << 30
    """Bytes of one file after decompression."""
    ratio: float = 250.0
    """Decompressed over compressed bytes past the first 64 MiB: real traces reach 30, zip bombs 1000."""
    header_bytes: int = 256 << 20
    """Bytes before the first event."""
    event_bytes: int = 4 << 20
    """Bytes between two complete events: a longer stretch is one giant string or nest."""
    depth: int = 500
    lanes: int = 20_000
    """Distinct threads and streams of one rank."""
    names: int = 1_000_000
    """Distinct event names of one rank; more are filed under one name."""
    name_chars: int = 400
    events: int = 50_000_000
    archive_members: int = 20_000

    def unpacked(self, compressed: int) -> float:
        """The most bytes that a packed file of this size may hold."""
        return max(64 << 20, self.ratio * compressed)


LIMITS = Limits()

_BAD_NUMBER = re.compile(rb"(\A|[:\[,]\s*)-?(?:nan|inf|infinity)(?=\s*[,}\]])", re.IGNORECASE)

_MAYBE_BAD = re.compile(rb"(?:nan|inf|infinity)\s*[,}\]]")
"""Of lower-case bytes: whether the slower expression above can find anything."""
_MAYBE_LARGE = re.compile(rb"\d{19}|[0-9][eE]\+?\d{3}")
_NUMBER = re.compile(rb"(?<=[:\[,\s])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?=\s*[,}\]])")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_BLOCK = 64
_STEP = np.zeros(256, dtype=np.int8)
_STEP[[ord("["), ord("{")]] = 1
_STEP[[ord("]"), ord("}")]] = -1


class _Source(Protocol):
    def read(self, n: int, /) -> bytes: ...

    def close(self) -> None: ...


class BoundedReader:
    """A byte stream with limits, for an incremental parser.

    Reads past a limit raise PaseError. Bytes that stop short (a cut gzip, say) end the stream and set
    ``broken``. What JSON or the parser does not take, but profilers are known to write, is put in other words: bare NaN
    and Infinity, and numbers beyond a float, become null; unsigned 64-bit integers become the signed ones of the same
    bits, and longer ones floats; bytes that are no UTF-8 become U+FFFD. Nulls and bytes are counted. A byte order mark
    is left out. In a string that looks like numbers, the same digits may change.
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
        self._rest = b""
        self._depth = 0

    def read(self, n: int = -1) -> bytes:
        if n == 0:
            return b""
        chunk = self._raw()
        if _MAYBE_BAD.search(chunk.lower()):
            # Hold back the last bytes: a literal may straddle two chunks.
            chunk, count = _BAD_NUMBER.subn(rb"\1null", chunk)
            self.not_numbers += count
        if _MAYBE_LARGE.search(chunk):
            chunk = _NUMBER.sub(self._representable, chunk)
        return chunk

    def _representable(self, found: re.Match[bytes]) -> bytes:
        """A number as the parser takes it."""
        text = found[0]
        if text.lstrip(b"-").isdigit():
            number = int(text) if len(text) < 21 else 2**64
            if (
                number < 2**64 and number != 2**63 and number > -(2**63)
            ):  # the least one is too much for the parser
                return text if number < 2**63 else b"%d" % (number - 2**64)
            text += b".0"
        if math.isfinite(float(text)):
            return text
        self.not_numbers += 1
        return b"null"

    def _raw(self) -> bytes:
        try:
            chunk = self.source.read(self.CHUNK)
        except (EOFError, zlib.error, OSError, zipfile.BadZipFile) as e:
            self.broken = self.broken or f"{type(e).__name__}: {e}"
            chunk = b""
        if not self.total:
            chunk = chunk.removeprefix(codecs.BOM_UTF8)
            if chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise PaseError(
                    f"{self.where}: it is UTF-16, but JSON is UTF-8: convert it (iconv -f utf-16 -t utf-8)"
                )
        self.total += len(chunk)
        self.since_event += len(chunk)
        if self.total > self.limits.file_bytes:
            raise PaseError(
                f"{self.where}: more than {self.limits.file_bytes >> 20} MiB of JSON; raise the limit"
            )
        if self.compressed and self.total > self.limits.unpacked(self.compressed):
            raise _bomb(self.where, self.compressed, self.total)
        if self.since_event > (self.limits.event_bytes if self.events else self.limits.header_bytes):
            raise PaseError(
                f"{self.where}: {self.since_event >> 20} MiB without an event near byte "
                f"{self.total}; one huge value is not a trace"
            )
        self._check_depth(chunk)
        # Cut after the last separator, so that no token that NaN-repair looks for is split.
        data = self._rest + self._utf8(chunk)
        cut = max(data.rfind(b","), data.rfind(b"}")) + 1
        if not chunk or cut < len(data) - 4096 or cut < 1:
            cut = len(data)
        out, self._rest = data[:cut], data[cut:]
        self.tail = (self.tail + out)[-4096:]
        return out

    def _utf8(self, chunk: bytes) -> bytes:
        """The chunk as UTF-8. A character that is cut at its end comes with the next one."""
        if chunk.isascii() and self._text.getstate() == (b"", 0):
            return chunk
        text = self._text.decode(chunk, final=not chunk)
        self.not_text += max(text.count("\ufffd") - chunk.count("\ufffd".encode()), 0)
        return text.encode()

    def _check_depth(self, chunk: bytes) -> None:
        """Refuse deep nesting before the parser sees it: its memory grows with the square of the depth."""
        carried = self._depth if self.since_event > len(chunk) else 0
        self._depth, deepest = _depth(chunk, carried)
        if deepest > self.limits.depth:
            # Brackets inside strings count in the quick look; look again without strings.
            self._depth, deepest = _depth(_STRING.sub(b"", chunk), carried)
        if deepest > self.limits.depth:
            raise PaseError(f"{self.where}: values nested {deepest} deep near byte {self.total}: not a trace")

    def __enter__(self) -> BoundedReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.source.close()

    def repairs(self) -> list[str]:
        """What was put in other words, for people."""
        out = []
        if self.not_numbers:
            out.append(
                f"{self.not_numbers} bare NaN or Infinity values, or numbers beyond a float, read as null"
            )
        if self.not_text:
            out.append(f"{self.not_text} bytes that are no UTF-8, read as U+FFFD")
        return out

    def event_done(self) -> None:
        self.events += 1
        self.since_event = 0


def _depth(chunk: bytes, carried: int) -> tuple[int, int]:
    """Brackets left open at the end of the chunk, and the most that were open at once, to within a block."""
    if not chunk:
        return carried, carried
    steps = _STEP[np.frombuffer(chunk, dtype=np.uint8)]
    blocks = np.add.reduceat(steps, np.arange(0, len(steps), _BLOCK), dtype=np.int32)
    level = np.cumsum(blocks) + carried
    above = level - np.minimum(np.minimum.accumulate(level), 0)
    return int(above[-1]), int(above.max())


def _bomb(where: object, compressed: int, total: int) -> PaseError:
    return PaseError(
        f"{where}: {compressed} compressed bytes hold {total} or more: a zip bomb or one event repeated; decompress it "
        "first if you trust it"
    )


_PROBED_BYTES = 1 << 20
"""Compressed bytes that are unpacked first only to see what they hold."""


def _refuse_bomb(path: Path, raw: IO[bytes], limits: Limits) -> None:
    """PaseError for a bomb, before any of it is parsed, which takes a hundred times as long as to unpack it.

    Of a larger file only the beginning is tried; its reader counts on. What the file says of its own size is no
    evidence: of a cut one these are any four bytes.
    """
    compressed = path.stat().st_size
    most = limits.unpacked(min(compressed, _PROBED_BYTES))
    total, stream = 0, _Gunzip(raw)
    try:
        while total <= most and raw.tell() <= _PROBED_BYTES and (chunk := stream.read(1 << 20)):
            total += len(chunk)
    except (EOFError, zlib.error, OSError):
        return  # the reader says what is wrong with it
    finally:
        raw.seek(0)
    if total > most:
        raise _bomb(path, compressed, total)


class _Gunzip:
    """gzip as a stream that gives all it can before it says that the file is cut."""

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
                raise EOFError("the gzip stream stops in the middle")
            out = self.member.decompress(more, n)
            if out:
                return out


def open_stream(path: Path, limits: Limits = LIMITS) -> BoundedReader:
    """A bounded stream of the file's JSON bytes, to be used in ``with``; .gz is known by content, not by name."""
    try:
        raw: IO[bytes] = path.open("rb")
    except OSError as e:
        raise PaseError(f"{path}: cannot be read ({e.strerror or e})") from e
    magic = raw.read(2)
    raw.seek(0)
    if magic == b"PK":
        raw.close()
        return _zipped(path, limits)
    if magic == b"\x1f\x8b":
        _refuse_bomb(path, raw, limits)
        return BoundedReader(_Gunzip(raw), str(path), path.stat().st_size, limits)
    return BoundedReader(raw, str(path), None, limits)


def _zipped(path: Path, limits: Limits) -> BoundedReader:
    """The one JSON file in a zip archive, as a stream."""
    try:
        archive = zipfile.ZipFile(path)
        members = [m for m in archive.infolist() if m.filename.endswith(".json")]
        if len(members) != 1:
            raise PaseError(
                f"{path}: not an nsys-jax archive (no nvtx_gpu_proj_trace/trace.parquet in it), and it has "
                f"{len(members)} .json files, not one: unpack it and give the folder"
            )
        compressed = path.stat().st_size
        if members[0].file_size > limits.unpacked(compressed):
            raise _bomb(path, compressed, members[0].file_size)
        stream = archive.open(members[0])
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError) as e:
        raise PaseError(f"{path}: cannot be unpacked ({type(e).__name__}: {e})") from e
    return BoundedReader(stream, str(path), compressed, limits)


def read_small_json(path: Path, limit: int = 1 << 30) -> Any:
    """A whole JSON document of our own making, gzipped or not. PaseError names the file and the place."""
    parts: list[bytes] = []
    with open_stream(path, Limits(header_bytes=limit, file_bytes=limit)) as stream:
        while chunk := stream.read():
            parts.append(chunk)
    if stream.broken:
        raise PaseError(f"{path}: the file is cut or damaged ({stream.broken})")
    return parse_json(b"".join(parts), str(path))


def read_member(archive: zipfile.ZipFile, name: str, limit: int = 512 << 20) -> bytes:
    """One member of a zip archive, at most ``limit`` bytes whatever its header claims."""
    where = f"{archive.filename}:{name}"
    try:
        info = archive.getinfo(name)
        if info.file_size > limit:
            raise PaseError(
                f"{where}: {info.file_size >> 20} MiB unpacked, more than {limit >> 20} are allowed"
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
        raise PaseError(f"{where}: cannot be unpacked ({type(e).__name__}: {e})") from e
    if len(data) > limit:
        raise PaseError(f"{where}: unpacks to more than {limit >> 20} MiB")
    return data
