"""Reads and writes timelines as versioned JSON (timeline.schema.json), and writes Chrome/Perfetto traces."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Collection
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from pase.errors import PaseError
from pase.files.atomic import write_atomically
from pase.files.codec import convert, form_of, json_schema, to_builtins, to_tree, value_of
from pase.files.json_values import Json, JsonObject
from pase.replay.traces.perfetto import MEMORY, counters, flows
from pase.replay.types import (
    COLUMNS,
    KINDS,
    OPERATIONS,
    Clock,
    CompiledOp,
    Group,
    Lane,
    Mark,
    Problem,
    Shapes,
    Timeline,
)

__all__ = [
    "SCHEMA",
    "chrome_trace",
    "from_json",
    "load_timeline",
    "made_schema",
    "save_timeline",
    "schema",
    "to_json",
]

TimelineVersion = Literal["pase.timeline/1"]
SCHEMA: TimelineVersion = "pase.timeline/1"

Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
IndexOrNone = Annotated[int, Meta(ge=-1, le=2**31 - 1, description="-1 if unknown")]
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class LaneForm(Struct, kw_only=True):
    """A queue that runs one op at a time: a CPU thread or a device stream of one rank."""

    rank: Index
    name: str
    device: bool


class GroupForm(Struct, kw_only=True):
    """The ranks that take part in a collective; empty if they are not in the trace."""

    name: str
    ranks: tuple[int, ...]


class ClockForm(Struct, kw_only=True):
    """Global time = local time + offset + drift · (local time - reference); nanoseconds."""

    rank: int
    offset_ns: float = 0.0
    drift: float = 0.0
    reference_ns: Whole = 0
    uncertainty_ns: Annotated[
        float | None, Meta(description="null if nothing connects this rank to the others")
    ] = 0.0


class ColumnsForm(Struct, kw_only=True):
    """One entry per event. lane, kind, name, operation, group and shape are indices of the lists above. shape is absent
    if there are no shapes."""

    lane: list[Index]
    kind: list[Annotated[int, Meta(ge=0, lt=len(KINDS))]]
    name: list[Index]
    start_ns: list[Whole]
    duration_ns: list[Annotated[int, Meta(ge=0, le=2**63 - 1)]]
    correlation: list[Whole]
    nbytes: list[Whole]
    operation: list[Annotated[int, Meta(ge=0, lt=len(OPERATIONS))]]
    group: list[IndexOrNone]
    iteration: list[IndexOrNone]
    shape: list[IndexOrNone] | UnsetType = UNSET


class TimelineForm(Struct, kw_only=True):
    """Events of a distributed run as columns. Times are in nanoseconds on each rank's own clock."""

    schema: TimelineVersion
    kinds: tuple[str, ...] = KINDS
    operations: tuple[str, ...] = OPERATIONS
    names: tuple[str, ...]
    lanes: tuple[LaneForm, ...]
    groups: tuple[GroupForm, ...]
    clocks: tuple[ClockForm, ...] = ()
    marks: tuple[Mark, ...] = ()
    problems: tuple[Problem, ...] = ()
    hosts: dict[int, str] = {}
    dataflow: dict[str, tuple[str, ...]] = {}
    shapes: tuple[Shapes, ...] | UnsetType = UNSET
    compiled: dict[str, CompiledOp] | UnsetType = UNSET
    widths: tuple[tuple[int, ...], ...] | UnsetType = UNSET
    flops: tuple[int, ...] | UnsetType = UNSET
    devices: dict[int, str] | UnsetType = UNSET
    columns: ColumnsForm


def made_schema() -> JsonObject:
    """Returns the JSON Schema of a timeline, made from ``TimelineForm``. The committed file equals it."""
    return json_schema(TimelineForm, "pase.timeline/1: the events of a run")


def schema() -> JsonObject:
    """Returns the published JSON Schema of the timeline file."""
    return json.loads(resources.files("pase.replay").joinpath("timeline.schema.json").read_text())


