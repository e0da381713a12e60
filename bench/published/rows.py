"""Reads a file of published training steps, with each run as it is stated."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.cases import csv_rows
from pase.errors import PaseError

__all__ = ["PublishedRow", "read", "shapes"]

_NEEDED = ("id", "layers", "hidden", "heads", "gpu", "gpus", "seq")
_UNKNOWN = ("", "unknown", "-", "?", "n/a", "none told")


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One published run, with its columns as text; a column that is absent, blank or 'unknown' is None."""

    id: str
    columns: Mapping[str, str]

    def text(self, name: str) -> str | None:
        value = (self.columns.get(name) or "").strip()
        return None if value.lower() in _UNKNOWN else value

    def whole(self, name: str) -> int | None:
        value = self.number(name)
        return None if value is None else round(value)

    def number(self, name: str) -> float | None:
        value = self.text(name)
        if value is None:
            return None
        try:
            found = float(value.replace(",", ""))
        except ValueError:
            raise PaseError(f"row {self.id}: {name} is '{value}', no number") from None
        if not 0 <= found < float("inf"):
            raise PaseError(f"row {self.id}: {name} is '{value}', out of range")
        return found

    @property
    def source(self) -> str:
        """The prefix of the id before the number of three digits ("ll3001" has "ll3")."""
        found = re.match(r"(.+?)\d{3}$", self.id) or re.match(r"([A-Za-z_]+)", self.id)
        return found.group(1).lower() if found else self.id

    @property
    def notes(self) -> str:
        return f"{self.columns.get('notes') or ''}; {self.columns.get('source') or ''}".lower()

    @property
    def memory_bytes(self) -> float | None:
        """The memory in the run's notes, such as "memory 82.4 GiB", or "allocated 82.4 GiB"."""
        found = re.search(r"(?:memory|allocated) ([\d.]+) gib", self.notes)
        return float(found.group(1)) * 2**30 if found else None

    @property
    def memory_is_allocated(self) -> bool:
        """Whether the memory is that of arrays, without gaps of the allocator and what libraries reserve."""
        return re.search(r"allocated [\d.]+ gib", self.notes) is not None

    @property
    def vocab(self) -> int | None:
        """The column, or the value in the notes, such as "a vocabulary near 128k"."""
        near = re.search(r"vocabulary near (\d+)k", self.notes)
        return self.whole("vocab") or (int(near.group(1)) * 1000 if near else None)

    @property
    def pipelined(self) -> bool:
        return (self.whole("pp") or 1) > 1


def read(path: str | Path) -> list[PublishedRow]:
    """Returns the file's rows. Raises PaseError if it is not such a file."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as f:
            reader = csv.DictReader(line for line in f if not line.startswith("#"))
            missing = [name for name in _NEEDED if name not in (reader.fieldnames or [])]
            if missing:
                raise PaseError(f"{path}: no column {', '.join(missing)}; see published_steps' README")
            rows = [{k: v for k, v in r.items() if isinstance(k, str) and isinstance(v, str)} for r in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise PaseError(f"cannot read {path}: {e}") from e
    return [
        PublishedRow(id=(r.get("id") or "").strip() or f"row{i}", columns=r) for i, r in enumerate(rows, 1)
    ]


@cache
def shapes(of: str) -> dict[str, dict[str, str]]:
    """Returns the shapes of models in one source's terms (``shapes.csv``), by its names for them."""
    every = csv_rows(Path(__file__).with_name("shapes.csv"))
    mine = {r.pop("name"): r for r in every if r.pop("of") == of}
    return {name: {k: v for k, v in r.items() if v} for name, r in mine.items()}
