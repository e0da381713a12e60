"""Loads a folder of traces, one or several per rank, as one Timeline."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from pase.errors import PaseError
from pase.files.progress import PieceOfWork
from pase.replay.traces.builder import combine
from pase.replay.traces.chrome import read_chrome
from pase.replay.traces.foreign import FOREIGN_SUFFIXES, refuse_foreign
from pase.replay.traces.nsys_jax import is_nsys_jax, read_nsys_jax
from pase.replay.traces.reader import LIMITS, Limits, open_stream
from pase.replay.traces.repeats import found_iterations
from pase.replay.traces.sizes import (
    from_annotations,
    from_execution_trace,
    is_execution_trace,
    read_execution_trace,
)
from pase.replay.traces.timeline_io import load_timeline
from pase.replay.traces.xplane import read_xplane
from pase.replay.types import KINDS, Mark, Problem, Timeline, on_stream

__all__ = ["load"]

_SUFFIXES = (".json", ".json.gz", ".json.zst", ".zip", ".pb", ".pb.gz")
_IGNORED = ("manifest.json", "config.json", "tools.json")
_NUMBERS = re.compile(r"\d+")
_ALIKE = 0.25
"""Ranks of one run share this fraction of the names of their ops at least, numbers left out; stages of a pipeline do,
too."""
_RANK = re.compile(r"(?:^|[^a-z])(?:rank|proc|process|worker|gpu|node)[-_ =]?(\d{1,6})(?!\d)", re.IGNORECASE)


def load(
    source: str | Path | Iterable[str | Path],
    limits: Limits = LIMITS,
    progress: Callable[[str], None] | None = None,
) -> Timeline:
    """Loads the events of all ranks from files or a folder, which is searched recursively.

    The formats are Chrome traces of PyTorch (Kineto) and JAX, XLA's .xplane.pb, nsys-jax archives, and pase's timeline.
    If a file cannot be used but others can, it is reported as a Problem. Raises PaseError if no file can be used.
    progress: called with a line of text before each file.
    """
    paths = [Path(source)] if isinstance(source, (str, Path)) else [Path(p) for p in source]
    files, problems = _files(paths)
    parts: list[Timeline] = []
    by_rank: dict[int, Path] = {}
    failures: list[PaseError] = []
    listed: list[tuple[Path, list[tuple[int, int]]]] = []
    for done, path in enumerate(files):
        if progress is not None:
            progress(PieceOfWork(f"reading {path.name}", done, len(files)))
        try:
            refuse_foreign(path)
            if _is_execution_trace(path, limits):
                listed.append((path, read_execution_trace(path, limits)))
                continue
            t = _read(path, limits)
        except PaseError as e:
            failures.append(e)
            problems.append(Problem(where=str(path), what=f"left out: {e}"))
            continue
        settled, clash = _distinct_rank(t, path, by_rank)
        if clash:
            problems.append(clash)
        if settled is not None:
            by_rank.update(dict.fromkeys(settled.ranks, path))
            parts.append(settled)
    if not parts:
        if failures:
            raise (
                failures[0]
                if len(failures) == 1
                else PaseError(
                    f"none of {len(failures)} files can be used; the first one: {failures[0]}",
                    where=str(paths[0]),
                )
            )
        if listed:
            what = "an execution trace has the ops and their sizes, but not their times"
            raise PaseError(what, where=str(listed[0][0]), fix="give the profiler's trace of the run as well")
        raise PaseError(
            "no trace found", where=str(paths[0]), fix=f"give files that end in {', '.join(_SUFFIXES)}"
        )
    t = combine(parts, problems)
    t = from_annotations(_label_iterations(replace(t, problems=(*t.problems, *_missing(t)))))
    for path, collectives in listed:
        t = from_execution_trace(t, collectives, str(path))
    return t


def _files(paths: list[Path]) -> tuple[list[Path], list[Problem]]:
    files: list[Path] = []
    for p in paths:
        if not p.exists():
            raise PaseError("there is no such file or folder", where=str(p), fix="check the path")
        if p.is_dir():
            every = sorted(f for f in p.rglob("*") if f.is_file() and f.name not in _IGNORED)
            found = [f for f in every if f.name.endswith(_SUFFIXES)]
            # Without a trace, the error says of another tool's file what it is.
            files.extend(found or [f for f in every if f.name.endswith(FOREIGN_SUFFIXES)][:1])
        else:
            files.append(p)
    # jax.profiler writes the events twice. The planes are complete, but the Chrome trace ends after 10⁶ events.
    planes = {f.parent for f in files if f.name.endswith((".xplane.pb", ".xplane.pb.gz"))}
    kept = [
        f
        for f in files
        if not (f.name.endswith((".trace.json.gz", ".trace.json.zst", ".trace.json")) and f.parent in planes)
    ]
    problems = []
    if len(kept) > 4096:
        problems.append(Problem(where=str(paths[0]), what=f"{len(kept)} files; only the first 4096 are read"))
    return kept[:4096], problems


def _read(path: Path, limits: Limits) -> Timeline:
    if path.name.endswith((".pb", ".pb.gz")):
        return read_xplane(path, _rank_in_name(path), limits)
    with path.open("rb") as f:
        magic = f.read(4)
    if magic.startswith(b"PK") and is_nsys_jax(path):
        return read_nsys_jax(path, limits=limits)
    with open_stream(path, limits) as stream:
        head = stream.read()[:400]
    if b"pase.timeline/" in head:
        return load_timeline(path)
    return read_chrome(path, None, limits)


def _is_execution_trace(path: Path, limits: Limits) -> bool:
    if not path.name.endswith((".json", ".json.gz", ".json.zst")):
        return False
    with open_stream(path, limits) as stream:
        return is_execution_trace(stream.read()[:2000])


def _rank_in_name(path: Path) -> int | None:
    """Returns the rank in the name of the file or of its nearest folder that has one."""
    for part in (path.name, *(p.name for p in path.parents[:4])):
        m = _RANK.search(part)
        if m:
            return int(m.group(1))
    return None


def _distinct_rank(t: Timeline, path: Path, taken: dict[int, Path]) -> tuple[Timeline | None, Problem | None]:
    """Makes ranks distinct: if a rank is already taken, uses the rank in the file's name, or leaves the file out."""
    clash = [r for r in t.ranks if r in taken]
    if not clash:
        return t, None
    named = _rank_in_name(path)
    if named is not None and named not in taken and len(t.ranks) == 1:
        moved = replace(
            t,
            lanes=tuple(replace(lane, rank=named) for lane in t.lanes),
            marks=tuple(replace(m, rank=named) for m in t.marks),
            hosts={named: next(iter(t.hosts.values()))} if t.hosts else {},
        )
        if t.ranks == (0,):
            return moved, None
        what = f"it has rank {t.ranks[0]}, as {taken[clash[0]].name} does; it is read as rank {named} by its name"
        return moved, Problem(where=str(path), what=what)
    what = f"left out: rank {clash[0]} is already taken by {taken[clash[0]]}"
    return None, Problem(where=str(path), what=what)