def to_json(t: Timeline) -> JsonObject:
    """Returns the timeline as JSON-ready values; see timeline.schema.json."""
    tree: JsonObject = to_tree(_form_of(t))
    return tree


def _form_of(t: Timeline) -> TimelineForm:
    return form_of(
        t,
        TimelineForm,
        schema=SCHEMA,
        lanes=tuple(form_of(x, LaneForm) for x in t.lanes),
        groups=tuple(form_of(g, GroupForm) for g in t.groups),
        clocks=tuple(_clock_form(c) for c in t.clocks),
        columns=ColumnsForm(
            **{k: v.tolist() for k, v in t.columns.items() if k != "shape"},
            shape=t["shape"].tolist() if t.shapes else UNSET,
        ),
    )


def _clock_form(c: Clock) -> ClockForm:
    known = math.isfinite(c.uncertainty_ns)
    return form_of(c, ClockForm, uncertainty_ns=c.uncertainty_ns if known else None)


def _clock_of(form: ClockForm) -> Clock:
    known = form.uncertainty_ns is not None
    return value_of(form, Clock, uncertainty_ns=form.uncertainty_ns if known else math.inf)


def from_json(d: Json, where: str = "timeline") -> Timeline:
    """Converts the result of to_json back. Raises PaseError, which names the file and the first invalid place."""
    if not isinstance(d, dict) or not str(d.get("schema", "")).startswith("pase.timeline/"):
        raise PaseError(f'it is not a pase timeline (no "schema": "{SCHEMA}")', where=where)
    if d["schema"] != SCHEMA:
        raise PaseError(
            f"schema is {d['schema']!r}, but this version of pase reads {SCHEMA!r}",
            where=where,
            fix="use the version of pase that wrote it",
        )
    form = convert(d, TimelineForm, f"{where}: a broken timeline")
    if form.kinds != KINDS or form.operations != OPERATIONS:
        raise PaseError(f"its kinds or operations of events differ from those of {SCHEMA}", where=where)
    given = {k: getattr(form.columns, k) for k in COLUMNS}
    if given["shape"] is UNSET:
        given["shape"] = [-1] * len(given["lane"])
    shapes = () if form.shapes is UNSET else form.shapes
    for name in ("widths", "flops"):
        given_of = getattr(form, name)
        if given_of is not UNSET and given_of and len(given_of) != len(shapes):
            raise PaseError(f"the lists of shapes and of {name} have different lengths", where=where)
    columns = {k: np.array(given[k], dtype) for k, dtype in COLUMNS.items()}
    if len({len(c) for c in columns.values()}) != 1:
        raise PaseError("the columns of the timeline have different lengths", where=where)
    tables = (("lane", form.lanes), ("name", form.names), ("group", form.groups), ("shape", shapes))
    for column, table in tables:
        if int(columns[column].max(initial=-1)) >= len(table):
            raise PaseError(f"column '{column}' has an index beyond its table of {len(table)}", where=where)
    return value_of(
        form,
        Timeline,
        columns=columns,
        lanes=tuple(value_of(x, Lane) for x in form.lanes),
        groups=tuple(value_of(g, Group) for g in form.groups),
        clocks=tuple(map(_clock_of, form.clocks)),
    )


def save_timeline(
    t: Timeline,
    path: str | Path,
    *,
    critical: Collection[int] = (),
    findings: Collection[JsonObject] = (),
    chrome: bool = True,
) -> None:
    """Writes a timeline as JSON, gzipped if the name ends in .gz.

    critical, findings: see ``chrome_trace``.
    chrome: add the events in the format that Perfetto and chrome://tracing load, so that one file serves both.
    """
    d = to_builtins(_form_of(t))
    if chrome:
        d |= chrome_trace(t, critical, findings)
    text = json.dumps(d, separators=(",", ":"), allow_nan=False).encode()
    path = Path(path)
    write_atomically(path, [gzip.compress(text, 6, mtime=0) if path.suffix == ".gz" else text])


