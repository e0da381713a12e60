"""What benches and tests share: seeded problems whose truth is known, plans that move data, and recorded tables."""

import csv
import os
from pathlib import Path

SHARED = Path(os.environ.get("PASE_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
"""Recorded traces, profiles and contest instances, too large for the repository."""


def csv_rows(file: str | Path) -> list[dict[str, str]]:
    """Returns the rows of a table, by column. Lines that begin with # are left out."""
    with open(file, newline="", encoding="utf-8-sig") as f:
        return list(csv.DictReader(line for line in f if not line.startswith("#")))
