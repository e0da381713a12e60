"""PaSE's Table I: seconds to find the best strategy, ours and the paper's.

    python -m bench published.pase_table1 [--repeats 3]

The models, the space (powers of two: as good as all divisors on every instance tried) and the costs are the same;
tests/paper compares the costs with the prototype's own tables. ``tables_s`` is the time to price all configs and edges
of the traced graph, ``search_s`` the time to find the optimum and prove it. The paper's figures are those of Table I
(Xeon E5, tables included); the prototype's were measured on a machine with two cores, for its dynamic program alone.
Writes bench/results/paper_table1.json.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from bench.runner import Benchmark, option

DEVICES = (4, 8, 16, 32, 64)
PAPER_S = {  # PaSE (IPDPS 2021), Table I, column "Ours"
    "alexnet": (0.226, 0.253, 0.295, 0.361, 0.475),
    "inception_v3": (14.398, 20.018, 39.791, 86.039, 196.253),
    "rnnlm": (0.057, 0.086, 0.069, 0.131, 0.215),
    "transformer": (9.752, 28.798, 130.882, 553.022, 1883.187),
}
FLEXFLOW_S = {  # Table I, column "FlexFlow"
    "alexnet": (2.54, 2.77, 6.98, 7.92, 257.3),
    "inception_v3": (69.2, 146.5, 365.8, 938.0, 2237.0),
    "rnnlm": (107.1, 164.7, 432.2, 668.2, 1042.0),
}
PROTOTYPE_S = {  # CPU seconds of the released prototype's search; None: not measured, or not done in 1200 s
    "alexnet": (None, None, None, None, 0.22),
    "inception_v3": (3.8, 5.4, 11.8, 29.9, 80.1),
    "rnnlm": (None, None, None, None, 0.12),
    "transformer": (4.9, 20.5, 133.0, None, None),
}

# The last one has each of the 12 layers separately, as PaSE; the one before shares a config in a loop.
MODELS = (*PAPER_S, "transformer?scan=0")


def measured(model: str, given: Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each number of devices. SystemExit if an optimum is not proven."""
    from pase import zoo
    from pase.frontends.jax.frontend import trace
    from pase.ir import named, simplify
    from pase.paper import build
    from pase.search import solve

    name = model.partition("?")[0]
    m = zoo.get(model)
    began = time.perf_counter()
    graph = named(simplify(trace(m.loss_fn, m.params, m.batch).graph))
    traced = time.perf_counter() - began
    solve(build(graph, 4)[0])  # compiles the kernels
    for i, p in enumerate(DEVICES):
        tables_s, search_s = [], []
        for _ in range(given.repeats):
            t0 = time.perf_counter()
            tables, space = build(graph, p)
            t1 = time.perf_counter()
            found = solve(tables)
            tables_s.append(t1 - t0)
            search_s.append(time.perf_counter() - t1)
        if not found.optimal:
            raise SystemExit(f"{model} p={p}: not proven optimal")
        row = {
            "p": p,
            "layers": len(space.layers.nodes),
            "most_configs": max(len(c) for c in space.configs),
            "cost_flop": found.cost,
            "trace_s": round(traced, 3),
            "tables_s": round(statistics.median(tables_s), 4),
            "search_s": round(statistics.median(search_s), 4),
            "search_least_s": round(min(search_s), 4),
            "paper_s": PAPER_S[name][i],
            "flexflow_s": FLEXFLOW_S[name][i] if name in FLEXFLOW_S else None,
            "prototype_search_s": PROTOTYPE_S[name][i],
        }
        yield row | {"paper_over_ours": round(PAPER_S[name][i] / (row["tables_s"] + row["search_s"]), 1)}


BENCH = Benchmark(
    "paper_table1",
    MODELS,
    measured,
    named="{model}",
    head=lambda _, given: {"repeats": given.repeats},
    options=[option("--repeats", type=int, default=3)],
)
