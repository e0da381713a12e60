"""Fills timeline columns event by event, within limits, and counts events that are left out.

``Builder`` makes the timeline of one rank. The functions below it mend timelines, divide them by device, and combine
those of several ranks.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pase.replay.traces.reader import LIMITS, Limits
from pase.replay.types import (
    COLLECTIVE,
    COLUMNS,
    GPU_KINDS,
    CompiledOp,
    Group,
    Lane,
    Mark,
    Problem,
    Shapes,
    Timeline,
)

__all__ = ["Builder", "combine", "is_sound", "split_devices"]

_FAR_NS = 1 << 61
"""The bound of valid times and other numbers. Sums and differences of two of them still fit into 64 bits."""


def is_sound(start_ns: int, duration_ns: int) -> bool:
    """Whether these are valid times: the duration is not negative, and both fit into 64 bits with room to spare."""
    return 0 <= duration_ns < _FAR_NS and -_FAR_NS < start_ns < _FAR_NS


_JUMP_NS = 600 * 10**9
"""Ten minutes. If there is no event for this long, the clock was set, or the file contains two runs."""


class Builder:
    """Builds the timeline of one rank.

    Readers first ask for the indices of names, lanes, shapes and groups, and then ``add`` events. They write the other
    public attributes directly.
    """

    def __init__(self, where: str, rank: int, limits: Limits = LIMITS) -> None:
        self.where, self.rank, self.limits = where, rank, limits
        self._columns = {k: array(np.dtype(t).char) for k, t in COLUMNS.items()}
        self._append = tuple(c.append for c in self._columns.values())
        self._count = 0
        self.names: dict[str, int] = {}
        self.lanes: dict[tuple[object, bool], int] = {}
        self.lane_names: list[str] = []
        self.groups: dict[str, tuple[int, ...]] = {}
        self.shapes: dict[tuple[Shapes, tuple[int, ...], int], int] = {}
        self.marks: list[Mark] = []
        self.left_out: Counter[str] = Counter()
        self.noted: Counter[str] = Counter()
        """Numbers of events that were read although they have a fault, by fault."""
        self.dataflow: dict[str, tuple[str, ...]] = {}
        self.host = ""

    def name(self, text: str) -> int:
        """Returns the index of a name."""
        known = self.names.get(text)
        if known is not None:
            return known
        if len(self.names) >= self.limits.names:
            self.left_out[f"names beyond the first {self.limits.names} (their events share one name)"] += 1
            text = "(other names)"
        elif len(text) > self.limits.name_chars:
            text = text[: self.limits.name_chars]
        return self.names.setdefault(text, len(self.names))

    def lane(self, key: object, device: bool, label: str) -> int:
        """Returns the index of a lane; −1 if it is new and the limit of lanes is reached."""
        known = self.lanes.get((key, device))
        if known is not None:
            return known
        if len(self.lanes) >= self.limits.lanes:
            return -1
        self.lanes[(key, device)] = len(self.lane_names)
        self.lane_names.append(label[:100])
        return len(self.lane_names) - 1

    def shape(self, operands: Shapes, widths: tuple[int, ...] = (), flops: int = 0) -> int:
        """Returns the index of an op's operand shapes; −1 if they are new and the limit of names is reached.

        widths: bytes per element of each operand, 0 if unknown. flops: of the op, 0 if its arguments do not state them.
        """
        key = (operands, widths, flops)
        if len(self.shapes) >= self.limits.names:
            return self.shapes.get(key, -1)
        return self.shapes.setdefault(key, len(self.shapes))

    def group(self, name: str, ranks: tuple[int, ...] = ()) -> int:
        """Returns the index of a group of ranks. ranks: empty if they are not known (yet)."""
        if name not in self.groups or (ranks and not self.groups[name]):
            self.groups[name] = ranks
        return list(self.groups).index(name)

    def add(
        self,
        lane: int,
        kind: int,
        name: int,
        start_ns: int,
        duration_ns: int,
        correlation: int = -1,
        nbytes: int = -1,
        operation: int = 0,
        group: int = -1,
        iteration: int = -1,
        shape: int = -1,
    ) -> None:
        """Appends one event, or counts why it cannot be used. The arguments are the timeline's columns (``Event``)."""
        if lane < 0:
            self.left_out[f"events on threads beyond the first {self.limits.lanes} of this rank"] += 1
        elif not is_sound(start_ns, duration_ns):
            self.left_out["events with a negative or absurd time or duration"] += 1
        elif self._count >= self.limits.events:
            self.left_out[f"events beyond the first {self.limits.events}"] += 1
        else:
            if not -1 <= correlation < _FAR_NS:
                correlation = -1
            if not -1 <= nbytes < _FAR_NS:
                nbytes = -1
            self._count += 1
            # Unrolled, because this runs for every event of a trace, and a loop takes four times as long.
            to = self._append
            to[0](lane)
            to[1](kind)
            to[2](name)
            to[3](start_ns)
            to[4](duration_ns)
            to[5](correlation)
            to[6](nbytes)
            to[7](operation)
            to[8](group)
            to[9](iteration)
            to[10](shape)

    def __len__(self) -> int:
        return self._count

    def finish(self) -> Timeline:
        """Returns the rank's timeline: sorted, without clock jumps, and with its problems."""
        columns = {k: np.frombuffer(self._columns[k], dtype=t) for k, t in COLUMNS.items()}
        problems = [
            Problem(where=self.where, what=f"{n} {what}, left out") for what, n in self.left_out.items()
        ]
        problems += [Problem(where=self.where, what=f"{n} {what}") for what, n in self.noted.items()]
        keep = _largest_cluster(columns["start_ns"])
        if keep is not None:
            lost = len(keep) - int(keep.sum())
            columns = {k: v[keep] for k, v in columns.items()}
            problems.append(
                Problem(
                    where=self.where,
                    what=f"the clock jumps by more than ten minutes; {lost} events before or after it are left out",
                )
            )
        # Sort an enclosing event before the events inside it.
        order = np.lexsort((-columns["duration_ns"], columns["start_ns"], columns["lane"]))
        device = {i: dev for (_, dev), i in self.lanes.items()}
        for k in COLUMNS:
            # Sort one column at a time and free its unsorted form, so that a large trace is in memory only once.
            columns[k] = columns[k][order]
            self._columns[k] = array(np.dtype(COLUMNS[k]).char)
        return Timeline(
            columns=columns,
            names=tuple(self.names),
            lanes=tuple(
                Lane(rank=self.rank, name=n, device=device[i]) for i, n in enumerate(self.lane_names)
            ),
            groups=tuple(Group(name=n, ranks=r) for n, r in self.groups.items()),
            marks=tuple(sorted(self.marks, key=lambda m: m.start_ns)),
            problems=tuple(problems),
            hosts={self.rank: self.host} if self.host else {},
            dataflow=self.dataflow,
            **_shapes(self.shapes),
        )


