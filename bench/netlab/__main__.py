"""The network laboratory.

    sudo .venv/bin/python -m bench.netlab quick        # a few minutes: every part once, small
    sudo .venv/bin/python -m bench.netlab full         # under an hour
    sudo .venv/bin/python -m bench.netlab strategies   # one part, in full; also: racks, buckets, torch, replay
    sudo .venv/bin/python -m bench.netlab clean        # what a killed run left behind
    .venv/bin/python -m bench.netlab render            # docs/proof.md's tables from the result files

Writes bench/results/netlab_<part>.json (quick: netlab_quick.json). Without root or iproute2 it says so and does
nothing. What was calibrated is kept in --folder and taken up; --fresh calibrates anew.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.netlab import buckets, replays, strategies
from bench.netlab.launch import ROOT
from bench.netlab.models import SIZES
from bench.netlab.net import LabError, clean, interruptible, unavailable
from bench.netlab.page import render

RESULTS = ROOT / "bench" / "results"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "part",
        choices=("quick", "full", "strategies", "racks", "buckets", "torch", "replay", "clean", "render"),
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "paselab")
    parser.add_argument("--fresh", action="store_true", help="forget earlier calibrations")
    parser.add_argument("--models", help="strategies: of these alone, comma-separated")
    parser.add_argument("--calibrate-s", type=float, default=75.0, help="seconds for each network")
    parser.add_argument("--mbit", type=float, help="strategies: on the networks of this rate alone")
    parser.add_argument("--batches", type=int, default=2, choices=(1, 2), help="strategies: batch sizes")
    parser.add_argument("--iterations", type=int, default=20, help="buckets, replay: of each run")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result files go")
    args = parser.parse_args()
    if args.part == "render":
        render(ROOT / "docs" / "proof.md", args.results)
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
    try:
        with interruptible():
            run(args)
    except LabError as e:
        print(f"netlab: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; everything was taken down", file=sys.stderr)
        return 130
    return 0


def run(args: argparse.Namespace) -> None:
    if args.part == "quick":
        began = time.time()
        rows = strategies.measure(strategies.QUICK[0], ("mlp", "gpt2"), 1, args.folder, 30.0)
        result: dict[str, Any] = {"strategies": {"summary": strategies.summary(rows), "rows": rows}}
        policies = ("fifo", "ddp", "deft", "ours")
        result["buckets"] = buckets.measure(args.folder, rates=(1.0,), policies=policies, iterations=8)
        result["replay"] = replays.measure(
            args.folder, cases=replays.CASES[:1], hosts=2, steps=8, calibrate_s=30.0
        )
        write("quick", result, began, args.results)
    if args.part in ("full", "strategies"):
        models = args.models.split(",") if args.models else list(SIZES)
        began, rows = time.time(), []
        chosen = [t for t in strategies.FULL if not args.mbit or t.host_mbit == args.mbit]
        if len(chosen) < len(strategies.FULL):
            rows += _kept(args.results / "netlab_strategies.json", [t.name for t in chosen])
        for topology in chosen:
            rows += strategies.measure(topology, models, args.batches, args.folder, args.calibrate_s)
            write("strategies", {"summary": strategies.summary(rows), "rows": rows}, began, args.results)
    if args.part in ("full", "racks"):
        began = time.time()
        rows = strategies.measure(
            strategies.RACKS, ("mlp", "gpt2"), args.batches, args.folder, args.calibrate_s
        )
        write("racks", {"summary": strategies.summary(rows), "rows": rows}, began, args.results)
    if args.part in ("full", "buckets"):
        began = time.time()
        found = buckets.measure(
            args.folder, rates=buckets.RATES, policies=buckets.POLICIES, iterations=args.iterations
        )
        write("buckets", found, began, args.results)
    if args.part in ("full", "torch") and importlib.util.find_spec("torch") is not None:
        began = time.time()
        found = buckets.measure(
            args.folder,
            rates=buckets.RATES,
            policies=buckets.POLICIES,
            iterations=args.iterations,
            kind="torch",
        )
        write("torch", found, began, args.results)
    if args.part in ("full", "replay"):
        began = time.time()
        found = replays.measure(
            args.folder, cases=replays.CASES, hosts=2, steps=args.iterations, calibrate_s=args.calibrate_s
        )
        write("replay", found, began, args.results)


def _kept(file: Path, measured: list[str]) -> list[dict[str, Any]]:
    """The rows of networks that are not measured now."""
    before = json.loads(file.read_text())["rows"] if file.exists() else []
    return [r for r in before if r["network"] not in measured]


def _summaries(result: dict[str, Any]) -> Any:
    if "summary" in result:
        return result["summary"]
    return {part: found["summary"] for part, found in result.items()}


def write(part: str, result: dict[str, Any], began: float, results: Path) -> None:
    """bench/results/netlab_<part>.json, with where, when and how."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    about = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "commit": subprocess.run(git, capture_output=True, text=True, cwd=ROOT).stdout.strip(),
        "command": "python -m bench.netlab " + " ".join(sys.argv[1:]),
        "seconds": round(time.time() - began, 1),
        "load_average": os.getloadavg(),
    }
    file = results / f"netlab_{part}.json"
    file.write_text(json.dumps(about | result, indent=1) + "\n")
    print(f"{file}: {json.dumps(_summaries(result))}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
