"""Cost models by name. To add one, add a file with one decorated class to this folder."""

from __future__ import annotations

from collections.abc import Callable

from pase.machine import CostModel, Machine
from pase.registry import Registry

__all__ = ["COST_MODELS", "get", "names", "register"]

COST_MODELS: Registry[Callable[[Machine], CostModel]] = Registry("cost model", package="pase.costmodels")
register = COST_MODELS.register
"""Class decorator: ``@register("name")``. The class is called with the machine as its only argument."""


def names() -> list[str]:
    """The names of all cost models.

    >>> names()
    ['analytic', 'paper']
    """
    return list(COST_MODELS)


def get(name: str, machine: Machine) -> CostModel:
    """The cost model with this name, for a machine. If there is none, PaseError lists the names."""
    return COST_MODELS[name](machine)
