"""The two ways in which a request fails; the CLI turns them into exit codes 2 and 1."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

__all__ = ["DISTRIBUTION", "Infeasible", "PaseError", "did_you_mean", "install_line", "needed", "printable"]


_UNSEEN = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")
"""Control characters but tabs and line breaks: they move the cursor, hide what was said, or start a command."""


def printable(text: str) -> str:
    """The text with every control character made visible.

    >>> printable("layer\\x1b[2J")
    'layer\N{REPLACEMENT CHARACTER}[2J'
    """
    return text.translate(_UNSEEN)


class PaseError(ValueError):
    """Bad input: what is wrong, where, and what to do about it. The command line exits with 2.

    what: the fault. where: the file, option, op or line of the user's program that has it. fix: what the user can do,
    as an instruction. The message joins the parts that are given: ``where: what; fix``. They stay readable as
    attributes, so that programs and tests need not search the message.

    >>> print(PaseError("the size is -1", where="--devices", fix="give a positive number"))
    --devices: the size is -1; give a positive number

    A message may quote a file. ``str`` makes control characters visible, so that none of them reaches a terminal.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(f"{where}{where and ': '}{what}{fix and '; '}{fix}")
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        return printable(super().__str__())


class Infeasible(PaseError):
    """A valid request that cannot be met: no strategy exists, or none fits. The command line exits with 1."""


def did_you_mean(word: str, known: Iterable[str], *, quote: str = "'", cutoff: float = 0.6) -> str:
    """A hint at the known word that is closest to an unknown one, to follow the word in a message; "" if none is close.

    quote: around the known word. cutoff: how alike the words must be, as in ``difflib``.

    >>> did_you_mean("sqare", ["square", "circle"])
    " (did you mean 'square'?)"
    """
    import difflib

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {quote}{near[0]}{quote}?)" if near else ""


DISTRIBUTION = "pase-parallel"
"""The name that pase is installed by. On the Python package index, ``pase`` is another program."""


def install_line(extra: str) -> str:
    """The command that installs what an extra of pase stands for.

    It names the packages, not ``pase-parallel[extra]``, which is on no package index.
    """
    from importlib import metadata  # as long to import as the rest of what every command loads

    try:
        declared = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # run from its sources, not installed
        declared = []
    parts = (line.partition(";") for line in declared)
    packages = [wanted.strip() for wanted, _, marker in parts if marker.strip() == f'extra == "{extra}"']
    if not packages:
        return f"pip install '.[{extra}]' in the directory of pase's sources"
    return "pip install " + " ".join(f"'{package}'" for package in packages)


def needed(module: str, where: str, extra: str = "traces") -> ModuleType:
    """An optional package that a format needs. PaseError says how to get it: which extra of pase has it."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise PaseError(f"{where}: reading it needs {module.partition('.')[0]}: {install_line(extra)}") from e
