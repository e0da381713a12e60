"""PaSE's own instances: every optimum, against general solvers on the same tables.

The paper's times and its prototype's are in the notes beside ../shared/data/pase_instances.

    python -m bench.search_pase [--seconds 20] [--only transformer]
"""

from __future__ import annotations

import json

from bench.search_common import DATA, bench_arguments, measure, write_results
from pase.search.readers import read_instance

PAPER_S = {  # Table I, PaSE's column; for p = 8, 16, 64
    "alexnet": {8: 0.253, 16: 0.295, 64: 0.475},
    "inception3": {8: 20.018, 16: 39.791, 64: 196.253},
    "rnnlm": {8: 0.086, 16: 0.069, 64: 0.215},
    "transformer": {8: 28.798, 16: 130.882, 64: 1883.187},
}


def main() -> None:
    args = bench_arguments(__doc__, seconds=20.0, repeats=5)
    rows = []
    for path in sorted((DATA / "pase_instances").glob("*.json")):
        if args.only not in path.stem:
            continue
        tables, _ = read_instance(path)
        optimum = json.loads(path.read_text())["exact"]["optimum"]
        model, p = path.stem.split("_p")
        for row in measure(path.stem, tables, None, args):
            row["optimum"] = optimum
            row["paper_s"] = PAPER_S[model][int(p)]
            row["right"] = row.get("cost") == optimum
            rows.append(row)
    write_results("search_pase", args, rows)


if __name__ == "__main__":
    main()
