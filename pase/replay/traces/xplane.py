"""Reads XLA profiler planes (.xplane.pb), which jax.profiler writes for GPU, TPU and CPU."""

from __future__ import annotations

import gzip
import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.files.json_values import JsonObject
from pase.files.terminal import printable
from pase.hlo.protos import parse
from pase.replay.kernels import operation_of
from pase.replay.traces.builder import Builder, is_sound, split_devices
from pase.replay.traces.chrome import CPU_LINE, DEVICE_LINES, hlo_collective, step_marks, xla_lane
from pase.replay.traces.hlo import HloFacts, read_hlo, with_updates
from pase.replay.traces.launches import Kernels, graph_kernel, in_graph, named
from pase.replay.traces.programs import of_program, program_of, told_apart
from pase.replay.traces.reader import LIMITS, Limits
from pase.replay.traces.xla import Executions, describe, untangle
from pase.replay.types import COLLECTIVE, CPU, KINDS, Problem, Timeline

if TYPE_CHECKING:
    from google.protobuf.message import Message

__all__ = ["read_xplane"]

_LAUNCH = re.compile(r"^(cu|hip|cuda)[A-Z]\w*")
_MESSAGE = 2 << 30
_SYNTHETIC = ("ThreadpoolListener::", "end: ")


def read_xplane(path: Path, rank: int | None = None, limits: Limits = LIMITS) -> Timeline:
    """Reads the events of one process, with one rank for each device. Steps are StepTraceAnnotations.

    Raises PaseError if the file is not an XSpace or has no usable event.
    """
    space = parse("XSpace", _bytes(path, limits), str(path))
    b = Builder(str(path), rank or 0, limits)
    begun = _start_ns(space)
    if begun:
        # Times count from the profile's start. If that is known, processes on one machine share a clock.
        b.host = space.hostnames[0] if space.hostnames else ""
    steps: list[tuple[int, int, int]] = []
    executions, kernels = Executions(), Kernels()
    for plane in space.planes:
        _plane(plane, b, steps, executions, kernels, begun)
    if not len(b):
        raise PaseError(
            f"no usable event in {len(space.planes)} planes ({printable('; '.join(b.left_out)) or 'empty'})",
            where=str(path),
        )
    b.marks.extend(step_marks(steps, b.rank, False))
    marks = executions.marks(b.rank)
    t = b.finish()
    lanes = [x.name.partition(":") for x in t.lanes if x.device]
    on_cpu = {int(number): CPU for number, _, line in lanes if line == CPU_LINE}
    t = split_devices(t, marks, _devices(space) or on_cpu)
    held, unknown = _facts(space, t.names, str(path))
    problems = [Problem(where=f"rank {t.ranks[0]}", what=what) for what in unknown]
    facts, t = with_updates(held), replace(t, problems=(*t.problems, *problems))
    t = named(t, facts, kernels)
    t, known, ran = told_apart(t, facts, executions.main(), kernels.longest)
    return untangle(t if known is None else describe(t, known, ran))


def _bytes(path: Path, limits: Limits) -> bytes:
    """Returns the bytes of a file that may be packed by gzip. Raises PaseError if they are too many for protobuf."""
    size = path.stat().st_size
    most = _MESSAGE if path.suffix != ".gz" else int(min(_MESSAGE, limits.unpacked(size)))
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as f:
            data = f.read(most + 1) if size <= _MESSAGE else b""
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise PaseError(f"it cannot be decompressed ({e})", where=str(path)) from e
    if size > _MESSAGE or len(data) > most:
        raise PaseError(
            f"it has more than {most >> 20} MiB; protobuf messages have at most 2 GiB, and a packed file at most "
            f"{limits.ratio:.0f} times its size",
            where=str(path),
            fix="profile fewer steps",
        )
    return data


def _devices(space: Message) -> dict[int, str]:
    """Returns the number and the name of each device that has a plane with its name."""
    out: dict[int, str] = {}
    for plane in space.planes:
        number = plane.name.rpartition(":")[2]
        if plane.name.startswith("/device:") and number.isdigit():
            names = {k: v.name for k, v in plane.stat_metadata.items()}
            stats = {names.get(s.metadata_id): s.str_value for s in plane.stats}
            found = stats.get("gpu_device_name") or stats.get("device_type_string")
            if found:
                out[int(number)] = found
    return out


