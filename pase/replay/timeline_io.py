"""Timelines on disk: versioned JSON (timeline.schema.json), and Chrome/Perfetto traces to look at."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Collection
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from pase.errors import PaseError
from pase.replay.types import COLUMNS, KINDS, OPERATIONS, Clock, Group, Lane, Mark, Problem, Timeline

__all__ = ["SCHEMA", "chrome_trace", "from_json", "load_timeline", "save_timeline", "schema", "to_json"]

SCHEMA = "pase.timeline/1"


def schema() -> dict[str, Any]:
    """The published JSON Schema of the timeline file."""
    return json.loads(resources.files("pase.replay").joinpath("timeline.schema.json").read_text())


def to_json(t: Timeline) -> dict[str, Any]:
    """The timeline as JSON-ready values; see timeline.schema.json."""
    clocks = [asdict(c) for c in t.clocks]
    for c in clocks:
        if not math.isfinite(c["uncertainty_ns"]):
            c["uncertainty_ns"] = None
    return {
        "schema": SCHEMA,
        "kinds": list(KINDS),
        "operations": list(OPERATIONS),
        "names": list(t.names),
        "lanes": [asdict(lane) for lane in t.lanes],
        "groups": [{"name": g.name, "ranks": list(g.ranks)} for g in t.groups],
        "clocks": clocks,
        "marks": [asdict(m) for m in t.marks],
        "problems": [asdict(p) for p in t.problems],
        "hosts": {str(r): h for r, h in t.hosts.items()},
        "dataflow": {k: list(v) for k, v in t.dataflow.items()},
        "columns": {k: v.tolist() for k, v in t.columns.items()},
    }


def from_json(d: Any, where: str = "timeline") -> Timeline:
    """The inverse of to_json. PaseError names the file and the first place that does not fit."""
    if not isinstance(d, dict) or not str(d.get("schema", "")).startswith("pase.timeline/"):
        raise PaseError(f'{where}: not a pase timeline (no "schema": "{SCHEMA}")')
    if d["schema"] != SCHEMA:
        raise PaseError(f"{where}: schema {d['schema']} is not known here; this version reads {SCHEMA}")
    try:
        columns = {k: _column(d, k, dtype) for k, dtype in COLUMNS.items()}
        t = Timeline(
            columns=columns,
            names=tuple(str(n) for n in d["names"]),
            lanes=tuple(
                Lane(rank=int(x["rank"]), name=str(x["name"]), device=bool(x["device"])) for x in d["lanes"]
            ),
            groups=tuple(
                Group(name=str(g["name"]), ranks=tuple(int(r) for r in g["ranks"])) for g in d["groups"]
            ),
            clocks=tuple(_clock(c) for c in d.get("clocks", ())),
            marks=tuple(Mark(**m) for m in d.get("marks", ())),
            problems=tuple(Problem(**p) for p in d.get("problems", ())),
            hosts={int(r): str(h) for r, h in d.get("hosts", {}).items()},
            dataflow={k: tuple(v) for k, v in d.get("dataflow", {}).items()},
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as e:
        raise PaseError(
            f"{where}: a broken timeline: {type(e).__name__} {e}; see `pase.replay.schema()`"
        ) from e
    kinds, operations = d.get("kinds", KINDS), d.get("operations", OPERATIONS)
    if tuple(kinds) != KINDS or tuple(operations) != OPERATIONS:
        raise PaseError(f"{where}: lists other kinds or operations of events than {SCHEMA} has")
    limits = {"lane": len(t.lanes), "kind": len(KINDS), "name": len(t.names), "operation": len(OPERATIONS)}
    for column, limit in {**limits, "group": len(t.groups)}.items():
        values = columns[column]
        low = -1 if column == "group" else 0
        if len(values) and (int(values.min()) < low or int(values.max()) >= limit):
            raise PaseError(f"{where}: column '{column}' points outside its table of {limit}")
    if len(t) and int(columns["duration_ns"].min()) < 0:
        raise PaseError(f"{where}: event {int(columns['duration_ns'].argmin())} has a negative duration")
    return t


def _column(d: dict[str, Any], name: str, dtype: type[np.generic]) -> np.ndarray:
    values = np.asarray(d["columns"][name])
    if values.size and (values.ndim != 1 or values.dtype.kind not in "iu"):
        raise ValueError(f"column '{name}' must be a flat list of integers")
    info = np.iinfo(dtype)  # type: ignore[type-var]
    if values.size and (int(values.min()) < info.min or int(values.max()) > info.max):
        raise ValueError(f"column '{name}' has a value that does not fit {np.dtype(dtype).name}")
    return values.reshape(-1).astype(dtype)


def _clock(c: dict[str, Any]) -> Clock:
    u = c.get("uncertainty_ns", 0.0)
    return Clock(**{**c, "uncertainty_ns": math.inf if u is None else float(u)})


def save_timeline(
    t: Timeline,
    path: str | Path,
    *,
    critical: Collection[int] = (),
    findings: Collection[dict[str, Any]] = (),
    chrome: bool = True,
) -> None:
    """Write JSON, gzipped where the name ends in .gz.

    chrome: add the events in the form that Perfetto and chrome://tracing load, so that one file serves both.
    """
    d = to_json(t)
    if chrome:
        d |= chrome_trace(t, critical, findings)
    text = json.dumps(d, separators=(",", ":"), allow_nan=False).encode()
    path = Path(path)
    path.write_bytes(gzip.compress(text, 6, mtime=0) if path.suffix == ".gz" else text)


def load_timeline(path: str | Path) -> Timeline:
    """Read what save_timeline wrote. PaseError names the file and what is wrong with it."""
    from pase.replay.reader import read_small_json

    return from_json(read_small_json(Path(path)), str(path))


def chrome_trace(
    t: Timeline, critical: Collection[int] = (), findings: Collection[dict[str, Any]] = ()
) -> dict[str, Any]:
    """The timeline on one clock, in the trace format that Perfetto and chrome://tracing load.

    critical: indices of events on the critical path; they get their own track for each rank and a
    ``critical`` argument. findings: dicts with rank, name, start_ns, duration_ns (global) to draw as a track.
    """
    out: list[dict[str, Any]] = []
    for rank in t.ranks:
        label = f"rank {rank}" + (f" on {t.hosts[rank]}" if rank in t.hosts else "")
        out.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": label}})
        for tid, name in ((0, "critical path"), (1, "findings"), (2, "iterations")):
            out.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}})
    for i, lane in enumerate(t.lanes):
        label = ("stream " if lane.device else "thread ") + lane.name
        out.append(
            {"ph": "M", "name": "thread_name", "pid": lane.rank, "tid": i + 10, "args": {"name": label}}
        )
    starts = t.global_start_ns()
    zero = float(starts.min()) if len(t) else 0.0
    marked = set(critical)
    names, cols = t.names, {k: v.tolist() for k, v in t.columns.items()}
    ranks = t.rank_of.tolist()
    for i, s in enumerate(((starts - zero) / 1e3).tolist()):
        args: dict[str, Any] = {"kind": KINDS[cols["kind"][i]]}
        for key in ("correlation", "nbytes", "iteration"):
            if cols[key][i] >= 0:
                args[key] = cols[key][i]
        if cols["group"][i] >= 0:
            args["group"] = t.groups[cols["group"][i]].name
        e = {"ph": "X", "name": names[cols["name"][i]], "cat": args["kind"], "ts": s}
        e |= {"dur": cols["duration_ns"][i] / 1e3, "pid": ranks[i], "tid": cols["lane"][i] + 10, "args": args}
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
    return {"displayTimeUnit": "ms", "traceEvents": out, "otherData": {"writer": "pase"}}
