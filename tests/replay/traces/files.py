"""Events and files of traces in Chrome's format."""

from __future__ import annotations

import json
from pathlib import Path


def kernel(i: int, **more: object) -> dict:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": f"k{i}",
        "pid": 0,
        "tid": 7,
        "ts": 10 * i,
        "dur": 5,
        "args": {"stream": 7},
        **more,
    }


def trace_file(tmp_path: Path, events: list, **header: object) -> Path:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({**header, "traceEvents": events}))
    return path