def _missing(t: Timeline) -> list[Problem]:
    """Returns problems: ranks that take part in collectives but have no trace, and ids that are used twice."""
    out = []
    wanted = {r for g in t.groups for r in g.ranks}
    absent = sorted(wanted - set(t.ranks))
    if absent:
        shown = ", ".join(map(str, absent[:8])) + (" …" if len(absent) > 8 else "")
        what = (
            f"{len(absent)} of {len(wanted)} ranks have no trace ({shown}): waiting for them counts as work"
        )
        out.append(Problem(where="ranks", what=what))
    out.extend(_unrelated(t))
    gpu = on_stream(t["kind"]) & (t["correlation"] >= 0)
    rank = t.rank_of
    graphs = t.named(lambda name: "GraphLaunch" in name)
    for r in t.ranks:
        ids = t["correlation"][gpu & (rank == r)]
        ids = ids[~np.isin(ids, t["correlation"][graphs & (rank == r)])]
        twice = len(ids) - len(np.unique(ids))
        if twice:
            out.append(
                Problem(where=f"rank {r}", what=f"{twice} correlation ids belong to more than one device op")
            )
    return out


def _unrelated(t: Timeline) -> list[Problem]:
    """Returns a problem for each rank that runs other ops than all ranks before it: ranks of one run share most."""
    rank, on = t.rank_of, on_stream(t["kind"])
    known: dict[int, set[str]] = {}
    out = []
    for r in t.ranks:
        mine = {_NUMBERS.sub("", t.names[i]) for i in np.unique(t["name"][on & (rank == r)]).tolist()}
        alike = {k: len(mine & theirs) / min(len(mine), len(theirs)) for k, theirs in known.items()}
        if mine and alike and max(alike.values()) < _ALIKE:
            nearest = max(alike, key=lambda k: alike[k])
            what = (
                f"it has {alike[nearest]:.0%} of its ops in common with rank {nearest}, and less with others: if the "
                "traces are of different runs, give each run's folder by itself"
            )
            out.append(Problem(where=f"rank {r}", what=what))
        if mine:
            known[r] = mine
    return out


