"""From this machine's own figures to a plan, a run, its trace, and a replay of the trace: on host devices, so anywhere.

python examples/measure.py [FOLDER] [--budget 30s]

1. pase calibrate measures this computer into a machine file. 2. pase compile plans for that machine. 3. pase profile
runs examples/train.py and traces it. 4. pase replay predicts each iteration from the others: how far to trust what it
says. 5. pase diagnose says what the time went to. Each step is a command that one may as well type.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

TRAIN = Path(__file__).with_name("train.py")


def pase(*words: object) -> None:
    """Runs a command, after saying it; ends where it fails."""
    print(f"\n$ pase {' '.join(map(str, words))}", flush=True)
    subprocess.run([sys.executable, "-m", "pase.cli", *map(str, words)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", default="measured", type=Path)
    parser.add_argument("--budget", default="30s", help="how long a calibration may take")
    args = parser.parse_args()

    args.folder.mkdir(exist_ok=True)
    machine, layout, traces = (args.folder / n for n in ("here.toml", "layout.json", "traces"))
    quick = ("-n", 2, "--budget", args.budget, "--dtypes", "float32", "--max-spread", 1000)
    pase("calibrate", "-o", machine, *quick)
    pase("compile", "zoo:mlp?batch=64", "--devices", 2, "--machine", machine, "-o", layout)
    pase("profile", "-o", traces, "--", sys.executable, TRAIN, "--steps", 8)
    pase("replay", traces)
    pase("diagnose", traces, "-o", args.folder / "why.html")


if __name__ == "__main__":
    main()
