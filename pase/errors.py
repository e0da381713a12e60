"""The two ways in which a request fails; the CLI turns them into exit codes 2 and 1."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Infeasible", "PaseError", "needed"]


class PaseError(ValueError):
    """Bad input: the message says what, where, and what to do. Exit code 2."""


class Infeasible(PaseError):
    """A sound request that cannot be met: nothing fits, no strategy exists. Exit code 1."""


def needed(module: str, where: str, extra: str = "traces") -> Any:
    """An optional package that a format needs. PaseError says how to get it: which extra of pase has it."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise PaseError(
            f"{where}: reading it needs {module.partition('.')[0]}: pip install 'pase[{extra}]'"
        ) from e
