"""Former names of modules that were moved: they import the module that is there now."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["former_names"]


class _FormerNames:
    """Finds and loads modules by their former names. now: former name -> the module's name, both in full."""

    def __init__(self, now: Mapping[str, str]) -> None:
        self._now = now
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in self._now else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._now[spec.name])
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run. The import system gave it the spec of its former name: it gets its own again."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


def former_names(package: str, names: Mapping[str, str]) -> None:
    """Let modules of a package be imported by their former names, for programs that have them.

    names: former name -> name now, both within the package; the module is loaded when it is asked for. Raises
    ImportError if the package was imported through its link at the top of the repository: every module would then be
    there twice.
    """
    if not package.startswith("pase."):
        raise ImportError(
            f"import pase.{package}, not {package} (the folder at the top of the repository is a link into pase)"
        )
    now = {f"{package}.{former}": f"{package}.{name}" for former, name in names.items()}
    sys.meta_path.append(_FormerNames(now))  # type: ignore[arg-type]
