"""pase finds how to split every layer of a model over devices, and proves that the split is best under a cost model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pase.api import Plan, compare, compile, load, price
    from pase.errors import Infeasible, PaseError
    from pase.frontends.jax.generation import Generation
    from pase.frontends.jax.rules_outside import register_kernel
    from pase.replay.collect.profiling import profile

__version__ = "0.1.0"

__all__ = [
    "Generation",
    "Infeasible",
    "PaseError",
    "Plan",
    "compare",
    "compile",
    "load",
    "price",
    "profile",
    "register_kernel",
]

_WHERE = {
    "Generation": "pase.frontends.jax.generation",
    "Infeasible": "pase.errors",
    "PaseError": "pase.errors",
    "Plan": "pase.api",
    "compare": "pase.api",
    "compile": "pase.api",
    "load": "pase.api",
    "price": "pase.api",
    "profile": "pase.replay.collect.profiling",
    "register_kernel": "pase.frontends.jax.rules_outside",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import pase`` is fast."""
    if name in _WHERE:
        import importlib

        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'pase' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(["__version__", *__all__])