def launch_of(t: Timeline, calls: np.ndarray, ops: np.ndarray) -> np.ndarray:
    """Returns the call that launched each op: the last call before it that has its correlation id; −1 for none.

    Ids are reused in long runs, and one call may launch many ops (CUDA graphs). If an op starts before its call because
    of a clock error, the first call after it is used.
    """
    both = np.concatenate([calls, ops])
    is_call = np.arange(len(both)) < len(calls)
    order = np.lexsort((~is_call, t["start_ns"][both], t["correlation"][both]))
    place = np.where(is_call[order], np.arange(len(order)), -1)
    before = np.maximum.accumulate(place) if len(place) else place
    after = (
        np.minimum.accumulate(np.where(place >= 0, place, len(order))[::-1])[::-1] if len(place) else place
    )
    correlation = t["correlation"][both][order]

    def same(spot: np.ndarray) -> np.ndarray:
        known = (spot >= 0) & (spot < len(order))
        return known & (correlation[np.clip(spot, 0, len(order) - 1)] == correlation)

    spot = np.where(same(before), before, np.where(same(after), after, -1))
    out = np.full(len(both), -1, dtype=np.int64)
    out[order] = np.where(spot >= 0, both[order][np.maximum(spot, 0)], -1)
    return out[len(calls) :]


def _launched_before(t: Timeline, ops: np.ndarray, linked: np.ndarray) -> np.ndarray:
    """Returns a mask of device ops that were launched before the trace began.

    A stream runs in order, so these are the ops without a call before the stream's first op with a call.
    """
    first = np.full(len(t.lanes), np.iinfo(np.int64).min)
    first[t["lane"][ops[linked]]] = np.iinfo(np.int64).max
    np.minimum.at(first, t["lane"][ops[linked]], t["start_ns"][ops[linked]])
    return ~linked & (t["start_ns"][ops] < first[t["lane"][ops]])


def _label_iterations(t: Timeline) -> Timeline:
    """Assigns an iteration to every event, and marks to ranks that have none.

    A device op belongs to the iteration of the call that launched it. A CPU event belongs to the one in which it
    starts.
    """
    marks = list(t.marks)
    rank = t.rank_of
    problems: list[Problem] = []
    iteration = t["iteration"].copy()
    gpu = on_stream(t["kind"])
    launch = t["kind"] == KINDS.index("runtime")
    for r in t.ranks:
        here = rank == r
        mine = [m for m in marks if m.rank == r]
        if not mine and here.any():
            mine, how = found_iterations(t, r)
            marks.extend(mine)
            if mine:
                what = f"no step is marked; {len(mine)} iterations were found by the {how}"
                problems.append(Problem(where=f"rank {r}", what=what))
        if not mine and here.any():
            start, end = int(t["start_ns"][here].min()), int(t.end_ns[here].max())
            mine = [Mark(rank=r, iteration=0, start_ns=start, end_ns=end)]
            marks.extend(mine)
            problems.append(
                Problem(
                    where=f"rank {r}",
                    what="no step is marked and nothing repeats, so the whole trace is used as one iteration "
                    "(mark steps with torch.profiler's step() or jax.profiler.StepTraceAnnotation)",
                )
            )
        if (iteration[here] >= 0).any():
            continue
        edges = np.array([m.start_ns for m in mine] + [mine[-1].end_ns], dtype=np.int64)
        numbers = np.array([m.iteration for m in mine] + [-1], dtype=np.int32)
        at = np.searchsorted(edges, t["start_ns"][here], side="right") - 1
        labels = np.where((at >= 0) & (at < len(mine)), numbers[np.clip(at, 0, len(mine))], -1).astype(
            np.int32
        )
        iteration[here] = labels
        calls = np.flatnonzero(here & launch & (t["correlation"] >= 0))
        ops = np.flatnonzero(here & gpu & (t["correlation"] >= 0))
        call = launch_of(t, calls, ops)
        if np.isin(edges[:-1], t["start_ns"][here & gpu]).all():
            # Iterations were found on the device, ahead of which the CPU may run. A call belongs to what it launches.
            iteration[call[call >= 0][::-1]] = iteration[ops[call >= 0][::-1]]
            continue
        # Device ops get the iteration of their launch.
        iteration[ops[call >= 0]] = iteration[call[call >= 0]]
        iteration[ops[_launched_before(t, ops, call >= 0)]] = -1
    return replace(
        t,
        columns={**t.columns, "iteration": iteration},
        marks=tuple(sorted(marks, key=lambda m: (m.rank, m.start_ns))),
        problems=(*t.problems, *problems),
    )
