"""Mutations of XLA's profiles (.xplane.pb) as messages: what a damaged or a newer profiler may write.

Events, lines, planes, metadata, statistics and the programs themselves are dropped, doubled, moved and renamed; ids
point elsewhere, times are negative or near the limits of 64 bits, values have another type, and bytes are changed or
cut off. ``bench/fuzz/traces.py`` judges what the reader and the diagnosis say of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pase.errors import PaseError
from pase.hlo.protos import parse

__all__ = ["MUTATIONS", "mutated_planes"]

Rng = np.random.Generator

_EXTREMES = (-1, 0, 1, 1 << 31, 1 << 53, (1 << 63) - 1, -(1 << 63))
"""Values of a signed 64-bit field that a reader may not expect."""
_WORDS = (
    "",
    "0",
    "all-reduce.1",
    "while.3",
    "fusion",
    "command_buffer",
    "cuGraphLaunch",
    "x" * 500,
    "(",
    "jit_step(3)",
    "\x1fjit_step(3)",
    "Stream #13(Compute)",
    "/device:GPU:0",
    "/device:GPU:x",
    "/host:CPU",
    "/host:metadata",
    "hlo_op",
    "hlo_module",
    "run_id",
    "step_num",
)
"""Names with a meaning for the reader, and some without."""


def _some(of: Sequence[Any], rng: Rng, most: int = 20) -> list[Any]:
    """Draws up to ``most`` of these, with repetition."""
    if not len(of):
        return []
    return [of[k] for k in rng.integers(0, len(of), int(rng.integers(1, most))).tolist()]


def _one(of: Sequence[Any], rng: Rng) -> Any:
    return of[int(rng.integers(len(of)))]


def _lines(space: Any) -> list[Any]:
    return [line for plane in space.planes for line in plane.lines]


def _busy(space: Any, rng: Rng) -> Any:
    """Draws a line, the ones with more events more often; None if no line has any."""
    lines = [line for line in _lines(space) if len(line.events)]
    if not lines:
        return None
    size = np.array([len(line.events) for line in lines], dtype=float)
    return lines[int(rng.choice(len(lines), p=size / size.sum()))]


def drop_events(space: Any, rng: Rng) -> None:
    """Removes events of a line, scattered or all in one part."""
    line = _busy(space, rng)
    if line is None:
        return
    n = len(line.events)
    if rng.random() < 0.5:
        gone = set(rng.integers(0, n, int(rng.integers(1, 60))).tolist())
    else:
        a, b = np.sort(rng.integers(0, n + 1, 2)).tolist()
        gone = set(range(a, b))
    for k in sorted(gone, reverse=True):
        del line.events[k]


def double_events(space: Any, rng: Rng) -> None:
    """Repeats events of a line."""
    line = _busy(space, rng)
    for e in _some(list(line.events) if line else [], rng):
        line.events.add().CopyFrom(e)


def move_events(space: Any, rng: Rng) -> None:
    """Shifts events of a line by up to a second."""
    line = _busy(space, rng)
    for e in _some(line.events if line else [], rng):
        by = int(rng.normal() * 10.0 ** rng.integers(3, 13))
        e.offset_ps = int(np.clip(e.offset_ps + by, -(1 << 62), 1 << 62))


def stretch_events(space: Any, rng: Rng) -> None:
    """Scales durations up or down by up to four orders of magnitude."""
    line = _busy(space, rng)
    for e in _some(line.events if line else [], rng):
        e.duration_ps = int(min(e.duration_ps * 10.0 ** rng.uniform(-4, 4), 1 << 62))


def extreme_times(space: Any, rng: Rng) -> None:
    """Gives events and lines times at the limits of their fields."""
    line = _busy(space, rng)
    for e in _some(line.events if line else [], rng, 4):
        setattr(e, str(rng.choice(["offset_ps", "duration_ps"])), _one(_EXTREMES, rng))
    if rng.random() < 0.2 and (lines := _lines(space)):
        _one(lines, rng).timestamp_ns = _one(_EXTREMES, rng)


def shift_line(space: Any, rng: Rng) -> None:
    """Makes the clock of a line differ from that of the others."""
    if lines := _lines(space):
        line = _one(lines, rng)
        by = int(rng.normal() * 10.0 ** rng.integers(2, 11))
        line.timestamp_ns = int(np.clip(line.timestamp_ns + by, -(1 << 62), 1 << 62))


def swap_metadata(space: Any, rng: Rng) -> None:
    """Makes events refer to the name of another event, or to none."""
    plane = _one(space.planes, rng) if len(space.planes) else None
    known = list(plane.event_metadata) if plane is not None else []
    for line in plane.lines if plane is not None else ():
        for e in _some(line.events, rng, 6):
            e.metadata_id = _one([*known, *_EXTREMES[:4]], rng)


def drop_metadata(space: Any, rng: Rng) -> None:
    """Removes names of events or of statistics, which leaves their references."""
    plane = _one(space.planes, rng) if len(space.planes) else None
    if plane is not None:
        held = plane.event_metadata if rng.random() < 0.5 else plane.stat_metadata
        for key in {*_some(list(held), rng, 6)}:
            del held[key]


def rename(space: Any, rng: Rng) -> None:
    """Renames events, statistics, lines and planes to names with a meaning for the reader."""
    if not len(space.planes):
        return
    plane = _one(space.planes, rng)
    which = rng.choice(["event", "event", "stat", "line", "plane"])
    if which == "plane":
        plane.name = _one(_WORDS, rng)
    elif which == "line":
        for line in _some(plane.lines, rng, 3):
            line.name = line.display_name = _one(_WORDS, rng)
    else:
        held = plane.event_metadata if which == "event" else plane.stat_metadata
        for key in _some(list(held), rng, 4):
            held[key].name = _one(_WORDS, rng)


def change_stats(space: Any, rng: Rng) -> None:
    """Gives statistics another value, another type or another name, or removes them."""
    line = _busy(space, rng)
    for e in _some(line.events if line else [], rng, 40):
        if not len(e.stats):
            continue
        k = int(rng.integers(len(e.stats)))
        s = e.stats[k]
        what = int(rng.integers(6))
        if what == 0:
            del e.stats[k]
        elif what == 1:
            s.int64_value = _one(_EXTREMES, rng)
        elif what == 2:
            s.uint64_value = int(rng.integers(0, 1 << 63)) * 2 + 1
        elif what == 3:
            s.str_value = _one(_WORDS, rng)
        elif what == 4:
            s.ref_value = int(rng.choice([0, 1, 5, 1 << 40]))
        else:
            s.metadata_id = int(rng.integers(0, 60))


def planes_elsewhere(space: Any, rng: Rng) -> None:
    """Drops, doubles or exchanges planes and lines."""
    if not len(space.planes):
        return
    what = rng.choice(["drop", "double", "drop_line", "double_line", "exchange"])
    plane = _one(space.planes, rng)
    if what == "drop":
        space.planes.remove(plane)
    elif what == "double":
        space.planes.add().CopyFrom(plane)
    elif what == "exchange":
        other = _one(space.planes, rng)
        plane.name, other.name = other.name, plane.name
    elif len(plane.lines):
        line = _one(plane.lines, rng)
        if what == "drop_line":
            plane.lines.remove(line)
        else:
            plane.lines.add().CopyFrom(line)


def change_programs(space: Any, rng: Rng) -> None:
    """Drops, cuts or changes the programs that the profile holds, as messages and as bytes."""
    held = [s for p in space.planes for m in p.event_metadata.values() for s in m.stats if s.bytes_value]
    for s in _some(held, rng, 3):
        what = int(rng.integers(4))
        if what == 0:
            s.bytes_value = s.bytes_value[: int(rng.integers(len(s.bytes_value)))]
        elif what == 1:
            s.bytes_value = _flipped(s.bytes_value, rng)
        elif what == 2:
            s.bytes_value = b""
        else:
            try:
                proto = parse("HloProto", s.bytes_value, "a seed")
            except PaseError:
                continue  # an earlier mutation left no program
            _change_program(proto.hlo_module, rng)
            s.bytes_value = proto.SerializeToString()


def _change_program(module: Any, rng: Rng) -> None:
    """Changes ids, shapes, names and operands of the ops of a program."""
    every = [i for c in module.computations for i in c.instructions]
    if rng.random() < 0.2 and len(module.computations):
        module.entry_computation_id = _one(_EXTREMES, rng)
    for i in _some(every, rng, 30):
        what = int(rng.integers(7))
        if what == 0:
            i.id = _one([_one(every, rng).id, *_EXTREMES], rng)
        elif what == 1:
            i.operand_ids.append(_one([_one(every, rng).id, *_EXTREMES], rng))
        elif what == 2:
            del i.operand_ids[:]
        elif what == 3:
            i.called_computation_ids.append(_one([_one(module.computations, rng).id, *_EXTREMES], rng))
        elif what == 4:
            i.shape.dimensions.append(_one(_EXTREMES, rng))
        elif what == 5:
            i.opcode = str(
                rng.choice(["while", "fusion", "dot", "all-reduce", "custom-call", "", "parameter"])
            )
        else:
            i.name = _one(_WORDS, rng)


MUTATIONS: tuple[Callable[[Any, Rng], None], ...] = (
    drop_events,
    double_events,
    move_events,
    stretch_events,
    extreme_times,
    shift_line,
    swap_metadata,
    drop_metadata,
    rename,
    change_stats,
    planes_elsewhere,
    change_programs,
)


def _flipped(data: bytes, rng: Rng) -> bytes:
    """Returns the bytes with up to eight of them changed."""
    out = bytearray(data)
    for at in rng.integers(0, len(out), int(rng.integers(1, 9))).tolist() if out else ():
        out[at] = int(rng.integers(256))
    return bytes(out)


def mutated_planes(data: bytes, rng: Rng) -> tuple[bytes, list[str]]:
    """Returns a profile with one to four mutations, and their names. data: an XSpace, not packed."""
    space = parse("XSpace", data, "a seed")
    done = []
    for _ in range(int(rng.integers(1, 5))):
        change = MUTATIONS[int(rng.integers(len(MUTATIONS)))]
        change(space, rng)
        done.append(change.__name__)
    out: bytes = space.SerializeToString()
    if rng.random() < 0.1:
        out = _flipped(out, rng) if rng.random() < 0.5 else out[: int(rng.integers(len(out) + 1))]
        done.append("bytes")
    return out, done
