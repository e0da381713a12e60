"""Reads nsys-jax archives, one per process: GPU times of every XLA thunk (parquet), and the HLO of the module."""

from __future__ import annotations

import io
import lzma
import re
import zipfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from pase.errors import PaseError, needed
from pase.replay.traces.builder import Builder
from pase.replay.traces.chrome import collective_operation
from pase.replay.traces.hlo import HloFacts, read_hlo
from pase.replay.traces.reader import LIMITS, Limits, read_member
from pase.replay.types import COLLECTIVE, KINDS, Mark, Timeline

__all__ = ["is_nsys_jax", "read_nsys_jax"]

_TRACE = "nvtx_gpu_proj_trace/trace.parquet"
_HLO_OP = re.compile(r"hlo_op=([^,#]+)")
_MODULE = re.compile(r"hlo_module=([^,#]+)")
_GLOBAL = re.compile(r"Xla:#global=(\d+)")
_COLUMNS = [
    "Name",
    "Projected Start",
    "Projected Duration",
    "Orig Start",
    "Orig Duration",
    "TID",
    "RangeId",
    "ParentId",
]


def is_nsys_jax(path: Path) -> bool:
    """Whether the file is a zip archive that contains a projected thunk trace."""
    try:
        with zipfile.ZipFile(path) as z:
            return _TRACE in z.namelist()
    except (zipfile.BadZipFile, OSError, ValueError):
        return False


def read_nsys_jax(path: Path, rank: int | None = None, limits: Limits = LIMITS) -> Timeline:
    """Reads the thunks of one process: launches on its CPU thread, and ops on streams "compute" and "communication".

    Iterations are the executions of the module that took most GPU time. It needs pyarrow. Raises PaseError if the
    archive is damaged or has no execution of an XLA module.
    """
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as e:
        raise PaseError(f"not a readable zip archive ({e})", where=str(path)) from e
    with archive:
        if len(archive.infolist()) > limits.archive_members:
            raise PaseError(
                f"it has {len(archive.infolist())} members, but at most {limits.archive_members} are allowed",
                where=str(path),
            )
        table = _parquet(archive, _TRACE, _COLUMNS)
        if rank is None:
            rank = _rank(archive)
        b = Builder(str(path), rank if rank is not None else 0, limits)
        executions, thunks = _executions(table), _thunks(table)
        if not executions:
            raise PaseError(
                "no XLA module was executed while profiling",
                where=str(path),
                fix="profile while the program runs",
            )
        total: Counter[str] = Counter()
        for name, _, duration, _ in executions:
            total[name] += duration
        runs = Counter(name for name, *_ in executions)
        main = max(total, key=lambda n: (runs[n] > 1, total[n]))
        facts = _facts(archive, main, b)
        _fill(b, table, executions, thunks, main, facts)
    b.dataflow = dict(facts.reads) if facts else {}
    return b.finish()


def _parquet(archive: zipfile.ZipFile, member: str, columns: list[str] | None = None) -> dict[str, list[Any]]:
    where = str(archive.filename)
    pa, pq = needed("pyarrow", where), needed("pyarrow.parquet", where)
    try:
        source = pq.ParquetFile(io.BytesIO(read_member(archive, member)))
        if source.metadata.num_rows > LIMITS.events:
            raise PaseError(
                f"{source.metadata.num_rows} rows, but at most {LIMITS.events} are allowed",
                where=f"{archive.filename}:{member}",
                fix="profile fewer steps",
            )
        return source.read(columns=columns).to_pydict()
    except (pa.ArrowException, OSError, ValueError) as e:
        if isinstance(e, PaseError):
            raise
        raise PaseError(f"not a readable parquet file ({e})", where=f"{archive.filename}:{member}") from e


def _rank(archive: zipfile.ZipFile) -> int | None:
    if "device-metadata.parquet" not in archive.namelist():
        return None
    for values in _parquet(archive, "device-metadata.parquet").values():
        for v in values:
            m = _GLOBAL.search(v) if isinstance(v, str) else None
            if m:
                return int(m.group(1))
    return None


def _executions(t: dict[str, list[Any]]) -> list[tuple[str, int, int, int]]:
    """Returns (module, GPU start, GPU duration, range id) of every module execution, in order of time."""
    out = []
    rows = zip(t["Name"], t["Projected Start"], t["Projected Duration"], t["RangeId"], strict=True)
    for name, start, duration, range_id in rows:
        m = _MODULE.search(name) if isinstance(name, str) and name.startswith("TSL:XlaModule") else None
        if m and _is_int(range_id) and _is_int(start) and _is_int(duration):
            out.append((m.group(1), int(start), int(duration), int(range_id)))
    return sorted(out, key=lambda e: e[1])


