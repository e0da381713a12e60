"""Archives of nsys-jax: bombs, and archives of something else."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from pase.errors import PaseError
from pase.replay.traces.ingest import load


def test_a_zip_bomb_in_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "p0.zip"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z,
        z.open("nvtx_gpu_proj_trace/trace.parquet", "w") as f,
    ):
        for _ in range(520):
            f.write(b"\0" * (1 << 20))
    with pytest.raises(PaseError, match="MiB unpacked"):
        load(path)


def test_other_archives_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p0.zip"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("readme", "hello")
    with pytest.raises(PaseError, match="not an nsys-jax archive"):
        load(path)
