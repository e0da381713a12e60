"""The corpus: programs from libraries, each in a process of its own with a time limit.

python -m bench.programs                 # all of them
python -m bench.programs 'haiku.*' nnx   # these anew, the others' rows are kept
python -m bench.programs --missing       # those without a row, or that were not done in time

Needs the packages of the extra 'corpus'. Writes bench/results/programs.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from fnmatch import fnmatch
from typing import Any

from bench.programs.catalog import load
from bench.provenance import RESULTS, ROOT, save

FILE = RESULTS / "programs.json"


def run(name: str, limit_s: float, *options: str) -> dict[str, Any]:
    """One program's row; a process that dies or does not end says so."""
    command = [sys.executable, "-m", "bench.programs.child", name, *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"agrees": False, "error": f"not done within {limit_s:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"agrees": False, "aborted": done.returncode, "error": done.stderr[-1000:]}
    row: dict[str, Any] = json.loads(lines[-1])
    return row


def main() -> None:
    """Writes bench/results/programs.json: for each program whether the sharded step agrees, or what stopped it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", help="patterns of names")
    parser.add_argument("--limit-s", type=float, default=240.0, help="seconds for each program")
    parser.add_argument("--missing", action="store_true", help="only what has no row yet, or ran out of time")
    given = parser.parse_args()
    rows = json.loads(FILE.read_text())["programs"] if FILE.exists() else {}
    for name in sorted(load()):
        if given.programs and not any(fnmatch(name, p) for p in given.programs):
            continue
        if given.missing and "not done" not in rows.get(name, {}).get("error", "not done"):
            continue
        row = rows[name] = run(name, given.limit_s)
        if not row["agrees"] and "off" in row:
            row["float64"] = run(name, given.limit_s, "--float64")
        print(
            f"{name:36} {'agrees' if row['agrees'] else row.get('stage')} {row.get('error', '')[:160]}",
            flush=True,
        )
        rows = {k: rows[k] for k in sorted(rows)}
        agree = sum(r["agrees"] for r in rows.values())
        explained = sum(r.get("float64", {}).get("explained", False) for r in rows.values())
        save({"agree": agree, "explained": explained, "of": len(rows), "programs": rows}, FILE)


if __name__ == "__main__":
    main()
