"""Refuses to write one format into a file whose name says another, before any work is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pase.errors import PaseError

__all__ = ["Format", "written_as"]

Format = Literal["an HTML page", "JSON", "a timeline", "a machine file"]

_SUFFIXES: dict[Format, tuple[str, ...]] = {
    "an HTML page": (".html", ".htm"),
    "JSON": (".json",),
    "a timeline": (".json", ".json.gz"),
    "a machine file": (".toml",),
}
"""Format -> the suffixes of its files. Any suffix that is in no list is accepted for every format."""
_NEVER = (".png", ".pdf", ".svg", ".csv", ".py", ".gz")
"""Suffixes of what none of these formats is."""


def written_as(format: Format, *, page: str = "") -> Callable[[Path | None], Path | None]:
    """A callback for an option that names the file to write. page: how to write a page instead, if there is a way.

    The callback raises PaseError if the file's suffix is another format's.
    """

    def checked(path: Path | None) -> Path | None:
        if path is None or path.name.endswith(_SUFFIXES[format]):
            return path
        others = {s for suffixes in _SUFFIXES.values() for s in suffixes} | {*_NEVER}
        if path.name.endswith(tuple(others)):
            is_page = path.suffix in _SUFFIXES["an HTML page"]
            raise PaseError(
                f"what is written there is {format}, which a {path.suffix} file is not",
                where=f"--output {path}",
                fix=page if page and is_page else f"name a {_SUFFIXES[format][0]} file",
            )
        return path

    return checked
