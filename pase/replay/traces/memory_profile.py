"""Reads who holds a device's memory: JAX's device memory profile, and PyTorch's memory snapshot.

JAX's profile (jax.profiler.save_device_memory_profile) has what is held at the moment at which it is taken. PyTorch's
snapshot (torch.cuda.memory._dump_snapshot) has that, too, and the history of allocations before it, from which the peak
follows: the history is walked backwards from what is held at its end.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pase.errors import PaseError
from pase.files.plain_pickle import plain_values
from pase.hlo.protos import parse
from pase.replay.traces.reader import LIMITS, Limits

if TYPE_CHECKING:
    from google.protobuf.message import Message

__all__ = ["DeviceMemory", "Holder", "is_memory_profile", "read_memory"]

_PROFILES = (".prof", ".pprof", ".prof.gz", ".pprof.gz")
_PICKLES = (".pickle", ".pkl")
_LARGEST = 1 << 30
_LIBRARY = re.compile(
    r"(^|/)(jax|jaxlib|flax|optax|torch|torch_xla)/|^<|/importlib/|^$|^\?\?$|(^|/)(runpy|contextlib|functools)\.py$"
)
_BEFORE = "allocated before the record began"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Memory that one place in the program holds. where: file, line and function of the user; what: "buffer",
    "executable", "optimizer", "backward" or ""; count: allocations."""

    where: str
    what: str
    nbytes: int
    count: int


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What is held on one device at one moment, largest holder first; the holders add up to ``nbytes``.

    peak: whether the moment is the peak of a history; of how many events. reserved_bytes: what the allocator had taken
    from the driver when the file was written; −1 if unknown.
    """

    device: str
    peak: bool
    events: int
    nbytes: int
    at_end_bytes: int
    reserved_bytes: int
    holders: tuple[Holder, ...]


def is_memory_profile(path: Path) -> bool:
    """Whether a file is one of those that ``read_memory`` reads, by its name."""
    return path.is_file() and path.name.endswith((*_PROFILES, *_PICKLES))


def read_memory(path: Path, limits: Limits = LIMITS) -> list[DeviceMemory]:
    """Returns what each device holds. Raises PaseError if the file is no memory profile, is damaged or too large."""
    data = _bytes(path, limits)
    if path.name.endswith(_PICKLES):
        return _snapshot(plain_values(data, str(path)), str(path), limits)
    return _profile(parse("Profile", data, str(path)), str(path))


def _bytes(path: Path, limits: Limits) -> bytes:
    size = path.stat().st_size
    most = min(_LARGEST, int(limits.unpacked(size)))
    try:
        with path.open("rb") as f:
            packed = f.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as f:
            data = f.read((most if packed else _LARGEST) + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise PaseError(f"it cannot be decompressed ({e})", where=str(path)) from e
    if len(data) > (most if packed else _LARGEST):
        raise PaseError(
            f"it has more than {most >> 20} MiB", where=str(path), fix="record fewer entries (max_entries)"
        )
    return data


# -- JAX --


def _profile(p: Message, where: str) -> list[DeviceMemory]:
    text = list(p.string_table)
    units = [_text(text, u.type) for u in p.sample_type]
    if "space" not in units:
        raise PaseError(
            f"it is a profile of {', '.join(filter(None, units)) or 'nothing'}, not of memory",
            where=where,
            fix="write one by jax.profiler.save_device_memory_profile",
        )
    space, count = units.index("space"), units.index("allocations") if "allocations" in units else -1
    functions = {f.id: (_text(text, f.filename), _text(text, f.name)) for f in p.function}
    frames = {
        x.id: [(*functions.get(line.function_id, ("", "")), line.line) for line in x.line] for x in p.location
    }
    found: dict[str, dict[tuple[str, str], tuple[int, int]]] = {}
    for s in p.sample:
        labels = {_text(text, x.key): _text(text, x.str) for x in s.label}
        if space >= len(s.value) or s.value[space] < 0:
            raise PaseError("a sample has no size", where=where)
        place = _place(f for i in s.location_id for f in frames.get(i, ()))
        holders = found.setdefault(labels.get("device") or "the program", {})
        key = place, labels.get("kind", "")
        before = holders.get(key, (0, 0))
        calls = s.value[count] if 0 <= count < len(s.value) else 1
        holders[key] = before[0] + s.value[space], before[1] + calls
    return [
        _device(device, holders, peak=False, events=0)
        for device, holders in sorted(found.items())
        if any(n for n, _ in holders.values())
    ]


def _text(table: Sequence[str], index: int) -> str:
    return table[index] if 0 <= index < len(table) else ""


def _place(frames: Iterable[tuple[str, str, int]]) -> str:
    """Returns the innermost frame that is no library's; "" if there is none. frames: (file, function, line).

    >>> _place([("/x/site-packages/jax/_src/api.py", "f", 1), ("/home/me/train.py", "init", 7)])
    'train.py:7 init'
    """
    for file, function, line in frames:
        if not _LIBRARY.search(file):
            return f"{file.rpartition('/')[2]}:{line} {function}".strip()
    return ""


def _device(
    device: str,
    holders: dict[tuple[str, str], tuple[int, int]],
    *,
    peak: bool,
    events: int,
    at_end: int | None = None,
    reserved: int = -1,
) -> DeviceMemory:
    listed = [
        Holder(where=where, what=what, nbytes=n, count=count)
        for (where, what), (n, count) in holders.items()
        if n
    ]
    total = sum(h.nbytes for h in listed)
    return DeviceMemory(
        device=device,
        peak=peak,
        events=events,
        nbytes=total,
        at_end_bytes=total if at_end is None else at_end,
        reserved_bytes=reserved,
        holders=tuple(sorted(listed, key=lambda h: (-h.nbytes, h.where))),
    )


# -- PyTorch --


def _snapshot(value: object, where: str, limits: Limits) -> list[DeviceMemory]:
    if not isinstance(value, dict) or not isinstance(value.get("segments"), list):
        raise PaseError(
            "it is no memory snapshot of PyTorch",
            where=where,
            fix="write one by torch.cuda.memory._dump_snapshot, after torch.cuda.memory._record_memory_history",
        )
    held: dict[int, dict[int, _Allocation]] = {}
    reserved: dict[int, int] = {}
    left = limits.events
    try:
        for segment in value["segments"]:
            device = int(segment.get("device", 0))
            reserved[device] = reserved.get(device, 0) + _size(segment["total_size"])
            at = int(segment["address"])
            left -= len(segment["blocks"])
            if left < 0:
                raise PaseError(f"it has more than {limits.events} blocks", where=where)
            for b in segment["blocks"]:
                size = _size(b["size"])
                if b["state"] == "active_allocated":
                    address = int(b.get("address", at))
                    held.setdefault(device, {})[address] = _Allocation(size=size, frames=_frames(b))
                at += size
        traces = value.get("device_traces") or []
        out = []
        for device in sorted({*held, *reserved, *(i for i, x in enumerate(traces) if x)}):
            events = traces[device] if device < len(traces) else []
            left -= len(events)
            if left < 0:
                raise PaseError(f"it has more than {limits.events} events", where=where)
            out.append(_at_peak(device, held.get(device, {}), events, reserved.get(device, -1)))
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as e:
        raise PaseError(
            f"it is a damaged memory snapshot ({type(e).__name__}: {str(e)[:80]})", where=where
        ) from e
    if not out:
        raise PaseError("it has no segment and no event", where=where, fix="record the history on a GPU")
    return out


@dataclass(frozen=True, kw_only=True)
class _Allocation:
    size: int
    frames: tuple[tuple[str, str, int], ...] | None
    """None if the allocation was not seen."""


def _size(x: object) -> int:
    if not isinstance(x, int) or isinstance(x, bool) or not 0 <= x < 1 << 62:
        raise ValueError(f"a size of {x!r}")
    return x


def _frames(x: dict[str, Any]) -> tuple[tuple[str, str, int], ...] | None:
    found = x.get("frames")
    if found is None and x.get("history"):
        found = x["history"][0].get("frames")  # until PyTorch 2.1
    if not found:
        return None
    return tuple((str(f["filename"]), str(f["name"]), int(f["line"])) for f in found)


def _at_peak(
    device: int, held: dict[int, _Allocation], events: Sequence[dict[str, Any]], reserved: int
) -> DeviceMemory:
    """Walks the history backwards from what is held at its end, and stops a second walk at the peak."""
    at_end = sum(b.size for b in held.values())
    peak, after = at_end, len(events)
    total = at_end
    steps = list(_backwards(dict(held), events))
    for i, _, size in steps:
        total += size
        if total > peak:
            peak, after = total, i
    live = dict(held)
    for i, (address, block), size in steps:
        if i < after:
            break
        if size > 0:
            live[address] = block
        else:
            live.pop(address, None)
    holders: dict[tuple[str, str], tuple[int, int]] = {}
    for block in live.values():
        key = (
            (_BEFORE, "")
            if block.frames is None
            else (_place(block.frames) or _inner(block.frames), _what(block.frames))
        )
        n, count = holders.get(key, (0, 0))
        holders[key] = n + block.size, count + 1
    return _device(
        f"cuda:{device}", holders, peak=bool(events), events=len(events), at_end=at_end, reserved=reserved
    )


def _backwards(
    live: dict[int, _Allocation], events: Sequence[dict[str, Any]]
) -> Iterator[tuple[int, tuple[int, _Allocation], int]]:
    """Yields (event, (address, block), change) from the last event on: how the memory before an event differs from that
    after it. A freed block has the frames of its allocation, if the history has that."""
    born: dict[int, int] = {}
    made_by: dict[int, int] = {}
    for i, e in enumerate(events):
        if e["action"] == "alloc":
            born[int(e["addr"])] = i
        elif e["action"] == "free_requested" and int(e["addr"]) in born:
            made_by[i] = born.pop(int(e["addr"]))
    for i in range(len(events) - 1, -1, -1):
        e = events[i]
        if e["action"] not in ("alloc", "free_requested"):
            continue
        address, size = int(e["addr"]), _size(e["size"])
        if e["action"] == "alloc":
            block = live.pop(address, None)
            if block is not None:
                yield i, (address, block), -block.size
        elif address not in live:
            frames = _frames(events[made_by[i]]) or () if i in made_by else None
            live[address] = _Allocation(size=size, frames=frames)
            yield i, (address, live[address]), size


def _inner(frames: Sequence[tuple[str, str, int]]) -> str:
    """Returns the innermost named frame of a library, for memory that no line of the user holds."""
    named = [(f, n) for f, n, _ in frames if n and f != "??"] or [(f, n) for f, n, _ in frames if n]
    return named[0][1][:60] if named else "no Python frame"


def _what(frames: Sequence[tuple[str, str, int]]) -> str:
    """Returns the part of a step to which an allocation belongs, from the files and functions around it."""
    if any("torch/optim/" in file for file, _, _ in frames):
        return "optimizer"
    if any("torch::autograd::Engine" in name or "autograd/graph.py" in file for file, name, _ in frames):
        return "backward"
    return ""
