"""Programs composed from patterns, compared with the unsharded step.

    python -m bench composer                              # 5,000 programs in JAX; rows in the result file are kept
    python -m bench composer --framework torch            # 2,000 in PyTorch
    python -m bench composer --seeds 0-199 --again        # these again
    python -m bench composer --faults                     # those in the result file with a fault, again
    python -m bench composer --show 17                    # one program: its source and its row
    python -m bench composer --shrink 17                  # the smallest program found that ends in the same way
    python -m bench composer --program "8,4,8 glu.3! | mean_square.1 @ default/auto/sgd" --show 0

A seed draws one to four layers, transforms of their weights, a loss, and one or two ways to plan, lower and run the
step. It is compared with the unsharded step in float64 over three steps: each loss, parameter and buffer. Each program
runs in a child process, so that a program that aborts becomes a row. Writes bench/results/composer_jax.json, or
composer_torch.json: how many programs ended how, by pattern and by way to run, and each program that did not agree. The
program of a row is a line that ``--program`` takes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.composer.runner import MODULES, Server, counted, ended, failing, rows, shrunk
from bench.composer.spec import Spec, parse
from bench.runner import BEGAN, RESULTS, numbers, option, parser, save

SEEDS = {"jax": 5000, "torch": 2000}
ROW = ("program", "patterns", "commit", "ends", "cpu_s")
"""The values of each program in the result file, in this order."""


def drawn(server: Server, seeds: list[int]) -> dict[int, Spec]:
    """Returns the programs of these seeds."""
    from importlib import import_module

    module = import_module(MODULES[server.framework])
    return {seed: module.draw(seed) for seed in seeds}


def arguments() -> argparse.Namespace:
    """Returns the options of the command line."""
    return parser(
        __doc__,
        "",
        option("--framework", choices=list(MODULES), default="jax"),
        option("--seeds", type=numbers, help="as in 3,7-9; default: all"),
        option("--again", action="store_true", help="also those that the result file has"),
        option("--faults", action="store_true", help="those that the result file has with a fault"),
        option("--show", type=int, metavar="SEED", help="print its trace and its row; save nothing"),
        option("--shrink", type=int, metavar="SEED", help="leave out what can be; save nothing"),
        option("--program", type=parse, help="this program, not a seed's"),
        option("-o", "--out", type=Path, help="the result file"),
    ).parse_args()


def look(server: Server, spec: Spec, smallest: bool) -> None:
    """Prints a program and how it ends, or the smallest program that ends in the same way."""
    from importlib import import_module

    (row,) = rows(server, [spec])
    ends = ended(row)
    print(f"{ends}: {spec}", flush=True)
    if smallest and ends != "agrees":
        spec, row = shrunk(server, spec, lambda r: ended(r) == ends)
    print(import_module(MODULES[server.framework]).written(spec))
    print(json.dumps(row, indent=1))


def run(server: Server, seeds: list[int], found: dict[str, Any], file: Path) -> None:
    """Runs the programs of these seeds, and writes the file every 25 programs."""
    programs = {s: parse(found[str(s)]["program"]) for s in seeds if str(s) in found}
    programs = programs | drawn(server, [s for s in seeds if s not in programs])
    for done, (seed, row) in enumerate(zip(programs, rows(server, programs.values()), strict=True), 1):
        found[str(seed)] = row | {"commit": BEGAN["commit"]}
        if failing(row):
            for manner, end in row["ends"].items():
                print(seed, manner, end["end"], end.get("message", "")[:200].replace("\n", " | "), flush=True)
        if done % 25 == 0 or done == len(programs):
            write(found, file)
            print(f"{done} of {len(programs)}: {counted(found)['ends']}", flush=True)


def write(found: Mapping[str, Any], file: Path) -> None:
    """Writes all rows with their counts. For rows that agree, the file only has the values of ``ROW``."""
    order = {k: found[k] for k in sorted(found, key=int)}
    kept = {k: [row.get(name) for name in ROW] for k, row in order.items()}
    commits: dict[str, int] = {}
    for row in order.values():
        commits[str(row["commit"])] = commits.get(str(row["commit"]), 0) + 1
    save(counted(order) | {"commits": commits, "programs": kept}, file)


def read(file: Path) -> dict[str, Any]:
    """Returns the rows of a result file, by seed."""
    if not file.exists():
        return {}
    held = json.loads(file.read_text())["programs"]
    return {k: dict(zip(ROW, row, strict=True)) for k, row in held.items()}


def main() -> None:
    """Writes bench/results/composer_jax.json: how each program ended."""
    given = arguments()
    server = Server.of(given.framework)
    seed = given.show if given.show is not None else given.shrink
    if seed is not None or given.program is not None:
        spec = given.program or drawn(server, [seed])[seed]
        look(server, spec, smallest=given.shrink is not None)
        return
    file = given.out or RESULTS / f"composer_{given.framework}.json"
    found = read(file)
    seeds = given.seeds if given.seeds is not None else list(range(SEEDS[given.framework]))
    if given.faults:
        seeds = [s for s in seeds if str(s) in found and failing(found[str(s)])]
    elif not given.again:
        seeds = [s for s in seeds if str(s) not in found]
    run(server, seeds, found, file)