def load_timeline(path: str | Path) -> Timeline:
    """Reads a timeline that save_timeline wrote. Raises PaseError if the file is invalid."""
    from pase.replay.traces.reader import read_small_json

    return from_json(read_small_json(Path(path)), str(path))


_FIRST_LANE = 10
"""The track of a rank's first lane. The tracks before it have the critical path, findings and iterations."""


def chrome_trace(
    t: Timeline, critical: Collection[int] = (), findings: Collection[JsonObject] = ()
) -> JsonObject:
    """Returns the timeline on the common clock, in the trace format that Perfetto and chrome://tracing load.

    critical: indices of events on the critical path. They are also drawn on a separate track for each rank, and have an
    argument ``critical``.
    findings: dicts with rank, name, start_ns and duration_ns (on the common clock), which are drawn as a track.

    Arrows go from the last rank of a collective to the ranks that waited for it. Counters show bandwidth and memory.
    """
    out: list[JsonObject] = []
    for rank in t.ranks:
        label = f"rank {rank}" + (f" on {t.hosts[rank]}" if rank in t.hosts else "")
        out.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": label}})
        for tid, name in ((0, "critical path"), (1, "findings"), (2, "iterations")):
            out.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}})
    drawn = set(t["lane"][(t["kind"] != MEMORY) | (t["nbytes"] < 0)].tolist())
    for i, lane in enumerate(t.lanes):
        if i not in drawn:
            continue
        label = ("stream " if lane.device else "thread ") + lane.name
        out.append(
            {
                "ph": "M",
                "name": "thread_name",
                "pid": lane.rank,
                "tid": i + _FIRST_LANE,
                "args": {"name": label},
            }
        )
    starts = t.global_start_ns()
    zero = float(starts.min()) if len(t) else 0.0
    marked = set(critical)
    names, cols = t.names, {k: v.tolist() for k, v in t.columns.items()}
    ranks = t.rank_of.tolist()
    for i, s in enumerate(((starts - zero) / 1e3).tolist()):
        if cols["kind"][i] == MEMORY and cols["nbytes"][i] >= 0:
            continue  # a counter
        args: JsonObject = {"kind": KINDS[cols["kind"][i]]}
        for key in ("correlation", "nbytes", "iteration"):
            if cols[key][i] >= 0:
                args[key] = cols[key][i]
        if cols["group"][i] >= 0:
            args["group"] = t.groups[cols["group"][i]].name
        e = {"ph": "X", "name": names[cols["name"][i]], "cat": args["kind"], "ts": s}
        e |= {
            "dur": cols["duration_ns"][i] / 1e3,
            "pid": ranks[i],
            "tid": cols["lane"][i] + _FIRST_LANE,
            "args": args,
        }
        if i in marked:
            args["critical"] = True
            out.append({**e, "tid": 0, "cat": "critical"})
        out.append(e)
    for m in t.marks:
        a, b = t.clock(m.rank).to_global(np.array([m.start_ns, m.end_ns])).tolist()
        e = {"ph": "X", "name": f"iteration {m.iteration}", "cat": "iteration", "ts": (a - zero) / 1e3}
        out.append({**e, "dur": (b - a) / 1e3, "pid": m.rank, "tid": 2, "args": {"complete": m.complete}})
    for f in findings:
        e = {"ph": "X", "name": f["name"], "cat": "finding", "ts": (f["start_ns"] - zero) / 1e3}
        out.append(
            {**e, "dur": f["duration_ns"] / 1e3, "pid": f["rank"], "tid": 1, "args": f.get("args", {})}
        )
    out += [*flows(t, zero, _FIRST_LANE), *counters(t, zero)]
    return {"displayTimeUnit": "ms", "traceEvents": out, "otherData": {"writer": "pase"}}
