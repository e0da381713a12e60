"""Writes the JSON Schemas of pase's files from their types.

    python -m bench pages.schemas

Run it after a change of a file format. ``SCHEMAS`` lists the files; tests compare them with the types.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pase.files.atomic import write_atomically
from pase.machine.load import made_groups_schema
from pase.machine.load import made_schema as machine_schema
from pase.plan import layout
from pase.replay.traces import timeline_io
from pase.schedule import io

ROOT = Path(__file__).resolve().parents[2]

SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "pase/machine/machine.schema.json": machine_schema,
    "pase/machine/groups.schema.json": made_groups_schema,
    "pase/plan/layout-1.json": layout.made_schema,
    "pase/replay/timeline.schema.json": timeline_io.made_schema,
    "pase/schedule/schemas/problem.schema.json": partial(io.made_schema, "problem"),
    "pase/schedule/schemas/bucket_plan.schema.json": partial(io.made_schema, "bucket_plan"),
}
"""File -> the function that makes its schema."""


def main() -> None:
    """Writes every schema file."""
    for file, make in SCHEMAS.items():
        write_atomically(ROOT / file, json.dumps(make(), indent=1) + "\n")
        print(f"wrote {file}")
