"""The error of a file that cannot be opened, with what to do about it."""

from __future__ import annotations

import re
from pathlib import Path

from pase.errors import PaseError

__all__ = ["unreadable"]

_MODEL = re.compile(r"[\w.]+:[\w.?=&,/-]+")


def unreadable(path: str | Path, error: OSError, what: str = "a file") -> PaseError:
    """What is wrong with the path. what: the kind of file that is expected, such as "a layout".

    >>> unreadable("zoo:gpt2", FileNotFoundError(2, "No such file or directory"), "a layout").fix
    'write its layout first: pase compile zoo:gpt2 --devices 8 -o layout.json'
    """
    named = str(path)
    if isinstance(error, FileNotFoundError):
        if _MODEL.fullmatch(named):
            fix = f"write its layout first: pase compile {named} --devices 8 -o layout.json"
            return PaseError(f"it is a model, and {what} is expected", where=named, fix=fix)
        return PaseError("there is no such file", where=named, fix="check the path")
    if isinstance(error, IsADirectoryError):
        return PaseError(f"it is a folder, and {what} is expected", where=named, fix="name the file in it")
    return PaseError(f"cannot read it: {error.strerror or error}", where=named)
