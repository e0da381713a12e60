"""Table I of PaSE: time to find the best strategy, ours beside the paper's and its released prototype's.

    .venv/bin/python -m bench.published.pase_table1 [--repeats 3]      # writes bench/results/paper_table1.json

Same models, same space (powers of two: as good as all divisors on every instance tried), same costs
(tests/paper holds them to the prototype's own tables). ``tables_s`` prices all configs and edges of the
traced graph, ``search_s`` finds the optimum and proves it. The paper's figures are Table I (Xeon E5,
its tables included); the prototype's were measured on a machine with two cores, its dynamic program alone.
"""

from __future__ import annotations

import statistics
import sys
import time

from bench.arguments import parser, wanted
from bench.provenance import save

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

# The last has each of the 12 layers apart, as PaSE; the one before shares a config among those of a loop.
MODELS = (*PAPER_S, "transformer?scan=0")


def main() -> None:
    """Writes bench/results/paper_table1.json: our seconds beside the paper's and its prototype's."""
    options = parser(__doc__, "paper_table1")
    options.add_argument("--repeats", type=int, default=3)
    args = options.parse_args()
    repeats = args.repeats
    from pase import zoo
    from pase.frontends.jax.frontend import trace
    from pase.ir import named, simplify
    from pase.paper import build
    from pase.search import solve

    rows = []
    for model in wanted(((m, m) for m in MODELS), args.only):
        name = model.partition("?")[0]
        paper = PAPER_S[name]
        m = zoo.get(model)
        began = time.perf_counter()
        graph = named(simplify(trace(m.loss_fn, m.params, m.batch).graph))
        traced = time.perf_counter() - began
        solve(build(graph, 4)[0])  # compiles the kernels, where they are used
        for i, p in enumerate(DEVICES):
            tables_s, search_s = [], []
            for _ in range(repeats):
                t0 = time.perf_counter()
                tables, space = build(graph, p)
                t1 = time.perf_counter()
                found = solve(tables)
                tables_s.append(t1 - t0)
                search_s.append(time.perf_counter() - t1)
            if not found.optimal:
                raise SystemExit(f"{model} p={p}: not proven optimal")
            row = {
                "model": model,
                "p": p,
                "layers": len(space.layers.nodes),
                "most_configs": max(len(c) for c in space.configs),
                "cost_flop": found.cost,
                "trace_s": round(traced, 3),
                "tables_s": round(statistics.median(tables_s), 4),
                "search_s": round(statistics.median(search_s), 4),
                "search_least_s": round(min(search_s), 4),
                "paper_s": paper[i],
                "flexflow_s": FLEXFLOW_S[name][i] if name in FLEXFLOW_S else None,
                "prototype_search_s": PROTOTYPE_S[name][i],
            }
            row["paper_over_ours"] = round(paper[i] / (row["tables_s"] + row["search_s"]), 1)
            rows.append(row)
            print(
                f"{model:20s} p={p:<3d} tables {row['tables_s']:.3f} s  search {row['search_s']:.3f} s  "
                f"paper {paper[i]:.3f} s",
                file=sys.stderr,
            )
    save({"repeats": repeats, "rows": rows}, args.o)


if __name__ == "__main__":
    main()
