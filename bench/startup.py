"""How long `import pase` and `pase --help` take: medians of fresh processes, beside a bare interpreter.

.venv/bin/python bench/startup.py        # writes bench/results/startup.json
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNS = 21
CASES = {
    "python": ["-c", "pass"],
    "import pase": ["-c", "import pase"],
    "pase --help": ["-m", "pase.cli", "--help"],
}


def main() -> None:
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(RUNS):  # in turn, so that a busy moment falls on all of them
        for name, arguments in CASES.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
            seconds[name].append(time.perf_counter() - began)
    git = ["git", "rev-parse", "--short", "HEAD"]
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "commit": subprocess.run(git, capture_output=True, text=True, cwd=ROOT).stdout.strip(),
        "command": "python bench/startup.py",
        "runs": RUNS,
        "median_s": {name: round(statistics.median(s), 4) for name, s in seconds.items()},
        "least_s": {name: round(min(s), 4) for name, s in seconds.items()},
        "load_1min": round(os.getloadavg()[0], 2),
    }
    out = ROOT / "bench" / "results" / "startup.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(out.read_text())


if __name__ == "__main__":
    main()
