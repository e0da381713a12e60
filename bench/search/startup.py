"""How long `import pase`, `pase --help` and `pase solve` take: medians of fresh processes, beside a bare interpreter.

`pase solve` searches the largest of the paper's instances (Transformer at p = 64), if ../shared has it. What else the
machine does changes CPU seconds less than the others.

.venv/bin/python -m bench.search.startup        # writes bench/results/startup.json
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from bench.arguments import parser, wanted
from bench.cases import SHARED
from bench.processes import children_s
from bench.provenance import ROOT, save

PAPER = SHARED / "pase_instances" / "transformer_p64.json"
CASES = {
    "python": ["-c", "pass"],
    "import pase": ["-c", "import pase"],
    "pase --help": ["-m", "pase.cli", "--help"],
    **({"pase solve": ["-m", "pase.cli", "solve", str(PAPER)]} if PAPER.exists() else {}),
}


def main() -> None:
    """Writes bench/results/startup.json: median seconds and CPU seconds of each command."""
    options = parser(__doc__, "startup")
    options.add_argument("--runs", type=int, default=21)
    args = options.parse_args()
    cases = wanted(((name, (name, arguments)) for name, arguments in CASES.items()), args.only)
    seconds: dict[str, list[float]] = {name: [] for name, _ in cases}
    cpu: dict[str, list[float]] = {name: [] for name, _ in cases}
    for _ in range(args.runs):  # in turn, so that a busy moment falls on all of them
        for name, arguments in cases:
            began, before = time.perf_counter(), children_s()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
            seconds[name].append(time.perf_counter() - began)
            cpu[name].append(children_s() - before)
    result = {
        "runs": args.runs,
        "median_s": {name: round(statistics.median(s), 4) for name, s in seconds.items()},
        "least_s": {name: round(min(s), 4) for name, s in seconds.items()},
        "median_cpu_s": {name: round(statistics.median(s), 4) for name, s in cpu.items()},
    }
    print(save(result, args.o).read_text())


if __name__ == "__main__":
    main()
