"""Files are written completely or not at all, and errors name the file that was requested."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from pase.files.atomic import write_atomically
from tests.command import run


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "plan.json").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as e:
        write_atomically(tmp_path / "plan.json", "new")
    assert e.value.filename == str(tmp_path / "plan.json")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert (tmp_path / "plan.json").read_text() == "old"


def test_a_device_stays_what_it_is() -> None:
    write_atomically(os.devnull, "nothing")
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)


def test_a_command_says_which_file_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    instance = Path(__file__).parents[2] / "examples" / "instance.json"
    code, _, err = run("solve", instance, "-o", tmp_path / "here")
    assert code == 2 and str(tmp_path / "here") in err
