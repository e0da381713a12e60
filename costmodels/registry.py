"""Cost models by name. To add one: a file in this folder with one decorated class."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from pase.errors import PaseError
from pase.machine import CostModel, Machine

__all__ = ["get", "names", "register"]

Factory = Callable[[Machine], CostModel]
_models: dict[str, Factory] = {}


def register(name: str) -> Callable[[Factory], Factory]:
    """Class decorator: ``name`` -> the class, which is called with the machine alone."""

    def add(factory: Factory) -> Factory:
        if name in _models:
            raise ValueError(f"cost model '{name}' is registered twice")
        _models[name] = factory
        return factory

    return add


def _discover() -> None:
    """Imports every module of this package, so that a new file is all that a new model takes."""
    package = importlib.import_module("pase.costmodels")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"pase.costmodels.{module.name}")


def names() -> list[str]:
    """Names of all cost models.

    >>> names()
    ['analytic', 'paper']
    """
    _discover()
    return sorted(_models)


def get(name: str, machine: Machine) -> CostModel:
    """The cost model of that name for a machine. PaseError lists the names if there is none."""
    _discover()
    if name not in _models:
        raise PaseError(f"no cost model named '{name}'; known: {', '.join(sorted(_models))}")
    return _models[name](machine)
