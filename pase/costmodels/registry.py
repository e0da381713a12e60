"""Cost models by name. To add one: a file in this folder with one decorated class."""

from __future__ import annotations

from collections.abc import Callable

from pase.machine import CostModel, Machine
from pase.registry import Registry

__all__ = ["COST_MODELS", "get", "names", "register"]

COST_MODELS: Registry[Callable[[Machine], CostModel]] = Registry("cost model", package="pase.costmodels")
register = COST_MODELS.register
"""Class decorator: ``@register("name")``; the class is called with the machine alone."""


def names() -> list[str]:
    """Names of all cost models.

    >>> names()
    ['analytic', 'paper']
    """
    return list(COST_MODELS)


def get(name: str, machine: Machine) -> CostModel:
    """The cost model of that name for a machine. PaseError lists the names if there is none."""
    return COST_MODELS[name](machine)
