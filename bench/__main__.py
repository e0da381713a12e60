"""Lists the benches, or runs one.

python -m bench                              # all benches by folder
python -m bench search.growth --only "5 layers"  # one, with its options
"""

from __future__ import annotations

import sys
from importlib import import_module
from itertools import groupby
from textwrap import wrap


def main() -> None:
    """Prints the list of benches, or runs the bench that the command line names."""
    from bench.runner import COLUMNS, benches

    every = benches()
    if sys.argv[1:] and not sys.argv[1].startswith("-"):
        name = sys.argv[1].replace("/", ".")
        if name not in every:
            raise SystemExit(f"there is no bench '{name}'; python -m bench lists them")
        sys.argv[:2] = [f"python -m bench {name}"]
        module = import_module(every[name][0])
        sys.exit(module.BENCH.run(doc=module.__doc__) if hasattr(module, "BENCH") else module.main())
    split = [(*name.rpartition("."), name, first) for name, (_, first) in every.items()]
    for folder, group in groupby(sorted(split), lambda bench: bench[0]):
        print(f"\n{folder or 'bench'}")
        for *_, name, first in group:
            lines = wrap(first.replace("`", ""), COLUMNS - 29)
            print(f"  {name:26} {lines[0]}", *(f"{'':29}{line}" for line in lines[1:]), sep="\n")
    print("\npython -m bench NAME --help: how a bench is run")


if __name__ == "__main__":
    main()
