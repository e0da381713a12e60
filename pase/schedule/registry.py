"""The registry of policies. A new policy is a registered function in a file of `policies`; all tables and tests then
include it."""

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
    """Options of policies that a user may set.

    staleness: the greatest age in iterations that a gradient may have when it is applied; 0 for plain updates.
    walk: the Preserver's state; None for its default.
    mode: for the policy ours: "fast", "exact", or "auto", which is exact for small problems.
    time_limit_s: seconds for the exact solver.
    seed: random seed of the local search.
    ddp_first_bytes, ddp_cap_bytes: sizes of DDP's first bucket and of the others.
    partition_elements: DeFT's partition size, in float32 elements.
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
    """Whether the policy delays updates. It then runs only if staleness is allowed."""


POLICIES = Registry[Policy]("scheduling policy", package="pase.schedule.policies")
"""All policies. When this is first read, every file of `pase/schedule/policies` is imported and registers its own."""


def register(
    name: str, summary: str, *, plain_only: bool = False, delays: bool = False, rank: int = 1
) -> Callable[[Make], Make]:
    """Decorator: register the function as the policy of this name.

    plain_only: whether it applies only to plain gradient synchronisation. delays: whether it delays updates.
    rank: the position in tables: 0 for defaults of frameworks, 1 for published policies, 2 for ours.
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
    """The policy of this name. Raises PaseError, which lists all policies, if there is none."""
    return POLICIES[name]
