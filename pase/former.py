"""Keeps former names of modules that were moved: importing a former name imports the module under its new name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["former_names"]


class _FormerNames:
    """A finder and loader for former names of modules. now: former name -> present name, both as full dotted names."""

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
        """Restore the module's own spec, which the import system has replaced. The module itself has already run."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


def former_names(package: str, names: Mapping[str, str]) -> None:
    """Make modules of a package importable by their former names, for existing programs.

    names: former name -> present name, both relative to the package. A module is loaded when it is imported.

    Raises ImportError if the package was imported through its link at the top of the repository, because every module
    would then exist twice.
    """
    if not package.startswith("pase."):
        raise ImportError(
            f"import pase.{package}, not {package} (the folder at the top of the repository is a link into pase)"
        )
    now = {f"{package}.{former}": f"{package}.{name}" for former, name in names.items()}
    sys.meta_path.append(_FormerNames(now))  # type: ignore[arg-type]
