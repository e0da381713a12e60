"""Policies by name. A new one is a function with a line of registration, and every table and test has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.schedule.plan import BucketPlan
from pase.schedule.types import Problem

if TYPE_CHECKING:
    from pase.schedule.preserver import Walk

__all__ = ["Options", "Policy", "all_policies", "get_policy", "register"]

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may set. staleness: the greatest age in iterations a gradient may have when applied; 0 = none.

    walk: the Preserver's state; None = its default. time_limit_s bounds the exact solver.
    mode: ours only: "fast", "exact", or "auto" (exact where small).
    """

    staleness: int = 0
    walk: Walk | None = None
    mode: str = "auto"
    time_limit_s: float = 10.0
    seed: int = 0
    ddp_first_bytes: int = MIB
    ddp_cap_bytes: int = 25 * MIB
    partition_elements: int = 6_500_000
    warm_starts: tuple[BucketPlan, ...] = field(default=(), repr=False)
    """Plans to improve on; ours is never worse than any of them."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    name: str
    summary: str
    make: Callable[[Problem, Options], BucketPlan]
    plain_only: bool = False
    delays: bool = False
    """Whether it delays updates, and so runs only where staleness is allowed."""


_REGISTRY: dict[str, Policy] = {}
_MODULES = ("basic", "mg_wfbp", "bytescheduler", "us_byte", "tictac", "deft", "ours")


def register(
    name: str, summary: str, *, plain_only: bool = False, delays: bool = False
) -> Callable[[Callable[[Problem, Options], BucketPlan]], Callable[[Problem, Options], BucketPlan]]:
    """Decorator: make the function a policy of that name."""

    def add(make: Callable[[Problem, Options], BucketPlan]) -> Callable[[Problem, Options], BucketPlan]:
        _REGISTRY[name] = Policy(name=name, summary=summary, make=make, plain_only=plain_only, delays=delays)
        return make

    return add


def all_policies() -> dict[str, Policy]:
    """All policies by name, ours last."""
    for module in _MODULES:
        import_module(f"pase.schedule.policies.{module}")
    place = {f"pase.schedule.policies.{m}": i for i, m in enumerate(_MODULES)}
    return dict(sorted(_REGISTRY.items(), key=lambda x: place.get(x[1].make.__module__, -1)))


def get_policy(name: str) -> Policy:
    known = all_policies()
    if name not in known:
        raise PaseError(f"no scheduling policy '{name}'; there are: {', '.join(known)} (or 'all')")
    return known[name]
