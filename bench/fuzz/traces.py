"""Mutated traces: no absurd result without a warning, only clear errors.

    python -m bench fuzz.traces [--count 100000] [--seed 0]
    python -m bench fuzz.traces --resume --cpu-minutes 12    # continues where the result file ends
    python -m bench fuzz.traces --real TRACE ... --cpu-minutes 5 --out bench/results/replay_fuzz_real.json
    python -m bench fuzz.traces --planes PROFILE ... --resume --out bench/results/replay_fuzz_planes.json

Small simulated runs (``bench/cases/timelines.py``) are written as Kineto traces with one to four mutations each: events
are dropped, doubled, moved, stretched, renamed or put on other streams, launches and marks are lost, ids are shared,
times are invalid, files are cut. Each trace is loaded, aligned, measured, replayed and diagnosed. The outcome must be a
PaseError, or a report whose numbers are finite, whose parts sum to the iteration and in which no cause costs more than
the time that it takes. A report is absurd if an iteration
is longer than the trace or has no length, or if the replay is outside of twice the range of the measured iterations; it
must then have a warning: a doubt, an iteration left out, or a note on the trace. A what-if that takes time away (twice
the bandwidth, half the host's work, balanced ranks) must be refused or must not make an iteration longer, nor shorter
than the work that it leaves to the busiest stream.

``--real`` mutates the columns of real traces after they are loaded, ``--planes`` the messages of XLA's profiles before
(``bench/fuzz/planes.py``).

Case k of a seed is always the same: its random numbers come from (seed, k). Writes bench/results/replay_fuzz.json every
thousand cases, so that a run may stop at any time.
"""

from __future__ import annotations

import gzip
import json
import math
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.cases.timelines import ImaginedRun, simulate, trace
from bench.fuzz.planes import mutated_planes
from bench.runner import option, parser, save
from pase.errors import Infeasible, PaseError
from pase.replay import align, load, measure
from pase.replay.changes.whatif import apply
from pase.replay.reports.diagnose import diagnose_run
from pase.replay.reports.report import diagnosis_report
from pase.replay.reports.trust import busiest_ns
from pase.replay.types import Timeline

HELPS = ("bandwidth=2", "host=0.5", "balance=1")
"""What-ifs that take time away."""
Document = dict[str, Any]
Mutation = Callable[[list[dict[str, Any]], np.random.Generator], list[dict[str, Any]]]

SHAPES: tuple[dict[str, Any], ...] = (
    {"ranks": 1, "layers": 4, "kernel_us": 200.0, "between_us": 4.0},
    {"ranks": 1, "layers": 3, "kernel_us": 12.0, "between_us": 60.0},
    {"ranks": 2, "layers": 2, "kernel_us": 60.0, "bucket_bytes": 8 << 20},
    {"ranks": 3, "layers": 2, "kernel_us": 100.0, "slow_rank": 1, "slow_by": 1.5},
)


