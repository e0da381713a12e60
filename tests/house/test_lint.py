"""ruff and mypy, so that ``make test`` runs all checks. ``make format`` fixes most of their findings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


MYPY = ("mypy", "--cache-dir=/dev/null") if os.environ.get("CI") else ("mypy",)
"""In a clean clone there is nothing to read from a cache, and writing one is a tenth of mypy's time."""


@pytest.mark.parametrize(
    "command",
    [("ruff", "check", "."), ("ruff", "format", "--check", "."), MYPY],
    ids=("ruff check", "ruff format", "mypy"),
)
def test_lint(command):
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
