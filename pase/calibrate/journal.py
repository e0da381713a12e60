"""The journal of a calibration: one line a sample, appended as it is measured, so that a stop loses nothing."""

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
    """Samples by key, kept in a file. The first line is the fingerprint of what was measured.

    Raises PaseError where the file is of another machine, or is no journal.
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
            raise PaseError(f"{path} is not a journal of pase calibrate ({SCHEMA}); {remedy}")
        for key in sorted({*there, *fingerprint}):
            if there.get(key) != fingerprint.get(key):
                raise PaseError(
                    f"{path} was measured elsewhere: its {key} is {there.get(key)!r}, here it is "
                    f"{fingerprint.get(key)!r}; {remedy}"
                )
        kept = lines[:1]
        for number, line in enumerate(lines[1:], 2):
            try:
                sample = Sample(**json.loads(line))
            except (ValueError, TypeError) as e:
                # A stop may tear the last line; anywhere else it is damage.
                if number == len(lines):
                    break
                raise PaseError(f"{path}:{number} cannot be read ({e}); {remedy}") from e
            self.samples[sample.key] = sample
            kept.append(line)
        self.resumed = len(self.samples)
        whole = "\n".join(kept) + "\n"
        if whole != text:
            path.write_text(whole, encoding="utf-8")

    def add(self, sample: Sample) -> None:
        """Keeps it, in the file first. A later sample of a key replaces the earlier one."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as f:
                f.write(json.dumps(dataclasses.asdict(sample)) + "\n")
        self.samples[sample.key] = sample
