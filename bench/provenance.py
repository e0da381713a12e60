"""What every result file says of itself, and how it is written: whole or not at all."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"


def provenance() -> dict[str, Any]:
    """Machine, commit, command and moment of this run; ``load_1min`` says how quiet the machine was.

    A commit that ends in ``-dirty`` had changes beside it that were not committed.
    """
    git = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    script = Path(sys.argv[0]).resolve()
    # ``python -m bench.netlab`` has its ``__main__`` as the first argument, ``python -m bench.search.tables`` the file.
    path = script.parent if script.name == "__main__.py" else script.with_suffix("")
    inside = path.is_relative_to(ROOT)
    name = ["-m", ".".join(path.relative_to(ROOT).parts)] if inside else [str(script)]
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "commit": subprocess.run(git, capture_output=True, text=True, cwd=ROOT).stdout.strip() or None,
        "command": " ".join(["python", *name, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_1min": round(os.getloadavg()[0], 2),
    }


# Taken as the bench begins: by its end the load is its own.
BEGAN = provenance()


def save(result: dict[str, Any], path: str | Path) -> Path:
    """Writes ``result`` under what this run says of itself, as JSON; returns where.

    The file is replaced whole. A ``result`` read from such a file takes this run's word in place of its own.
    """
    from pase.files.atomic import write_atomically

    out = Path(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, json.dumps(BEGAN | result | BEGAN, indent=1) + "\n")
    return out
