"""Seconds to build the cost tables of zoo models over all searched meshes.

    python -m bench.search.tables

Each model is traced once. Then the tables of all meshes of up to three axes are built, in the order of the search and
with nothing cached from an earlier model; this is repeated, and the median is taken. Seconds are CPU seconds of one
process, so that other work on the machine does not matter. Writes bench/results/tables.json.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from functools import lru_cache
from typing import Any

from bench.runner import Benchmark, option
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


@lru_cache(1)
def graph(name: str) -> Graph:
    """Returns the simplified graph of a zoo model."""
    m = zoo.get(name)
    return named(simplify(trace(m.loss_fn, m.params, m.batch).graph))


def seconds(g: Graph, devices: int, axes: int) -> tuple[float, int]:
    """Returns the CPU seconds to build the tables of all meshes, and the number of meshes."""
    m = machine.load("h100x8")
    model = costmodels.get("analytic", m)
    meshes = machine.meshes(devices, m, axes, max_prime_axes=0)
    KNOWN_PLANS.forget()
    forget(facts, g)
    start = time.process_time()
    for mesh in meshes:
        build(g, mesh, model)
    return time.process_time() - start, len(meshes)


def measured(name: str, devices: int, given: Namespace) -> dict[str, Any]:
    """Returns a row: the median CPU seconds for the tables of all meshes."""
    runs = [seconds(graph(name), devices, 3) for _ in range(given.repeats)]
    row = {
        "model": name,
        "devices": devices,
        "meshes": runs[0][1],
        "cpu_s": round(statistics.median(s for s, _ in runs), 3),
    }
    return row | ({"before_cpu_s": BEFORE_S[name]} if devices == 64 else {})


BENCH = Benchmark(
    "tables",
    {f"{name} {devices}": (name, devices) for name in MODELS for devices in DEVICES},
    measured,
    named="{model} {devices}",
    options=[option("--repeats", type=int, default=3)],
)


if __name__ == "__main__":
    BENCH.run()
