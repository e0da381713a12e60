"""Seconds to build the cost tables of zoo models over every mesh that a search looks at.

    python -m bench.search.tables [-o bench/results/tables.json]

Each model is traced once; then the tables of all meshes of up to three axes are built, in the order of the
search and without anything kept from an earlier model; the whole is repeated and the median taken. CPU seconds
of one process, so that a busy machine does not tell.
"""

from __future__ import annotations

import statistics
import sys
import time
from itertools import groupby
from operator import itemgetter

from bench.arguments import parser, wanted
from bench.provenance import save
from pase import costmodels, machine, zoo
from pase.frontends.jax.frontend import trace
from pase.ir import Graph, named, simplify
from pase.once import forget
from pase.tables.build import build
from pase.tables.facts import facts
from pase.tables.reshard import KNOWN_PLANS

MODELS = ("gpt2", "gpt2?scan=0", "inception_v3", "densenet121", "llama3_405b")
DEVICES = (32, 64, 1024, 16384)
BEFORE_S = {  # commit 67aa103, this machine, 64 devices: pairs priced one edge at a time
    "gpt2": 1.62,
    "gpt2?scan=0": 13.52,
    "inception_v3": 12.77,
    "densenet121": 19.38,
    "llama3_405b": 2.80,
}


def graph(name: str) -> Graph:
    """The simplified graph of a zoo model."""
    m = zoo.get(name)
    return named(simplify(trace(m.loss_fn, m.params, m.batch).graph))


def seconds(g: Graph, devices: int, axes: int) -> tuple[float, int]:
    """(CPU seconds to build the tables of all meshes, how many meshes)."""
    m = machine.load("h100x8")
    model = costmodels.get("analytic", m)
    meshes = machine.meshes(devices, m, axes, max_prime_axes=0)
    KNOWN_PLANS.forget()
    forget(facts, g)
    start = time.process_time()
    for mesh in meshes:
        build(g, mesh, model)
    return time.process_time() - start, len(meshes)


def main() -> None:
    """Writes bench/results/tables.json: a row for each model and number of devices."""
    options = parser(__doc__, "tables")
    options.add_argument("--repeats", type=int, default=3)
    args = options.parse_args()
    rows = []
    cells = ((f"{name} {devices}", (name, devices)) for name in MODELS for devices in DEVICES)
    for name, found in groupby(wanted(cells, args.only), key=itemgetter(0)):
        g = graph(name)
        for _, devices in found:
            runs = [seconds(g, devices, 3) for _ in range(args.repeats)]
            median = statistics.median(s for s, _ in runs)
            row = {"model": name, "devices": devices, "meshes": runs[0][1], "cpu_s": round(median, 3)}
            if devices == 64:
                row["before_cpu_s"] = BEFORE_S[name]
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    save({"rows": rows}, args.o)


if __name__ == "__main__":
    main()
