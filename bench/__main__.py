"""Lists the benches, or runs one.

python -m bench                              # all benches by folder
python -m bench search.growth --only "5 layers"  # one, with its options; as python -m bench.search.growth
"""

from __future__ import annotations

import runpy
import sys
from itertools import groupby
from textwrap import wrap


def main() -> None:
    """Prints the list of benches, or runs the bench that the command line names."""
    from bench.runner import COLUMNS, benches

    split = [(*name.rpartition("."), name, first) for name, first in benches().items()]
    for folder, group in groupby(sorted(split), lambda bench: bench[0]):
        print(f"\n{folder or 'bench'}")
        for *_, name, first in group:
            lines = wrap(first.replace("`", ""), COLUMNS - 29)
            print(f"  {name:26} {lines[0]}", *(f"{'':29}{line}" for line in lines[1:]), sep="\n")
    print("\npython -m bench NAME --help: how a bench is run")


if __name__ == "__main__":
    if sys.argv[1:] and not sys.argv[1].startswith("-"):
        name = sys.argv.pop(1).replace("/", ".")
        runpy.run_module(f"bench.{name}", run_name="__main__", alter_sys=True)
    else:
        main()
