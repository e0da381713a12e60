"""The corpus: programs from libraries, planned, run and compared.

    python -m bench programs                 # all of them
    python -m bench programs 'haiku.*' nnx   # these again; the other rows are kept
    python -m bench programs --missing       # those without a row, and those that ran out of time
    python -m bench programs --failing       # those that do not agree
    python -m bench programs --recount       # only the FLOPs, after a change of what counts them

Each program runs in its own process with a limit of CPU time. Needs the packages of the extra 'corpus'
(``make test-corpus`` installs them). Writes bench/results/programs.json. The exit status is 1 if a program that agreed
before does not agree now.
"""

from __future__ import annotations

import json
import os
import sys
from fnmatch import fnmatch
from typing import Any

from bench.processes import forks_of, row_apart
from bench.programs import child
from bench.programs.catalog import PACKAGES, load
from bench.runner import BEGAN, RESULTS, option, parser, save

FILE = RESULTS / "programs.json"
ENVIRONMENT = {
    # Eight devices that wait for each other on two busy cores are slow, not stuck. LLVM's optimizer takes a third of
    # the time and changes neither numbers nor buffers.
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=600 "
    "--xla_cpu_collective_timeout_seconds=600 --xla_backend_optimization_level=0 "
    "--xla_cpu_parallel_codegen_split_count=1",
    "JAX_PLATFORMS": "cpu",
    "KERAS_BACKEND": "jax",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def server(names: list[str]) -> Any:
    """Returns a context whose processes are forks of a server that has only imported what these programs need."""
    os.environ |= ENVIRONMENT
    packages = {p for name in names for p in PACKAGES[name.partition(".")[0]]}
    return forks_of(["bench.programs.child", *child.PRELOADED, *sorted(packages)])


def run(processes: Any, name: str, cpu_s: int, what: child.What = "step") -> dict[str, Any]:
    """Returns a program's row; a process that dies or does not end is an error in the row."""
    row = row_apart(processes, child.ROWS[what], name, cpu_s=cpu_s)
    return {"agrees": False} | row if "error" in row else row


def read() -> dict[str, Any]:
    """Returns the rows of the result file."""
    return json.loads(FILE.read_text())["programs"] if FILE.exists() else {}


def main() -> None:
    """Writes bench/results/programs.json: for each program whether the sharded step agrees, or what stopped it."""
    given = parser(
        __doc__,
        "",
        option("programs", nargs="*", help="patterns of names"),
        option("--cpu-s", type=int, default=200, help="seconds of CPU time for each program"),
        option("--missing", action="store_true", help="only what has no row yet, or ran out of time"),
        option("--failing", action="store_true", help="only what has a row and does not agree"),
        option("--recount", action="store_true", help="only the FLOPs, of rows that agree; the rest is kept"),
    ).parse_args()
    rows = read()

    def wanted(name: str) -> bool:
        row = rows.get(name, {})
        return (
            (not given.programs or any(fnmatch(name, p) for p in given.programs))
            and not (given.missing and "not done" not in row.get("error", "" if row else "not done"))
            and not (given.failing and row.get("agrees", True))
            and not (given.recount and not row.get("agrees", False))
        )

    names = [name for name in sorted(load()) if wanted(name)]
    processes = server(names)
    lost = []
    for name in names:
        if given.recount:
            row = rows[name] | run(processes, name, given.cpu_s, "count")
        else:
            row = run(processes, name, given.cpu_s)
        if not row["agrees"] and "off" in row and not given.recount:
            row["float64"] = run(processes, name, given.cpu_s, "float64")
        if not row["agrees"] and rows.get(name, {}).get("agrees"):
            lost.append(name)
        rows = read() | {
            name: row | {"commit": BEGAN["commit"]}
        }  # another run may write the file at the same time
        print(
            f"{name:36} {'agrees' if row['agrees'] else row.get('stage')} {row.get('cpu_s', '')} "
            f"{row.get('flops', 0):.2f} {row.get('memory', 0):.2f} {row.get('error', '')[:160]}",
            flush=True,
        )
        rows = {k: rows[k] for k in sorted(rows)}
        agree = sum(r["agrees"] for r in rows.values())
        explained = sum(r.get("float64", {}).get("explained", False) for r in rows.values())
        save({"agree": agree, "explained": explained, "of": len(rows), "programs": rows}, FILE)
    if lost:
        sys.exit(f"{len(lost)} programs agreed before and do not now: {', '.join(lost)}")