def _is_int(x: object) -> bool:
    return isinstance(x, (int, float)) and np.isfinite(x)


def _thunks(t: dict[str, list[Any]]) -> list[int]:
    """Returns the rows of innermost thunks. A thunk that contains others, such as a while loop, is left out."""
    is_thunk = [isinstance(n, str) and n.startswith("TSL:Thunk") for n in t["Name"]]
    ids = {int(r): i for i, r in enumerate(t["RangeId"]) if _is_int(r)}
    outer = set()
    for i, parent in enumerate(t["ParentId"]):
        if is_thunk[i] and _is_int(parent):
            p = ids.get(int(parent))
            if p is not None and is_thunk[p]:
                outer.add(p)
    return [i for i, yes in enumerate(is_thunk) if yes and i not in outer]


def _facts(archive: zipfile.ZipFile, module: str, b: Builder) -> HloFacts | None:
    """Reads the HLO of the executed module, if the archive has it."""
    names = [
        n for n in archive.namelist() if n.endswith("after_optimizations.hlo.pb.xz") and f".{module}." in n
    ]
    if not names:
        b.left_out[
            f"missing HLO dump of module {module} (its collectives' sizes and groups are unknown)"
        ] += 1
        return None
    packed = read_member(archive, names[-1])
    try:
        data = lzma.LZMADecompressor(memlimit=256 << 20).decompress(packed, max_length=512 << 20)
    except lzma.LZMAError as e:
        raise PaseError(f"it cannot be decompressed ({e})", where=f"{archive.filename}:{names[-1]}") from e
    return read_hlo(data, f"{archive.filename}:{names[-1]}")


def _fill(
    b: Builder,
    t: dict[str, list[Any]],
    executions: list[tuple[str, int, int, int]],
    thunks: list[int],
    main: str,
    facts: HloFacts | None,
) -> None:
    iteration_of: dict[int, int] = {}
    for name, start, duration, range_id in executions:
        if name == main:
            n = iteration_of[range_id] = len(iteration_of)
            b.marks.append(
                Mark(rank=b.rank, iteration=n, start_ns=start, end_ns=start + duration, complete=n > 0)
            )
    module_of = {r: name for name, _, _, r in executions}
    parent = {
        int(r): int(p) for r, p in zip(t["RangeId"], t["ParentId"], strict=True) if _is_int(r) and _is_int(p)
    }
    kind_of, runtime = KINDS.index("kernel"), KINDS.index("runtime")
    seen: dict[str, int] = defaultdict(int)
    for i in thunks:
        m = _HLO_OP.search(t["Name"][i])
        op = m.group(1) if m else t["Name"][i]
        root = int(t["RangeId"][i])
        while root not in module_of and root in parent:
            root = parent[root]
        iteration = iteration_of.get(root, -1)
        operation = collective_operation(op.partition(".")[0]) if _looks_collective(op) else 0
        ours = facts if facts and iteration >= 0 else None
        separate = op in ours.asynchronous if ours else operation and "-start" in op
        group, nbytes = -1, -1
        if operation:
            members = (g for g in (ours.groups.get(op, ()) if ours else ()) if b.rank in g)
            ranks = tuple(next(members, ()))
            group = b.group(f"replicas {ranks}" if ranks else "all replicas", ranks)
            nbytes = ours.nbytes.get(op, -1) if ours else -1
        stream = "communication" if separate else "compute"
        lane = b.lane(stream, True, stream)
        seen[op] += 1
        b.add(
            lane,
            COLLECTIVE if operation else kind_of,
            b.name(op),
            int(t["Projected Start"][i]),
            int(t["Projected Duration"][i]),
            correlation=int(t["RangeId"][i]),
            nbytes=nbytes,
            operation=operation,
            group=group,
            iteration=iteration,
        )
        if _is_int(t["Orig Start"][i]) and _is_int(t["Orig Duration"][i]):
            cpu = b.lane(t["TID"][i], False, str(t["TID"][i]))
            start, duration = int(t["Orig Start"][i]), int(t["Orig Duration"][i])
            b.add(
                cpu,
                runtime,
                b.name("launch thunk"),
                start,
                duration,
                int(t["RangeId"][i]),
                iteration=iteration,
            )


def _looks_collective(op: str) -> bool:
    return op.startswith(("all-", "reduce-scatter", "collective-", "ragged-all-to-all"))