def _largest_cluster(starts: np.ndarray) -> np.ndarray | None:
    """Returns a mask of the largest set of events without a gap of ten minutes; None if there is no such gap."""
    if len(starts) < 2:
        return None
    order = np.argsort(starts, kind="stable")
    cuts = np.flatnonzero(np.diff(starts[order]) > _JUMP_NS) + 1
    if not len(cuts):
        return None
    edges = np.concatenate(([0], cuts, [len(starts)]))
    best = int(np.diff(edges).argmax())
    keep = np.zeros(len(starts), dtype=bool)
    keep[order[edges[best] : edges[best + 1]]] = True
    return keep


def without_overruns(t: Timeline) -> Timeline:
    """Shortens device ops that end after the next op of their stream, and reports them as a Problem.

    A stream runs its launches in order, so an op that outlasts the op of the next launch has a wrong end. (ROCm's
    profiler writes such ends.) It is shortened to end where the next op begins. Ops of one launch (a CUDA graph) may
    run at the same time, and consecutive ops may overlap partly (programmatic dependent launch).
    """
    ops = np.flatnonzero(
        np.isin(t["kind"], GPU_KINDS) & np.array([x.device for x in t.lanes] + [False])[t["lane"]]
    )
    lane, start, end, launch = (c[ops] for c in (t["lane"], t["start_ns"], t.end_ns, t["correlation"]))
    if len(ops) < 2:
        return t
    new_launch = (
        (lane[1:] == lane[:-1]) & (launch[1:] != launch[:-1]) & (launch[1:] >= 0) & (launch[:-1] >= 0)
    )
    wrong = np.flatnonzero(new_launch & (end[:-1] > end[1:]) & (start[1:] > start[:-1]))
    if not len(wrong):
        return t
    durations = t["duration_ns"].copy()
    durations[ops[wrong]] = start[wrong + 1] - start[wrong]
    worst = ops[wrong[np.argmax(end[wrong] - end[wrong + 1])]]
    stream = t.lanes[int(t["lane"][worst])]
    what = (
        f"{len(wrong)} ops outlast the next op of their stream, which is impossible, so they are ended where the next "
        f"op begins; the worst is '{t.names[int(t['name'][worst])]}' on stream {stream.name}"
    )
    problem = Problem(where=f"rank {stream.rank}", what=what)
    return replace(t, columns={**t.columns, "duration_ns": durations}, problems=(*t.problems, problem))


