"""The profiler of a running program, before it runs and without a framework."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pase.errors import PaseError
from pase.replay.collect.profiling import profile


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has imported neither framework."""
    for framework in ("jax", "torch"):
        monkeypatch.delitem(sys.modules, framework, raising=False)


@pytest.mark.usefixtures("bare")
def test_a_program_without_a_framework_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PaseError, match="neither jax nor torch") as e, profile(tmp_path / "traces"):
        pass
    assert "import the framework" in e.value.fix and not (tmp_path / "traces").exists()
    assert "jax" not in sys.modules  # the profiler imports no framework itself


@pytest.mark.usefixtures("bare")
def test_steps_outside_of_a_trace_mark_nothing(tmp_path: Path) -> None:
    run = profile(tmp_path / "traces")
    with run.step():
        pass
    run.stop()
    assert not (tmp_path / "traces").exists()
