"""One run of the laboratory: its files, its time limit, and what it keeps of an earlier run."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.runner import BEGAN, RESULTS, save

__all__ = ["Session", "rows_of"]


@dataclass(frozen=True, kw_only=True)
class Session:
    """folder: for calibrations, layouts, journals, traces. results: the folder of result files. resume: whether to keep
    what was measured at this commit with these machine files. until: time.time() after which nothing new is started.
    calibrate_s: the budget for each network."""

    folder: Path
    results: Path = RESULTS
    resume: bool = False
    until: float = float("inf")
    calibrate_s: float = 60.0
    began: float = field(default_factory=time.time)

    @property
    def commit(self) -> str:
        return str(BEGAN["commit"])

    def stamp(self, machine: Path | None = None) -> str:
        """Returns what must be equal for a measurement to be kept."""
        if machine is None:
            return self.commit
        return f"{self.commit} {hashlib.sha256(machine.read_bytes()).hexdigest()[:12]}"

    def has(self, seconds: float) -> bool:
        """Returns whether there is time for something that takes this many seconds."""
        return time.time() + seconds < self.until

    def say(self, text: str) -> None:
        print(f"[{(time.time() - self.began) / 60:5.1f} min] {text}", file=sys.stderr, flush=True)

    def write(self, part: str, result: dict[str, Any]) -> None:
        """Writes netlab_<part>.json atomically; it is called again as results come in."""
        about = {"seconds": round(time.time() - self.began, 1), "load_average": list(os.getloadavg())}
        save(about | result, self.results / f"netlab_{part}.json")

    def kept(self, part: str, networks: Sequence[str]) -> list[dict[str, Any]]:
        """Returns the rows of this commit in the part's file, of networks that are not measured now."""
        file = self.results / f"netlab_{part}.json"
        before = json.loads(file.read_text()).get("rows", []) if file.exists() else []
        return [r for r in before if r["network"] not in networks and r.get("commit") == self.commit]

    def others(self, part: str, runs: Sequence[str]) -> list[dict[str, Any]]:
        """Returns the rows of other runs in the part's file, each with the commit at which it was measured."""
        file = self.results / f"netlab_{part}.json"
        before = json.loads(file.read_text()) if file.exists() else {"rows": []}
        return [{"commit": before["commit"], **r} for r in before["rows"] if r["run"] not in runs]


def rows_of(results: Path, stamp: str, since: float = 0.0) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Reads a journal; returns the rows of finished cells with this stamp by key, and the key of the last cell that was
    started since then."""
    done: dict[str, dict[str, Any]] = {}
    begun = None
    for line in results.read_text().splitlines() if results.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a run that was killed
        if row.get("at") != stamp:
            continue
        if "begun" in row:
            begun = row["key"] if row["begun"] >= since else begun
        else:
            done[row["key"]] = row
    return done, begun