def _copied(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies the events, because mutations change their first level."""
    return [{**e, "args": {**e["args"]}} for e in events]


def _draw_indices(events: list[dict[str, Any]], rng: np.random.Generator, most: int = 20) -> list[int]:
    return rng.integers(0, len(events), int(rng.integers(1, most))).tolist()


def drop(events: list[dict[str, Any]], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Removes events."""
    gone = set(_draw_indices(events, rng, 60))
    return [e for i, e in enumerate(events) if i not in gone] or events


def drop_kind(events: list[dict[str, Any]], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Removes all events of one category in one part of the trace."""
    cat = rng.choice(["kernel", "cuda_runtime", "cpu_op", "user_annotation"])
    a, b = np.sort(rng.uniform(0, 1, 2))
    last = max(e["ts"] for e in events if isinstance(e["ts"], float))
    keep = [
        e
        for e in events
        if e["cat"] != cat or not (isinstance(e["ts"], float) and a * last <= e["ts"] <= b * last)
    ]
    return keep or events


def double(events: list[dict[str, Any]], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Doubles events."""
    return events + _copied(events[i] for i in _draw_indices(events, rng))


def move(events: list[dict[str, Any]], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Shifts starts by up to a second."""
    for i in _draw_indices(events, rng):
        if isinstance(events[i]["ts"], float):
            events[i]["ts"] += float(rng.normal() * 10.0 ** rng.integers(0, 7))
    return events


def stretch(events: list[dict[str, Any]], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Scales durations up or down by up to four orders of magnitude."""
    for i in _draw_indices(events, rng):
        if isinstance(events[i]["dur"], float):
            events[i]["dur"] *= float(10.0 ** rng.uniform(-4, 4))
    return events


def shift_rest(events: list[dict[str, Any]], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Makes the clock jump, for the device or for all events."""
    at, by = float(rng.uniform(0, 30_000)), float(rng.normal() * 10.0 ** rng.integers(1, 7))
    cat = rng.choice(["kernel", ""])
    for e in events:
        if isinstance(e["ts"], float) and e["ts"] > at and (not cat or e["cat"] == cat):
            e["ts"] += by
    return events


def nonsense(events: list[dict[str, Any]], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Makes times invalid."""
    values: list[Any] = [float("nan"), float("inf"), -1.0, 0.0, 1e17, -1e17, "x", None, [], {}]
    for i in _draw_indices(events, rng, 5):
        events[i][str(rng.choice(["ts", "dur"]))] = values[int(rng.integers(len(values)))]
    return events


def ids(events: list[dict[str, Any]], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Makes correlation ids shared, missing or out of range."""
    for i in _draw_indices(events, rng, 40):
        if "correlation" in events[i]["args"]:
            events[i]["args"]["correlation"] = int(rng.choice([-5, 0, 1, 2, 3, 1 << 40]))
    return events


def streams(events: list[dict[str, Any]], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Moves kernels to other streams."""
    for i in _draw_indices(events, rng):
        if "stream" in events[i]["args"]:
            events[i]["args"]["stream"] = int(rng.choice([7, 20, 99]))
    return events


def names(events: list[dict[str, Any]], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Renames events to names with a meaning for the reader."""
    words = [
        "cudaDeviceSynchronize",
        "cudaMalloc",
        "ProfilerStep#1",
        "ncclDevKernel_AllGather",
        "",
        "x" * 300,
    ]
    for i in _draw_indices(events, rng, 10):
        events[i]["name"] = str(rng.choice(words))
    return events


def marks(events: list[dict[str, Any]], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Renumbers or nests steps, or removes their ends."""
    for e in events:
        if e["name"].startswith("ProfilerStep") and rng.random() < 0.5:
            e["name"] = f"ProfilerStep#{int(rng.integers(0, 4))}"
            if isinstance(e["dur"], float):
                e["dur"] *= float(rng.choice([0.0, 0.5, 1.0, 3.0]))
    return events


def cut(events: list[dict[str, Any]], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Cuts off the end of the file."""
    return events[: max(1, int(rng.integers(len(events))))]


MUTATIONS: tuple[Mutation, ...] = (
    drop,
    drop_kind,
    double,
    move,
    stretch,
    shift_rest,
    nonsense,
    ids,
    streams,
    names,
    marks,
    cut,
)


def mutated(documents: list[Document], rng: np.random.Generator) -> tuple[list[Document], list[str]]:
    """Returns a copy of a run's traces with one to four mutations, each of one rank, and their names."""
    out = [{**d, "traceEvents": _copied(d["traceEvents"])} for d in documents]
    done = []
    for _ in range(int(rng.integers(1, 5))):
        change = MUTATIONS[int(rng.integers(len(MUTATIONS)))]
        d = out[int(rng.integers(len(out)))]
        d["traceEvents"] = change(d["traceEvents"], rng)
        done.append(change.__name__)
    return out, done


def damaged(t: Timeline, rng: np.random.Generator) -> tuple[Timeline, list[str]]:
    """Returns a loaded trace with one to three mutations of its columns, and their names."""
    columns = {k: v.copy() for k, v in t.columns.items()}
    keep = np.ones(len(t), dtype=bool)
    done = []
    for _ in range(int(rng.integers(1, 4))):
        name = str(rng.choice(["drop", "drop_span", "stretch", "move", "ids", "steps", "kinds"]))
        some = rng.integers(0, len(t), max(int(len(t) * 10.0 ** rng.uniform(-4, -1)), 1))
        start = columns["start_ns"]
        if name == "drop":
            keep[some] = False
        elif name == "drop_span":
            low, high = np.sort(rng.uniform(start.min(), start.max(), 2))
            keep &= ~((start > low) & (start < high) & (columns["kind"] == columns["kind"][some[0]]))
        elif name == "stretch":
            factor = 10.0 ** rng.uniform(-3, 3)
            columns["duration_ns"][some] = (columns["duration_ns"][some] * factor).astype(np.int64)
        elif name == "move":
            start[some] += rng.normal(0, 10.0 ** rng.uniform(2, 8), len(some)).astype(np.int64)
        elif name == "ids":
            columns["correlation"][some] = columns["correlation"][rng.permutation(some)]
        elif name == "steps":
            columns["iteration"][some] = columns["iteration"][rng.permutation(some)]
        else:
            columns["kind"][some] = columns["kind"][rng.permutation(some)]
        done.append(name)
    order = np.lexsort((columns["start_ns"], columns["lane"]))
    order = order[keep[order]]
    return replace(t, columns={k: v[order] for k, v in columns.items()}), done


def verdict(folder: Path) -> str:
    """Returns the outcome for traces in a folder: "refused", "warned", "plain", or what is wrong with the report."""
    try:
        loaded = load(folder)
    except PaseError:
        return "refused"
    return verdict_of(loaded)


def verdict_of(loaded: Timeline) -> str:
    """Returns the outcome for loaded traces, as ``verdict`` does."""
    try:
        t = align(loaded)
        d = diagnose_run(measure(t))
        report = diagnosis_report("run", d)
    except PaseError:
        return "refused"
    try:
        json.dumps(report, allow_nan=False)
    except ValueError:
        return "fault: a number of the report is not finite"
    for b in d.breakdowns:
        if sum(b.parts.values()) != b.total_ns or min(b.parts.values(), default=0) < 0:
            return "fault: the parts do not sum to the iterations"
    for s in d.spent:
        parts = [*(a.clock_ns for a in s.kinds.values()), *s.idle.values()]
        if sum(parts) != s.total_ns or min(parts, default=0) < 0:
            return "fault: kinds of work and causes of idling do not sum to the iterations"
    if any(f.measured_ns and f.cost_ns > f.measured_ns for f in d.findings):
        return "fault: a cause costs more than the time that it takes"
    run = d.run
    warned = bool(run.doubts or run.measured.left_out or t.problems)
    low, high = float(run.lengths_ns.min()), float(run.lengths_ns.max())
    extent = float(t.to_global(t.end_ns).max() - t.global_start_ns().min())
    absurd = low <= 0 or high > extent * (1 + 1e-9) or not low / 2 <= run.replayed_ns <= 2 * high
    absurd |= not math.isfinite(run.replayed_ns)
    for knob in HELPS:
        changed = apply(run.graph, knob)
        try:
            ns = run.must_be_explained(knob.partition("=")[0], changed)
        except Infeasible:
            continue
        if ns < min(busiest_ns(changed), run.replayed_ns):
            return f"fault: {knob} takes {ns:.0f} ns, less than the busiest stream works"
        if not ns <= run.replayed_ns:
            return f"fault: {knob} takes {ns:.0f} ns, the run as it is {run.replayed_ns:.0f}"
    if absurd and not warned:
        return f"fault: {low:.0f} to {high:.0f} ns of {extent:.0f}, replayed {run.replayed_ns:.0f}, without a warning"
    return "warned" if warned else "plain"


def main() -> None:
    """Writes bench/results/replay_fuzz.json: how the mutated traces ended, and the faults."""
    made = parser(
        __doc__,
        "replay_fuzz",
        option("--count", type=int, default=100_000),
        option("--seed", type=int, default=0),
        option("--resume", action="store_true", help="go on where the result file ends"),
        option("--real", nargs="*", type=Path, default=[], help="mutate these traces; cases take turns"),
        option("--planes", nargs="*", type=Path, default=[], help="mutate the messages of these .xplane.pb"),
        option("--cpu-minutes", type=float, default=math.inf, help="start no case after so many"),
    )
    args = made.parse_args()
    if args.real:
        of_real(args.real, args.count, args.seed, 60 * args.cpu_minutes, args.out)
        return
    write = profiled(args.planes) if args.planes else simulated()
    found: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    if args.resume and args.out.exists():
        before = json.loads(args.out.read_text())
        if before["seed"] != args.seed:
            made.error(f"{args.out} holds seed {before['seed']}; --resume goes on with that one")
        found = Counter(before["outcomes"])
        # Earlier faults run again, because those fixed since then have another outcome now.
        again, faults = fuzz([f["k"] for f in before["faults"]], args.seed, write=write)
        found = found + again
        found["fault"] -= len(before["faults"])
    while sum(found.values()) < args.count and time.process_time() < 60 * args.cpu_minutes:
        at = sum(found.values())
        more, wrong = fuzz(range(at, min(at + 1000, args.count)), args.seed, 60 * args.cpu_minutes, write)
        found, faults = found + more, faults + wrong
        out = {"count": sum(found.values()), "seed": args.seed, "outcomes": dict(found)}
        out |= {"seeds": [p.name for p in args.planes]} if args.planes else {}
        save({**out, "faults": faults[:50], "cpu_s_of_last_run": time.process_time()}, args.out)
    print(args.out.read_text())


def of_real(paths: Sequence[Path], count: int, seed: int, until_cpu_s: float, out: Path) -> None:
    """Judges these traces as they are, then mutates them in turn, and writes how that ended."""
    found: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    loaded = []
    names: dict[str, str] = {}
    for path in paths:
        try:
            loaded.append((path.name, load(path)))
        except PaseError:
            names[path.name] = "refused"
            continue
        names[path.name] = judged(loaded[-1][1])
    cases = 0
    while loaded and cases < count and time.process_time() < until_cpu_s:
        name, t = loaded[cases % len(loaded)]
        other, changes = damaged(t, np.random.default_rng([seed, cases]))
        said = judged(other)
        found[said.partition(":")[0]] += 1
        if said.startswith("fault"):
            faults.append({"k": cases, "trace": name, "mutations": changes, "what": said})
        cases += 1
        if cases % 20 == 0 or time.process_time() >= until_cpu_s:
            save(
                {
                    "count": cases,
                    "seed": seed,
                    "as_they_are": names,
                    "outcomes": dict(found),
                    "faults": faults[:50],
                },
                out,
            )
    print(out.read_text() if out.exists() else dict(found))


def judged(t: Timeline) -> str:
    """Returns ``verdict_of``, with any other exception as a fault."""
    try:
        return verdict_of(t)
    except Exception:  # any exception here is a fault
        lines = traceback.format_exc().strip().splitlines()
        return f"fault: {lines[-1]} at {lines[-3].strip()}"


CaseWriter = Callable[[int, np.random.Generator, Path], list[str]]
"""Writes the files of a case into a folder, and returns its mutations. Arguments: case, its random numbers, folder."""


def simulated() -> CaseWriter:
    """Returns the writer of mutated simulated runs."""
    runs = [simulate(ImaginedRun(iterations=4, bucket_layers=2, noise=0.02, **shape)) for shape in SHAPES]
    bases = [[trace(run, r) for r in range(run.ranks)] for run in runs]

    def write(k: int, rng: np.random.Generator, folder: Path) -> list[str]:
        documents, changes = mutated(bases[k % len(bases)], rng)
        for rank, d in enumerate(documents):
            (folder / f"rank{rank}.json").write_text(json.dumps(d))
        return changes

    return write


def profiled(paths: Sequence[Path]) -> CaseWriter:
    """Returns the writer of mutated messages of these profiles of XLA, which take turns."""
    bases = [gzip.decompress(p.read_bytes()) if p.suffix == ".gz" else p.read_bytes() for p in paths]

    def write(k: int, rng: np.random.Generator, folder: Path) -> list[str]:
        data, changes = mutated_planes(bases[k % len(bases)], rng)
        (folder / "mutated.xplane.pb").write_bytes(data)
        return changes

    return write


def fuzz(
    cases: Sequence[int], seed: int, until_cpu_s: float = math.inf, write: CaseWriter | None = None
) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Runs these cases; returns the count of each outcome, and the faults with what reproduces them.

    until_cpu_s: CPU seconds of this process after which no case is started. write: default: ``simulated``.
    """
    write = write or simulated()
    found: Counter[str] = Counter()
    faults = []
    with tempfile.TemporaryDirectory() as name:
        for k in cases:
            if time.process_time() >= until_cpu_s:
                break
            for old in Path(name).iterdir():
                old.unlink()
            changes = write(k, np.random.default_rng([seed, k]), Path(name))
            try:
                said = verdict(Path(name))
            except Exception:  # any exception here is a fault
                lines = traceback.format_exc().strip().splitlines()
                said = f"fault: {lines[-1]} at {lines[-3].strip()}"
            found[said.partition(":")[0]] += 1
            if said.startswith("fault"):
                faults.append({"k": k, "mutations": changes, "what": said})
    return found, faults
