"""The journal of a calibration. Each sample is appended as soon as it is measured, so an interruption loses none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from pase.calibrate.types import Sample
from pase.errors import PaseError
from pase.files.json_values import JsonObject

__all__ = ["SCHEMA", "Journal"]

SCHEMA = "pase.calibration/1"


class Journal:
    """Samples by key, stored in a file. The first line of the file has the fingerprint of the measured devices.

    path: the file; None keeps the samples in memory only.
    fingerprint: identifies the devices and versions that are measured.
    fresh: discard an existing file.

    Raises PaseError if the file has another fingerprint, or is not a journal.
    """

    def __init__(self, path: Path | None, fingerprint: JsonObject, *, fresh: bool = False) -> None:
        self.path = path
        self.samples: dict[str, Sample] = {}
        self.resumed = 0
        if path is None:
            return
        if fresh:
            path.unlink(missing_ok=True)
        if path.exists() and path.stat().st_size:
            self._read(path, json.loads(json.dumps(fingerprint)))
        else:
            head = {"schema": SCHEMA, "fingerprint": dict(fingerprint)}
            path.write_text(json.dumps(head) + "\n", encoding="utf-8")

    def _read(self, path: Path, fingerprint: JsonObject) -> None:
        remedy = "give another -o, or start again with --fresh"
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()
        try:
            head = json.loads(lines[0])
            there = head["fingerprint"]
            known = head["schema"] == SCHEMA
        except (ValueError, KeyError, TypeError):
            known, there = False, {}
        if not known:
            raise PaseError(f"not a journal of pase calibrate ({SCHEMA})", where=str(path), fix=remedy)
        for key in sorted({*there, *fingerprint}):
            if there.get(key) != fingerprint.get(key):
                raise PaseError(
                    f"it was measured elsewhere: its {key} is {there.get(key)!r}, but here it is "
                    f"{fingerprint.get(key)!r}",
                    where=str(path),
                    fix=remedy,
                )
        kept = lines[:1]
        for number, line in enumerate(lines[1:], 2):
            try:
                sample = Sample(**json.loads(line))
            except (ValueError, TypeError) as e:
                # An interruption may leave an incomplete last line. Any other unreadable line means a damaged file.
                if number == len(lines):
                    break
                raise PaseError(f"the line cannot be read ({e})", where=f"{path}:{number}", fix=remedy) from e
            self.samples[sample.key] = sample
            kept.append(line)
        self.resumed = len(self.samples)
        whole = "\n".join(kept) + "\n"
        if whole != text:
            path.write_text(whole, encoding="utf-8")

    def add(self, sample: Sample) -> None:
        """Stores a sample, first in the file. It replaces an earlier sample of the same key."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as f:
                f.write(json.dumps(dataclasses.asdict(sample)) + "\n")
        self.samples[sample.key] = sample
