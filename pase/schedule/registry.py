"""Policies by name. A new one is a registered function in a file of `policies`; every table and test then has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pase.registry import Registry
from pase.schedule.plan import BucketPlan
from pase.schedule.types import ScheduleProblem

if TYPE_CHECKING:
    from pase.schedule.preserver import TrainingState

__all__ = ["POLICIES", "Options", "Policy", "all_policies", "get_policy", "register"]

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may set. staleness: the greatest age in iterations a gradient may have when applied; 0 = none.

    walk: the Preserver's state; None = its default. time_limit_s bounds the exact solver.
    mode: ours only: "fast", "exact", or "auto" (exact where small).
    """

    staleness: int = 0
    walk: TrainingState | None = None
    mode: str = "auto"
    time_limit_s: float = 10.0
    seed: int = 0
    ddp_first_bytes: int = MIB
    ddp_cap_bytes: int = 25 * MIB
    partition_elements: int = 6_500_000
    warm_starts: tuple[BucketPlan, ...] = field(default=(), repr=False)
    """Plans to improve on; ours is never worse than any of them."""


Make = Callable[[ScheduleProblem, Options], BucketPlan]


@dataclass(frozen=True, kw_only=True)
class Policy:
    name: str
    summary: str
    make: Make
    plain_only: bool = False
    delays: bool = False
    """Whether it delays updates, and so runs only where staleness is allowed."""


POLICIES = Registry[Policy]("scheduling policy", package="pase.schedule.policies")
"""Every file of `pase/schedule/policies` is imported when this is first read; each registers what it defines."""


def register(
    name: str, summary: str, *, plain_only: bool = False, delays: bool = False, rank: int = 1
) -> Callable[[Make], Make]:
    """Decorator: make the function a policy of that name.

    rank: the place in tables: 0 what frameworks do by themselves, 1 published, 2 ours.
    """

    def add(make: Make) -> Make:
        policy = Policy(name=name, summary=summary, make=make, plain_only=plain_only, delays=delays)
        POLICIES.add(name, policy, rank=rank)
        return make

    return add


def all_policies() -> dict[str, Policy]:
    """All policies by name, ours last."""
    return dict(POLICIES)


def get_policy(name: str) -> Policy:
    """The policy of that name; PaseError, which lists all, where there is none."""
    return POLICIES[name]
