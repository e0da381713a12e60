"""Records the answers of the public commands, and compares two such records.

    python -m bench.answers write FILE [--parts zoo,search,schedule,replay] [--models gpt2,vgg19] [--devices 8,32]
    python -m bench.answers compare BEFORE AFTER     # exit status 1 if they differ

A refactoring must not change these answers. ``write`` uses only the public commands, so that one script serves two
versions. It writes the layout of each zoo model for 8, 32 and 64 devices (cost, bound, memory by kind, strategy,
collectives, baselines), the cost of each instance in ``--data``, the bucket plans of all policies on three layouts, and
replays of the traces. Numbers are compared to a relative 1e-9. Seconds are recorded but not compared; their sums are
printed.
"""

from __future__ import annotations

import hashlib
import json
import math
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cases import SHARED
from bench.runner import ROOT, parser, save

DEVICES = (8, 32, 64)
SCHEDULED = ("gpt2", "vgg19", "resnet101")
REPLAYED = (
    "jaxtoolbox_pax_fsdp4",
    "hta/nccl_parser_config_nccl_data.json.gz",
    "hta/trace_diff_control_control.json.gz",
)


def digest(value: object) -> str:
    """Returns the first twelve hex digits of a JSON value's SHA-256."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def pase(*arguments: object) -> dict[str, Any]:
    """Runs a command with --json, and returns its output with its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-m", "pase.cli", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        return {"exit": done.returncode, "error": done.stderr.strip()[-300:]}
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    return {**json.loads(done.stdout), "cpu_s": seconds}


