"""What a proof over every mesh of the devices finds and takes, beyond the meshes that are searched by default.

    python -m bench.search.every_mesh [--only "gpt2, 32"] [-o bench/results/every_mesh.json]

CPU seconds of one process; without a memory limit and without baselines. Rows that are not run again are kept.
"""

from __future__ import annotations

import json
import time

import pase
from bench.arguments import parser, wanted
from bench.provenance import save

ROWS = (
    ("mlp", 32),
    ("gpt2", 24),
    ("gpt2", 32),
    ("llama3_8b", 32),
    ("mlp", 64),
    ("gpt2", 64),
    ("llama3_8b", 64),
)


def measured(model: str, devices: int) -> dict[str, object]:
    """One row: the default's answer, and that over all meshes."""
    began = time.process_time()
    few = pase.compile(f"zoo:{model}", devices=devices, overlap="none", baselines=False, memory_limit="none")
    between = time.process_time()
    every = pase.compile(
        f"zoo:{model}", devices=devices, overlap="none", baselines=False, memory_limit="none", meshes="all"
    )
    return {
        "model": model,
        "devices": devices,
        "searched": len(few.tried),
        "proven": every.provenance["meshes"],
        "cheaper": 1 - every.cost / few.cost,
        "mesh": list(every.mesh.sizes),
        "bound_over_cost": every.bound / every.cost,
        "cpu_s": round(between - began, 1),
        "all_cpu_s": round(time.process_time() - between, 1),
    }


def main() -> None:
    """Writes bench/results/every_mesh.json: a row for each model and number of devices."""
    args = parser(__doc__, "every_mesh").parse_args()
    pase.compile("zoo:mlp", devices=8)  # imports
    before = json.loads(args.o.read_text())["rows"] if args.o.exists() else []
    rows = {(r["model"], r["devices"]): r for r in before if (r["model"], r["devices"]) in ROWS}
    for row in wanted(((f"{m}, {n}", (m, n)) for m, n in ROWS), args.only):
        rows[row] = measured(*row)
        print(rows[row], flush=True)
        save(
            {"rows": [rows[r] for r in ROWS if r in rows]}, args.o
        )  # each row, so that a run that is ended keeps those before


if __name__ == "__main__":
    main()
