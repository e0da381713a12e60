"""The network laboratory: real training steps over shaped networks.

    sudo .venv/bin/python -m bench netlab quick        # a few minutes: every part once, small
    sudo .venv/bin/python -m bench netlab full         # within --minutes, by default about an hour
    sudo .venv/bin/python -m bench netlab full --resume          # what a stopped run of this commit had not done
    sudo .venv/bin/python -m bench netlab strategies --hosts 2   # one part
    sudo .venv/bin/python -m bench netlab pipelines    # others: racks levels lowerings buckets torch frameworks replay
    sudo .venv/bin/python -m bench netlab clean        # removes what a killed run left behind
    .venv/bin/python -m bench netlab render            # docs/evidence/measured.md's tables from the result files

Writes bench/results/netlab_<part>.json as it goes (quick: netlab_quick.json). Without root or iproute2 it prints why it
does nothing. Calibrations are kept in --folder and used again; --fresh calibrates again.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.netlab import buckets, frameworks, levels, replays, strategies
from bench.netlab.models import BATCHES, LOOPED, SIZES
from bench.netlab.net import LabError, Topology, clean, interruptible, unavailable
from bench.netlab.page import render
from bench.netlab.session import Session
from bench.runner import RESULTS, ROOT, option, parser

PARTS = (
    "strategies",
    "lowerings",
    "buckets",
    "replay",
    "racks",
    "levels",
    "pipelines",
    "torch",
    "frameworks",
)
EXPECTED_MIN = {
    "strategies": 36.0,
    "lowerings": 6.0,
    "buckets": 8.0,
    "torch": 4.0,
    "replay": 6.0,
    "racks": 7.0,
    "levels": 1.0,
    "pipelines": 9.0,
    "frameworks": 24.0,
}
"""Minutes of a full run on two cores; each part prints details when it starts."""


def main() -> int:
    """Runs the requested parts, which write their result files and pages. Returns the exit status."""
    args = parser(
        __doc__,
        "",
        option("part", choices=("quick", "full", *PARTS, "clean", "render")),
        option("--folder", type=Path, default=Path(tempfile.gettempdir()) / "paselab"),
        option("--fresh", action="store_true", help="forget earlier calibrations"),
        option("--resume", action="store_true", help="keep what was measured at this commit"),
        option(
            "--minutes", type=float, help="start nothing new after this many (full: 58; otherwise no limit)"
        ),
        option("--only", help="full: only these parts, comma-separated"),
        option("--models", help="strategies, replay: only these, comma-separated"),
        option("--calibrate-s", type=float, default=45.0, help="seconds for each network"),
        option("--mbit", type=float, help="strategies, frameworks: only on networks with this rate"),
        option("--hosts", type=int, help="strategies, frameworks: only on networks with this many hosts"),
        option("--batches", default="0,1", choices=("0", "1", "0,1"), help="0: small, 1: large"),
        option("--rates", help="buckets, torch: only these coverage rates, comma-separated"),
        option("--iterations", type=int, default=12, help="buckets, torch, replay: iterations of each run"),
        option("--training", type=int, default=48, help="buckets: iterations of the loss curves"),
        option("--results", type=Path, default=RESULTS, help="where the result files go"),
    ).parse_args()
    if args.part == "render":
        render(ROOT / "docs" / "evidence" / "measured.md", args.results)
        return 0
    reason = unavailable()
    if reason:
        print(f"netlab skipped: {reason}")
        return 0
    if args.part == "clean":
        print(f"removed: {', '.join(clean()) or 'nothing was left'}")
        return 0
    if args.fresh:
        shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True, exist_ok=True)
    minutes = args.minutes or (58.0 if args.part == "full" else float("inf"))
    session = Session(
        folder=args.folder,
        results=args.results,
        resume=args.resume,
        until=time.time() + 60 * minutes,
        calibrate_s=args.calibrate_s,
    )
    try:
        with interruptible():
            return run(args, session)
    except LabError as e:
        print(f"netlab: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; everything was taken down; --resume goes on", file=sys.stderr)
        return 130


def run(args: argparse.Namespace, session: Session) -> int:
    """Runs the requested parts, one after the other; if one fails, the others still run."""
    if args.part == "quick":
        quick(session)
        return 0
    parts = list(PARTS) if args.part == "full" else [args.part]
    if args.only:
        parts = [p for p in parts if p in args.only.split(",")]
    if importlib.util.find_spec("torch") is None:
        parts = [p for p in parts if p not in ("torch", "frameworks")]
    plan = ", ".join(f"{p} {EXPECTED_MIN[p]:g}" for p in parts)
    session.say(f"minutes expected, where nothing is left out: {plan}")
    steps = _steps(args, session, parts)
    failed = 0
    for part, topologies, step in steps:
        if not session.has(60.0):
            session.say(f"{part}{topologies}: left out, no time")
            continue
        session.say(f"{part}{topologies}")
        try:
            step()
        except LabError as e:
            failed += 1
            session.say(f"{part}{topologies} failed: {e}")
    return 1 if failed else 0


def _steps(
    args: argparse.Namespace, session: Session, parts: list[str]
) -> list[tuple[str, str, Callable[[], None]]]:
    """Returns (part, networks, function) for each step: larger networks come late, so that every part runs; PyTorch
    last."""
    chosen = [
        t
        for t in strategies.FULL
        if args.mbit in (None, t.host_mbit) and args.hosts in (None, t.hosts) and "strategies" in parts
    ]
    few = [t for t in chosen if t.hosts == 2]
    many = [t for t in chosen if t.hosts != 2]
    out: list[tuple[str, str, Callable[[], None]]] = []
    rows: dict[str, list[dict[str, Any]]] = {}
    models = args.models.split(",") if args.models else list(SIZES)
    networks = {"strategies": chosen, "pipelines": strategies.STAGED}
    batches = [int(b) for b in args.batches.split(",")]

    def measured(part: str, topology: Topology, these: list[str]) -> Callable[[], None]:
        def step() -> None:
            # New rows replace those of these networks; the other rows of this commit stay.
            every = [t.name for t in networks.get(part, (topology,))]
            before = rows.get(part, session.kept(part, every))

            def put(new: list[dict[str, Any]]) -> None:
                together = rows[part] = [*before, *new]
                if any("measured_s" in r and r["strategy"] == "ours" for r in together):
                    summary = (strategies.staged if part == "pipelines" else strategies.summary)(together)
                    session.write(part, {"summary": summary, "rows": together})

            put(strategies.measure(topology, these, batches, session, put))

        return step

    out += [("strategies", f", {t.name}", measured("strategies", t, models)) for t in few]
    if "buckets" in parts:
        out.append(("buckets", "", partial(_policies, args, session, "buckets", args.training)))
    if "replay" in parts:
        out.append(("replay", "", lambda: _replay(args, session, models)))
    if "lowerings" in parts:
        out.append(("lowerings", "", partial(_both_ways, session, models, batches)))
    out += [("strategies", f", {t.name}", measured("strategies", t, models)) for t in many]
    if "racks" in parts:
        some = [m for m in ("mlp", "gpt2") if m in models]
        out.append(("racks", "", measured("racks", strategies.RACKS, some)))
    if "levels" in parts:
        out.append(("levels", "", lambda: session.write("levels", levels.measure(strategies.RACKS, session))))
    if "pipelines" in parts:
        out += [
            ("pipelines", f", {t.name}", measured("pipelines", t, list(LOOPED))) for t in strategies.STAGED
        ]
    if "torch" in parts:
        out.append(("torch", "", partial(_policies, args, session, "torch", 0)))
    return out + (_compared(args, session) if "frameworks" in parts else [])


def _policies(args: argparse.Namespace, session: Session, part: str, training: int) -> None:
    """Runs the step of bucket plans in JAX, or in PyTorch."""
    buckets.measure(
        session,
        rates=tuple(map(float, args.rates.split(","))) if args.rates else buckets.RATES,
        policies=buckets.POLICIES if part == "buckets" else buckets.IN_TORCH,
        iterations=args.iterations,
        training=training,
        kind=part,
        on_rows=lambda found: session.write(part, found),
    )


def _replay(args: argparse.Namespace, session: Session, models: list[str]) -> None:
    """Runs the step of replays."""
    cases = [c for c in replays.CASES if c[0] in models]
    found = replays.measure(session, cases=cases, steps=args.iterations, plans=not args.models)
    if args.models:  # the other runs stay, with the commit at which they were measured
        found["rows"] = [*session.others("replay", [r["run"] for r in found["rows"]]), *found["rows"]]
        found["summary"] = replays.summary(found["rows"])
    session.write("replay", found)


def _both_ways(session: Session, models: Sequence[str], batches: Sequence[int]) -> None:
    """Runs the step of the same plans in the annotated and the manual lowering."""

    def put(rows: list[dict[str, Any]]) -> None:
        if all(any("measured_s" in r and r["lowering"] == how for r in rows) for how in strategies.LOWERINGS):
            session.write("lowerings", {"summary": strategies.beside(rows), "rows": rows})

    some = [m for m in ("mlp", "gpt2", "transformer") if m in models]
    strategies.measure(strategies.QUICK[0], some, batches, session, put, strategies.LOWERINGS)


def _compared(args: argparse.Namespace, session: Session) -> list[tuple[str, str, Callable[[], None]]]:
    """Returns the steps that compare PyTorch's own strategies with ours, for each network."""
    rows = session.kept("frameworks", [t.name for t in frameworks.NETWORKS])

    def step(topology: Topology) -> Callable[[], None]:
        def measured() -> None:
            rows.extend(frameworks.measure(topology, session, args.iterations))
            session.write("frameworks", {"summary": frameworks.summary(rows), "rows": rows})

        return measured

    networks = [
        t for t in frameworks.NETWORKS if args.mbit in (None, t.host_mbit) and args.hosts in (None, t.hosts)
    ]
    return [("frameworks", f", {t.name}", step(t)) for t in networks]


def quick(session: Session) -> None:
    """Runs every part once, small."""
    rows = strategies.measure(strategies.QUICK[0], ("mlp", "gpt2"), (0,), session)
    result: dict[str, Any] = {"strategies": {"summary": strategies.summary(rows), "rows": rows}}
    policies = ("fifo", "ddp", "deft", "ours")
    result["buckets"] = buckets.measure(session, rates=(1.0,), policies=policies, iterations=6)
    result["replay"] = replays.measure(session, cases=(("mlp", BATCHES["mlp"][0]),), steps=8)
    session.write("quick", result)