def split_devices(
    t: Timeline, executions: list[tuple[int, Mark]] | None = None, devices: dict[int, str] | None = None
) -> Timeline:
    """Makes one rank per device if a process drives several devices (XLA lanes are named "device:stream").

    Device d of process p becomes rank p · devices + d. The first of these ranks gets the process's CPU threads. Every
    rank gets the marks of the process's iterations, because the devices share a clock. If no iteration is marked, each
    rank gets the executions of programs on its device instead.

    executions: (device, mark) of each execution. devices: the names of devices, by number.
    """
    name_parts = [lane.name.partition(":") if lane.device else ("", "", "") for lane in t.lanes]
    numbers = sorted({int(p[0]) for p in name_parts if p[1] and p[0].isdigit()})
    if not numbers:
        return t
    base = t.lanes[0].rank * len(numbers)
    lanes = [
        Lane(
            rank=base + (numbers.index(int(p[0])) if p[1] else 0), name=p[2] or lane.name, device=lane.device
        )
        for lane, p in zip(t.lanes, name_parts, strict=True)
    ]
    ranks = range(base, base + len(numbers))
    marks = tuple(replace(m, rank=r) for r in ranks for m in t.marks)
    if not marks:
        marks = tuple(replace(m, rank=base + numbers.index(d)) for d, m in executions or () if d in numbers)
    host = next(iter(t.hosts.values()), "")
    groups = tuple(Group(name=g.name, ranks=g.ranks or tuple(ranks) * (len(numbers) > 1)) for g in t.groups)
    known = {base + numbers.index(d): name for d, name in (devices or {}).items() if d in numbers}
    return replace(
        t,
        lanes=tuple(lanes),
        marks=marks,
        groups=groups,
        hosts=dict.fromkeys(ranks, host) if host else {},
        devices=known,
    )


