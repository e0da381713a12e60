"""PaSE's own instances: every optimum, against general solvers on the same tables.

The paper's times and its prototype's are in the notes beside ../shared/data/pase_instances.

    python -m bench.search.pase [--seconds 20] [--only transformer]
"""

from __future__ import annotations

import json

from bench.arguments import wanted
from bench.search.common import DATA, measure, options, write_results
from pase.search.instances.readers import read_instance

PAPER_S = {  # Table I, PaSE's column; for p = 8, 16, 64
    "alexnet": {8: 0.253, 16: 0.295, 64: 0.475},
    "inception3": {8: 20.018, 16: 39.791, 64: 196.253},
    "rnnlm": {8: 0.086, 16: 0.069, 64: 0.215},
    "transformer": {8: 28.798, 16: 130.882, 64: 1883.187},
}


def main() -> None:
    """Writes bench/results/search_pase.json: a row for each instance and solver."""
    args = options(__doc__, "search_pase", seconds=20.0, repeats=5)
    rows = []
    files = sorted((DATA / "pase_instances").glob("*.json"))
    for path in wanted(((file.stem, file) for file in files), args.only):
        tables, _ = read_instance(path)
        optimum = json.loads(path.read_text())["exact"]["optimum"]
        model, p = path.stem.split("_p")
        for row in measure(path.stem, tables, None, args):
            row["optimum"] = optimum
            row["paper_s"] = PAPER_S[model][int(p)]
            row["right"] = row.get("cost") == optimum
            rows.append(row)
    write_results(args, rows)


if __name__ == "__main__":
    main()
