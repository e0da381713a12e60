"""Programs that pase profile traces are unchanged: their environment, and the sitecustomize that it brings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pase.replay.collect.autostart import environment


def test_a_program_finds_the_sitecustomize_and_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('own')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    env = environment(tmp_path / "traces", 1.5, skip=3, steps=4)
    program = "import sys; print(sys.modules['sitecustomize'].__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    own, found = done.stdout.splitlines()
    assert own == "own" and Path(found).parent.name == "_site"
    assert not (tmp_path / "traces").exists()  # this program imports no framework


def test_the_environment_says_where_how_long_and_which_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    env = environment(Path("traces"), 1.5, skip=3, steps=4)
    said = {k: v for k, v in env.items() if k.startswith("PASE_PROFILE")}
    # A program may change its folder, so the path is absolute.
    assert sorted(said.values()) == sorted([str(tmp_path / "traces"), "1.5", "3", "4"])
    assert os.pathsep not in env["PYTHONPATH"] and (Path(env["PYTHONPATH"]) / "sitecustomize.py").is_file()
