"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from mmap import mmap
from pathlib import Path

from pase.errors import PaseError

__all__ = ["write_atomically"]


def write_atomically(path: str | Path, content: str | Iterable[bytes | memoryview | mmap]) -> None:
    """Writes a text, or the pieces of a binary file, to a temporary file in the same folder, syncs it, and renames it
    to ``path``.

    Raises PaseError if the folder does not exist. If writing fails, an OSError names ``path``, and the file is
    unchanged.
    """
    pieces = [content.encode("utf-8")] if isinstance(content, str) else content
    path = Path(path)
    if not path.parent.is_dir():
        raise PaseError(
            f"it cannot be written, because the folder {path.parent} does not exist",
            where=str(path),
            fix="create the folder",
        )
    try:
        if path.exists() and not path.is_file():  # write to a pipe or /dev/null instead of replacing it
            path.write_bytes(b"".join(pieces))
        else:
            _replace(path, pieces)
    except (
        OSError
    ) as e:  # Python's error names no file if a disk is full, and the temporary file if a folder is read-only
        raise OSError(e.errno, e.strerror, str(path)) from e


def _replace(path: Path, pieces: Iterable[bytes | memoryview | mmap]) -> None:
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(fd, "wb") as f:
            for piece in pieces:
                f.write(piece)
            f.flush()
            os.fsync(f.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
