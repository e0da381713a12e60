"""Traces that the tests of several commands read."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cases.timelines import ImaginedRun, simulate, write


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return write(simulate(ImaginedRun(ranks=2, iterations=4, noise=0.01)), tmp_path / "traces")