def layout_answer(layout: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a layout that must not change; names of nodes and tensors may change."""
    cost = layout["cost"]
    strategy = sorted(
        [n["einsum"], sorted(map(str, n["sizes"].values())), sorted(n["split"].items()), n["times"]]
        for n in layout["strategy"]
    )
    moved = sorted([c["kind"], c["axes"], c["bytes"], c["times"], c["phase"]] for c in layout["collectives"])
    return {
        "cost": cost["total"],
        "bound": cost["bound"],
        "optimal": cost["optimal"],
        "mesh": layout["mesh"],
        "memory": layout["memory"],
        "baselines": cost["baselines"],
        "nodes": len(strategy),
        "strategy": digest([[s[1], [v for _, v in s[2]], s[3]] for s in strategy]),
        "collectives": digest(moved),
        "bytes": sum(c["bytes"] * c["times"] for c in layout["collectives"]),
    }


@dataclass(frozen=True, kw_only=True)
class AnswersWanted:
    """The requested answers. models: zoo models to compile and schedule; empty: all. devices: the numbers of devices
    for zoo models. data: the shared data."""

    models: tuple[str, ...] = ()
    devices: tuple[int, ...] = DEVICES
    data: Path = SHARED

    def has(self, model: str) -> bool:
        """Returns whether a model is requested."""
        return not self.models or model in self.models


def zoo_answers(chosen: AnswersWanted) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields for each zoo model and number of devices its name, and its layout without the times, with the seconds."""
    import pase as package
    from pase import zoo

    with tempfile.TemporaryDirectory() as folder:
        for name in filter(chosen.has, zoo.names()):
            for devices in chosen.devices:
                plan = package.compile(f"zoo:{name}", devices=devices)
                file = Path(folder) / f"{name}.{devices}.json"
                plan.save(file)
                layout = json.loads(file.read_text())
                seconds = {f"{k}_s": v for k, v in layout["seconds"].items()}
                yield f"{name} {devices}", layout_answer(layout) | {"seconds": seconds}


def search_answers(chosen: AnswersWanted) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of each of PaSE's recorded instances, and the answer of pase solve with the seconds."""
    for file in sorted((chosen.data / "pase_instances").glob("*.json")):
        found = pase("solve", file)
        yield (
            file.stem,
            {k: found.get(k) for k in ("cost", "bound", "optimal", "error")}
            | {"seconds": {"cpu_s": found.get("cpu_s", 0.0)}},
        )


def schedule_answers(chosen: AnswersWanted) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of each scheduled model, and the bucket plans of all policies with the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(chosen.has, SCHEDULED):
            file = Path(folder) / f"{name}.json"
            pase("compile", f"zoo:{name}", "--devices", 32, "-o", file)
            found = pase("schedule", file, "--policy", "all")
            yield name, {"seconds": {"cpu_s": found.pop("cpu_s", 0.0)}, "answer": numbers(found)}


def replay_answers(chosen: AnswersWanted) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of each recorded run, and the report of pase replay with the seconds."""
    for name in REPLAYED:
        found = pase("replay", chosen.data / "traces" / name)
        yield name, {"seconds": {"cpu_s": found.pop("cpu_s", 0.0)}, "answer": numbers(found)}


def numbers(value: Any) -> Any:
    """Returns a JSON value without what depends on the run, such as seconds and paths."""
    if isinstance(value, dict):
        return {
            k: numbers(v) for k, v in value.items() if not k.startswith(("seconds", "cpu", "path", "file"))
        }
    return [numbers(v) for v in value] if isinstance(value, list) else value


PARTS: dict[str, Callable[[AnswersWanted], Iterator[tuple[str, dict[str, Any]]]]] = {
    "zoo": zoo_answers,
    "search": search_answers,
    "schedule": schedule_answers,
    "replay": replay_answers,
}


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Yields a line for each place where two answers differ; ``seconds`` are left out."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            if key != "seconds":
                yield from differences(before.get(key), after.get(key), f"{where} {key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (b, a) in enumerate(zip(before, after, strict=True)):
            yield from differences(b, a, f"{where}[{i}]")
    elif isinstance(before, float) and isinstance(after, float | int):
        if not math.isclose(before, after, rel_tol=1e-9):
            yield f"{where}: {before!r} -> {after!r}"
    elif before != after:
        yield f"{where}: {before!r} -> {after!r}"


def total_seconds(part: dict[str, Any]) -> dict[str, float]:
    """Returns the sums of the seconds of all rows of a part, by what they measure."""
    out: dict[str, float] = {}
    for row in part.values():
        for key, value in row["seconds"].items():
            out[key] = out.get(key, 0.0) + value
    return out


def compare(before: Path, after: Path) -> int:
    """Prints the differences and the seconds of each; returns the number of differences."""
    b, a = (json.loads(p.read_text())["answers"] for p in (before, after))
    found = 0
    for part in dict.fromkeys([*b, *a]):
        lines = list(differences(b.get(part), a.get(part), part))
        found += len(lines)
        rows = len(b.get(part) or ())
        print(f"{part}: {rows} answers, {len(lines)} differences")
        print(*(f"  {line}" for line in lines[:60]), sep="\n")
        if part in b and part in a:
            old, new = total_seconds(b[part]), total_seconds(a[part])
            print("  " + ", ".join(f"{k} {v:.2f} -> {new.get(k, math.nan):.2f}" for k, v in old.items()))
    return found


def main() -> None:
    """Writes the answers to FILE, or compares two such files and prints where they differ."""
    made = parser(__doc__, "")
    commands = made.add_subparsers(dest="command", required=True)
    w = commands.add_parser("write")
    w.add_argument("file", type=Path)
    w.add_argument("--parts", default=",".join(PARTS))
    w.add_argument("--models", default="", help="of the zoo and to schedule; default: all")
    w.add_argument("--devices", default=",".join(map(str, DEVICES)), help="of the zoo")
    w.add_argument("--data", type=Path, default=SHARED)
    c = commands.add_parser("compare")
    c.add_argument("before", type=Path)
    c.add_argument("after", type=Path)
    a = made.parse_args()
    if a.command == "compare":
        sys.exit(1 if compare(a.before, a.after) else 0)
    answers: dict[str, Any] = {}
    chosen = AnswersWanted(
        models=tuple(filter(None, a.models.split(","))),
        devices=tuple(map(int, a.devices.split(","))),
        data=a.data,
    )
    for part in a.parts.split(","):
        answers[part] = {}
        for name, answer in PARTS[part](chosen):
            answers[part][name] = answer
            print(part, name, flush=True)
    save({"answers": answers}, a.file)


if __name__ == "__main__":
    main()