def combine(parts: list[Timeline], problems: list[Problem] | None = None) -> Timeline:
    """Combines the timelines of ranks into one, with merged names, groups and shapes.

    Processes may run different compiled programs, such as a pipeline's stages, whose ops have the same names. An op
    that is not what the same name is in an earlier part gets its rank in its name.
    """
    names: dict[str, int] = {}
    groups: dict[tuple[str, tuple[int, ...]], int] = {}
    shapes: dict[tuple[Shapes, tuple[int, ...], int], int] = {}
    lanes: list[Lane] = []
    columns: dict[str, list[np.ndarray]] = {k: [] for k in COLUMNS}
    compiled: dict[str, CompiledOp] = {}
    dataflow: dict[str, tuple[str, ...]] = {}
    marks: list[Mark] = []
    for t in _from_the_first(parts):
        t = _with_own_ops(t, compiled, dataflow)
        compiled.update(t.compiled)
        for op, reads in t.dataflow.items():
            dataflow[op] = tuple(dict.fromkeys((*dataflow.get(op, ()), *reads)))
        name_map = np.array([names.setdefault(n, len(names)) for n in t.names], dtype=np.int32)
        # Groups of equal name and ranks are one group, as are groups of equal name whose ranks are unknown. The last
        # entry of the maps keeps an index of -1, which means none.
        keys = [(g.name, g.ranks) for g in t.groups]
        group_map = np.array([groups.setdefault(k, len(groups)) for k in keys] + [-1], dtype=np.int32)
        n = len(t.shapes)
        sized = zip(t.shapes, t.widths or [()] * n, t.flops or [0] * n, strict=True)
        shape_map = np.array([shapes.setdefault(s, len(shapes)) for s in sized] + [-1], dtype=np.int32)
        for k, v in t.columns.items():
            if k == "name":
                v = name_map[v] if len(name_map) else v
            elif k == "group":
                v = group_map[v]
            elif k == "shape":
                v = shape_map[v]
            elif k == "lane":
                v = v + np.int32(len(lanes))
            columns[k].append(v)
        lanes.extend(t.lanes)
        marks.extend(t.marks)
    return Timeline(
        columns={k: np.concatenate(v) if v else np.zeros(0, COLUMNS[k]) for k, v in columns.items()},
        names=tuple(names),
        lanes=tuple(lanes),
        groups=tuple(Group(name=n, ranks=r) for n, r in groups),
        clocks=tuple(c for t in parts for c in t.clocks),
        marks=tuple(marks),
        problems=tuple(p for t in parts for p in t.problems) + tuple(problems or ()),
        hosts={r: h for t in parts for r, h in t.hosts.items()},
        dataflow=dataflow,
        compiled=compiled,
        devices={r: d for t in parts for r, d in t.devices.items()},
        **_shapes(shapes),
    )


_ONE_CLOCK_NS = 1 << 50
"""Thirteen days. Ranks that begin further apart share no clock."""


def _from_the_first(parts: Sequence[Timeline]) -> list[Timeline]:
    """Returns the timelines with times that count from the first event.

    Profilers count from 1970. Replays and clocks are floats, which then hold 256 ns and no less. Ranks that share a
    clock are moved together. Timelines with aligned clocks stay as they are.
    """
    known = [t for t in parts if len(t)]
    if any(c.offset_ns or c.drift for t in known for c in t.clocks):
        return list(parts)
    starts = sorted(int(t["start_ns"].min()) for t in known)
    out = []
    for t in parts:
        zero = next((s for s in starts if int(t["start_ns"].min()) - s < _ONE_CLOCK_NS), 0) if len(t) else 0
        marks = [replace(m, start_ns=m.start_ns - zero, end_ns=m.end_ns - zero) for m in t.marks]
        out.append(replace(t, columns={**t.columns, "start_ns": t["start_ns"] - zero}, marks=tuple(marks)))
    return out


def _shapes(known: Collection[tuple[Shapes, tuple[int, ...], int]]) -> dict[str, Any]:
    """Returns the fields of a timeline that list operands' dims, their widths and FLOPs."""
    shapes, widths, flops = zip(*known, strict=True) if known else ((), (), ())
    return {
        "shapes": shapes,
        "widths": widths if any(widths) else (),
        "flops": flops if any(flops) else (),
    }


def _with_own_ops(
    t: Timeline, compiled: Mapping[str, CompiledOp], dataflow: Mapping[str, tuple[str, ...]]
) -> Timeline:
    """Returns the timeline with other names for ops of which other facts are known. Collectives keep their names, by
    which those of several ranks are matched."""

    def facts(op: CompiledOp) -> CompiledOp:
        return replace(op, kernel="")  # libraries may choose another kernel on another rank

    other = {n for n, op in t.compiled.items() if n in compiled and facts(compiled[n]) != facts(op)}
    other |= {n for n, reads in t.dataflow.items() if n in dataflow and dataflow[n] != reads}
    if not other:
        return t
    other -= {t.names[n] for n in np.unique(t["name"][t["kind"] == COLLECTIVE]).tolist()}
    own = {n: f"{n} (rank {min(t.ranks)})" for n in other}
    return replace(
        t,
        names=tuple(own.get(n, n) for n in t.names),
        compiled={own.get(n, n): op for n, op in t.compiled.items()},
        dataflow={own.get(n, n): tuple(own.get(r, r) for r in reads) for n, reads in t.dataflow.items()},
    )
