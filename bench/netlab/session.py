"""One run of the laboratory: where things lie, until when, what of an earlier run is taken up, what is written."""

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
    """folder: calibrations, layouts, journals, traces. results: where result files go. resume: what was measured
    at this commit, on these machine files, is not measured again. until: time.time() after which nothing new is
    begun. calibrate_s: the budget for each network."""

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
        """What must be the same for a measurement to be taken up again."""
        if machine is None:
            return self.commit
        return f"{self.commit} {hashlib.sha256(machine.read_bytes()).hexdigest()[:12]}"

    def has(self, seconds: float) -> bool:
        """Is there time for something that takes so long?"""
        return time.time() + seconds < self.until

    def say(self, text: str) -> None:
        print(f"[{(time.time() - self.began) / 60:5.1f} min] {text}", file=sys.stderr, flush=True)

    def write(self, part: str, result: dict[str, Any]) -> None:
        """netlab_<part>.json, whole or not at all; called again as results come in."""
        about = {"seconds": round(time.time() - self.began, 1), "load_average": list(os.getloadavg())}
        save(about | result, self.results / f"netlab_{part}.json")

    def kept(self, part: str, networks: Sequence[str]) -> list[dict[str, Any]]:
        """Rows of this commit in the part's file, of networks that are not measured now."""
        file = self.results / f"netlab_{part}.json"
        before = json.loads(file.read_text()).get("rows", []) if file.exists() else []
        return [r for r in before if r["network"] not in networks and r.get("commit") == self.commit]

    def others(self, part: str, runs: Sequence[str]) -> list[dict[str, Any]]:
        """Rows of the part's file, of other runs than these; each says the commit that it was measured at."""
        file = self.results / f"netlab_{part}.json"
        before = json.loads(file.read_text()) if file.exists() else {"rows": []}
        return [{"commit": before["commit"], **r} for r in before["rows"] if r["run"] not in runs]


def rows_of(results: Path, stamp: str, since: float = 0.0) -> tuple[dict[str, dict[str, Any]], str | None]:
    """(key -> row of every cell that is done, key of the last one begun since then) in a journal, of this stamp."""
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
