"""Lists the tasks to measure, coarse before fine: wherever the time budget ends, the measured tables are complete."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from pase.calibrate.journal import Journal
from pase.calibrate.session import Settings, measure
from pase.calibrate.types import COLLECTIVE_OPS, CONV_OPS, FORMS, Bench, Level, Task

__all__ = ["Target", "budgeted", "ladder", "suite", "ways_of"]

SMALLEST_EXTENT = 8
SMALLEST_MESSAGE, LARGEST_MESSAGE = 1 << 10, 1 << 28
SMALLEST_TRAFFIC = 1 << 12
_WINDOWS = ((8, 31, 16, 3), (8, 15, 64, 3), (8, 16, 64, 2))
_CONVS = ((8, 32, 32, 64, 3), (8, 16, 128, 128, 3), (8, 16, 64, 256, 1), (8, 24, 16, 64, 5))


@dataclass(frozen=True, kw_only=True)
class Target:
    """The parameters that determine the sizes of the tasks.

    largest_extent: of a matmul's m, n and k. largest_traffic: bytes of a memory-bound op. ``budgeted`` chooses both
    from a first measurement of the device's speed.
    """

    levels: tuple[Level, ...]
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    largest_extent: int = 2048
    largest_traffic: int = 1 << 28


def ladder(low: int, high: int, factor: int) -> list[int]:
    """Returns low, low·factor, … up to high, and high itself.

    >>> ladder(8, 2048, 16)
    [8, 128, 2048]
    """
    out = [low]
    while out[-1] * factor < high:
        out.append(out[-1] * factor)
    return out if out[-1] >= high else [*out, high]


def ways_of(levels: tuple[Level, ...]) -> list[tuple[tuple[int, ...], int]]:
    """Returns (ways, rank) of the groups to measure: each level alone and in parts, and combinations of whole levels.

    All levels together have the same rank as each level alone. A plain data-parallel step reduces over all devices, and
    single levels do not show which algorithm a library uses across levels (one ring through all, or level by level).

    >>> ways_of((Level(name="host", ways=4), Level(name="rack", ways=2)))
    [((4, 1), 0), ((1, 2), 0), ((4, 2), 0), ((2, 1), 2)]
    """
    n = len(levels)
    found: dict[tuple[int, ...], int] = {}
    for l, level in enumerate(levels):
        if level.ways > 1:
            found[tuple(level.ways if i == l else 1 for i in range(n))] = 0
    if any(level.ways > 1 for level in levels):
        found[tuple(level.ways for level in levels)] = 0
    for chosen in itertools.product((False, True), repeat=n):
        ways = tuple(level.ways if c else 1 for c, level in zip(chosen, levels, strict=True))
        if math.prod(ways) > 1:
            found.setdefault(ways, 1)
    for l, level in enumerate(levels):
        for w in range(2, level.ways):
            if level.ways % w == 0:
                found.setdefault(tuple(w if i == l else 1 for i in range(n)), 2)
    return list(found.items())


def _matmuls(t: Target) -> list[Task]:
    out = []
    for i, dtype in enumerate(t.dtypes):
        seen: set[tuple[int, ...]] = set()
        for step, factor in enumerate((1 << 30, 16, 4, 2)):
            grid = ladder(SMALLEST_EXTENT, t.largest_extent, factor)
            points = sorted(itertools.product(grid, repeat=3), key=math.prod)
            rank = (0, 1, 3, 5)[step] + (i > 0)
            for point in points:
                if point not in seen:
                    seen.add(point)
                    out += [Task(op=f, dtype=dtype, extents=(1, *point), rank=rank) for f in FORMS]
        # Witnesses: extents off the grid, and batched products, as real programs have. The table is not fitted to them.
        side = max(t.largest_extent // 8, 16)
        for batch, m, n, k in (
            (1, 3 * side // 2, side // 2 + 8, 2 * side - 16),
            (1, 24, 3 * side, side),
            (8, side, side // 4, side // 2),
            (32, side // 4, side // 4, 16),
        ):
            for f in FORMS:
                out.append(Task(op=f, dtype=dtype, extents=(batch, m, n, k), rank=3 + (i > 0), witness=True))
    return out


def _memory(t: Target) -> list[Task]:
    out, seen = [], set()
    for rank, factor in ((0, 64), (2, 8), (4, 2)):
        for nbytes in ladder(SMALLEST_TRAFFIC, t.largest_traffic, factor):
            if nbytes not in seen:
                seen.add(nbytes)
                out.append(Task(op="elementwise", nbytes=nbytes, rank=rank))
                out.append(Task(op="reduction", nbytes=nbytes, rank=rank))
    return out


def _collectives(t: Target) -> list[Task]:
    out = []
    for ways, first in ways_of(t.levels):
        total = math.prod(ways)
        seen = set()
        for rank, factor in ((0, 64), (1, 4), (4, 2)):
            for size in ladder(SMALLEST_MESSAGE, LARGEST_MESSAGE, factor):
                # Round up to a whole number of float32 elements per device of the group.
                nbytes = -(-size // (4 * total)) * 4 * total
                if nbytes in seen:
                    continue
                seen.add(nbytes)
                for op in COLLECTIVE_OPS:
                    out.append(Task(op=op, nbytes=nbytes, ways=ways, rank=rank + first))
    return out


def suite(target: Target) -> list[Task]:
    """Returns all tasks, sorted by rank and, within a rank, from small to large."""
    tasks = [
        Task(op="launch"),
        Task(op="dispatch"),
        Task(op="host.program"),
        Task(op="host.op"),
        Task(op="vector", nbytes=1 << 17),
        Task(op="light"),
        # These come first within their rank, so that a short budget does not end before them.
        *(Task(op="window", extents=w, rank=1) for w in _WINDOWS),
        *(Task(op=op, extents=c, rank=1) for c in _CONVS for op in CONV_OPS),
        *_memory(target),
        *_matmuls(target),
        *_collectives(target),
    ]
    unique: dict[str, Task] = {}
    for task in sorted(tasks, key=lambda t: t.rank):
        unique.setdefault(task.key, task)
    return list(unique.values())


def budgeted(
    bench: Bench,
    journal: Journal,
    settings: Settings,
    levels: tuple[Level, ...],
    dtypes: tuple[str, ...],
    memory_bytes: int,
) -> Target:
    """Returns the target whose sizes suit the budget, from a first measurement of the device.

    The first samples are kept in the journal like all others.
    """
    looks = (
        Task(op="matmul.nn", dtype=dtypes[0], extents=(1, 128, 128, 128)),
        Task(op="elementwise", nbytes=1 << 21),
    )
    rates = []
    for task in looks:
        known = bench.share([float(task.key in journal.samples)])[0][0] > 0
        if not known:
            journal.add(measure(task, bench, settings))
        mine = journal.samples[task.key].seconds if task.key in journal.samples else 0.0
        rates.append(task.work / bench.share([mine])[0][0])
    allowed_s = settings.budget_s / 60
    runs = 2 + settings.repeats[0]
    extent = max(
        (
            e
            for e in (128, 512, 2048, 8192)
            if 2 * e**3 / rates[0] * runs < allowed_s and 24 * e * e < memory_bytes
        ),
        default=128,
    )
    traffic = max(
        (1 << e for e in range(18, 33) if (1 << e) / rates[1] * runs < allowed_s and 8 << e < memory_bytes),
        default=1 << 18,
    )
    return Target(levels=levels, dtypes=dtypes, largest_extent=extent, largest_traffic=traffic)