def _facts(space: Message, names: Sequence[str], where: str) -> tuple[dict[str, HloFacts], list[str]]:
    """Returns the facts of the programs that ran, and what is not known of them.

    names: of events, with their programs (``of_program``). The profiler writes the HLO of all compiled programs into a
    separate plane, by name and number. An executable from JAX's persistent cache runs under another number, and is
    found by its ops.
    """
    ran: dict[str, set[str]] = defaultdict(set)
    for op, program in map(program_of, names):
        if program:
            ran[program].add(op)
    held = {
        m.name: data
        for plane in space.planes
        if plane.name == "/host:metadata"
        for m in plane.event_metadata.values()
        if (data := next((s.bytes_value for s in m.stats if s.bytes_value), b""))
    }
    out: dict[str, HloFacts] = {}
    unknown = []
    for program, ops in ran.items():
        # Profilers that do not record a program's number name it only.
        by_name = [h for h in held if h.partition("(")[0] == program.partition("(")[0]]
        exact = [h for h in by_name if h == program] or ([] if program.endswith(")") else by_name[:1])
        read = {h: read_hlo(held[h], f"{where}: {h}") for h in exact or by_name}
        if not exact:
            read = {h: f for h, f in read.items() if len(ops & f.ops.keys()) > len(ops) / 2}
            if len(read) > 1:
                unknown.append(
                    f"{len(read)} compiled programs {program.partition('(')[0]} could be the one that ran (it was read "
                    "from a compilation cache, under another number), so its ops have no names of the user"
                )
                continue
        for found in read.values():
            out[program] = found
    return out, unknown


def _start_ns(space: Message) -> int:
    """Returns the wall-clock time at which the profile began; 0 if the file does not have it."""
    for plane in space.planes:
        names = {k: v.name for k, v in plane.stat_metadata.items()}
        for s in plane.stats:
            if names.get(s.metadata_id) == "profile_start_time":
                return _number(s) if _number(s) > 0 else 0
    return 0


def _plane(
    plane: Message,
    b: Builder,
    steps: list[tuple[int, int, int]],
    executions: Executions,
    kernels: Kernels,
    begun: int,
) -> None:
    stat_names = {k: v.name for k, v in plane.stat_metadata.items()}
    device_plane = plane.name.startswith("/device:")
    if not device_plane and not plane.name.startswith("/host:CPU"):
        return
    into = _PlaneReading(b=b, stat_names=stat_names, steps=steps, executions=executions, kernels=kernels)
    for line in plane.lines:
        label = line.display_name or line.name
        if device_plane and not label.startswith(DEVICE_LINES):
            continue
        for e in line.events:
            stats = {stat_names.get(s.metadata_id, ""): s for s in e.stats}
            meta = plane.event_metadata.get(e.metadata_id)
            text = (meta.display_name or meta.name) if meta else "(unnamed)"
            if text.startswith(_SYNTHETIC):
                continue
            start = begun + line.timestamp_ns + e.offset_ps // 1000
            _event(into, plane.name, (line.id, label), text, start, max(0, e.duration_ps) // 1000, stats)


@dataclass(frozen=True, kw_only=True)
class _PlaneReading:
    """What the events of a plane are added to, and the names of the plane's statistics."""

    b: Builder
    stat_names: dict[int, str]
    steps: list[tuple[int, int, int]]
    executions: Executions
    kernels: Kernels


def _event(
    into: _PlaneReading,
    plane: str,
    line: tuple[int, str],
    text: str,
    start: int,
    duration: int,
    stats: JsonObject,
) -> None:
    b, stat_names = into.b, into.stat_names
    op = _text(stats.get("hlo_op"), stat_names)
    correlation = _number(stats.get("correlation_id"))
    name, ordinal = xla_lane(
        plane, line[1], _number(stats.get("device_ordinal")) if "device_ordinal" in stats else None
    )
    if name and (op or plane.startswith("/device:")):
        # In a CUDA graph, the profiler knows only the graph, so its ops are found by their kernels (``named``).
        known = "" if in_graph(op) else op
        lane = b.lane((name, ordinal), True, f"{ordinal}:{name}")
        operation = hlo_collective(known or text) or operation_of(text)
        group = b.group("") if operation else -1
        kind = COLLECTIVE if operation else KINDS.index("kernel")
        # Programs may share a name, such as a step that was compiled twice, or two plans of one model.
        program = _number(stats.get("program_id"))
        module = _text(stats.get("hlo_module"), stat_names) + (f"({program})" if program >= 0 else "")
        name_of = of_program(graph_kernel(text) if in_graph(op) else known or text, module if op else "")
        b.add(lane, kind, b.name(name_of), start, duration, correlation, -1, operation, group)
        if known:
            into.kernels.add(name_of, text, duration)
        if op:
            run = stats.get("run_id")
            into.executions.add(
                ordinal,
                module,
                str(run.int64_value or run.uint64_value) if run else "",
                start,
                start + duration,
                line[1],
                known or text,
            )
        return
    lane = b.lane(line, False, line[1] or str(line[0]))
    step = _number(stats.get("step_num"))
    if step >= 0 and is_sound(start, duration):
        into.steps.append((start, start + duration, step))
    launches = correlation >= 0 and _LAUNCH.match(text)
    b.add(
        lane, KINDS.index("runtime" if launches else "annotation"), b.name(text), start, duration, correlation
    )


def _number(stat: Message) -> int:
    if stat is None:
        return -1
    value = stat.int64_value or stat.uint64_value
    if not value and stat.str_value.isdigit() and len(stat.str_value) < 19:
        value = int(stat.str_value)
    return value if 0 <= value < 1 << 61 else -1


def _text(stat: Message, stat_names: dict[int, str]) -> str:
    if stat is None:
        return ""
    return stat.str_value or (stat_names.get(stat.ref_value, "") if stat.ref_value else "")
