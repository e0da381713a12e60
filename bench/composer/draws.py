"""Draws composed programs from a seed: which layers and which loss, and in which ways they are planned and run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from bench.composer.maker import Pattern
from bench.composer.spec import ProgramPart, Spec
from pase.api import Plan

if TYPE_CHECKING:
    from bench.cases.plans import Case
    from pase.machine import Machine

__all__ = ["DEVICES", "Family", "Manner", "drawn_spec", "plan_of_word", "slow_machine"]

DEVICES = 4


@dataclass(frozen=True, kw_only=True)
class Manner:
    """A way to plan a program. odds: its relative frequency. micro_batches, layers: whether it needs a loss that is a
    mean over examples, or a loop over layers. stateless: whether it only works for programs without state. plans: the
    words of its plans. lowerings: how a step may run."""

    odds: float
    plans: tuple[str, ...]
    lowerings: tuple[str, ...]
    optimizers: tuple[str, ...]
    micro_batches: bool = False
    layers: bool = False
    stateless: bool = False

    def drawn(self, rng: np.random.Generator) -> str:
        words = str(rng.choice(self.plans)), str(rng.choice(self.lowerings)), str(rng.choice(self.optimizers))
        return "/".join([words[0].replace("#", str(rng.integers(1000))), *words[1:]])


@dataclass(frozen=True, kw_only=True)
class Family:
    """The programs of a framework. number: tells its seeds from another family's. sizes: batch, sequence and width.
    depths: how often a program has one, two, three or four layers. twice: how often it runs in two ways."""

    number: int
    sizes: Sequence[tuple[int, int, int]]
    layers: Mapping[str, Pattern]
    losses: Mapping[str, Pattern]
    manners: Mapping[str, Manner]
    depths: tuple[float, float, float, float]
    twice: float


def drawn_spec(family: Family, seed: int) -> Spec:
    """Returns the program of a seed: one to four layers and a loss, with one or two ways to run it that apply."""
    rng = np.random.default_rng([seed, family.number])
    shape = family.sizes[int(rng.integers(len(family.sizes)))]
    drawn = [_drawn(rng, family.layers) for _ in range(int(rng.choice([1, 2, 3, 4], p=family.depths)))]
    kinds_held = [k for p in drawn if (k := family.layers[p.pattern].holds)]
    parts = tuple(p for p in drawn if family.layers[p.pattern].holds in (None, *kinds_held[:1]))
    loss = _drawn(rng, family.losses)
    made = [*(family.layers[p.pattern] for p in parts), family.losses[loss.pattern]]
    whole, looped, holds = (any(getattr(p, word) for p in made) for word in ("whole", "loops", "holds"))
    fitting = {
        name: m.odds
        for name, m in family.manners.items()
        if not ((m.micro_batches and whole) or (m.layers and not looped) or (m.stateless and holds))
    }
    odds = np.array(list(fitting.values()))
    many = 1 + int(rng.random() < family.twice)
    kinds = rng.choice(list(fitting), size=many, replace=False, p=odds / odds.sum())
    manners = tuple(family.manners[str(k)].drawn(rng) for k in kinds)
    return Spec(shape=shape, parts=parts, loss=loss, manners=manners)


def _drawn(rng: np.random.Generator, of: Mapping[str, Pattern]) -> ProgramPart:
    odds = np.array([p.odds for p in of.values()])
    name = str(rng.choice(list(of), p=odds / odds.sum()))
    return ProgramPart(pattern=name, seed=int(rng.integers(1 << 16)), plain=bool(rng.random() < 0.2))


@cache
def slow_machine() -> Machine:
    """Returns a machine with such slow compute and fast links that these small programs are worth splitting.

    Its library takes no workspace, which would be most of what these programs need.
    """
    from pase import machine
    from pase.machine.scale import scaled

    given = machine.load("h100x8")
    given = replace(given, device=replace(given.device, workspace_bytes=0))
    return scaled(given, {"flops": 1e-6, "memory": 1e-5, "latency": 1e-2, "bandwidth": 0.1})


def plan_of_word(
    word: str,
    case: Callable[[int], Case],
    compiled: Callable[..., Plan],
    options: Mapping[str, Mapping[str, Any]],
) -> Plan | None:
    """Returns the plan that a word names; None if the program has no such plan. Raises PaseError.

    case: the program's case on a number of devices. compiled: ``pase.compile`` of the program. options: the options
    that the words beside these name.
    """
    kind, _, mesh = word.partition("@")
    if mesh:
        return case(int(np.prod([int(n) for n in mesh.split("x")]))).plan(word)
    if kind.startswith("method"):
        return _method(case(DEVICES), int(kind.removeprefix("method")))
    return _compiled(compiled, kind, options)


def _method(case: Case, number: int) -> Plan | None:
    """Returns the plan of one of the baselines that apply; even small parameters are split."""
    from pase.baselines import Baseline, baselines, masks
    from pase.compiler.meshes.plans import plan_of

    p = case.problem
    with patch.object(masks, "PERSISTENT_ELEMENTS", 0):
        made = [b for b in baselines(p.graph, p.devices, p.machine, p.model) if isinstance(b, Baseline)]
    if not made:
        return None
    b = made[number % len(made)]
    return Plan.of(plan_of(p, b.strategy, b.mesh, "method", case.traced))


def _compiled(
    compiled: Callable[..., Plan], kind: str, options: Mapping[str, Mapping[str, Any]]
) -> Plan | None:
    """Returns a plan compiled as by a user, on a machine on which it is worth splitting."""
    from pase.errors import Infeasible, PaseError

    by_word: dict[str, Mapping[str, Any]] = {
        "default": {},
        "limited": {},
        "remat-all": {"remat": "all"},
        "remat-light": {"remat": "light"},
        "scheduled": {},
        **options,
    }
    given = {"devices": DEVICES, "machine": slow_machine(), "work": 5.0, **by_word[kind]}
    try:
        if kind == "limited":
            given["memory_limit"] = 0.8 * compiled(**given).memory.total
        plan = compiled(**given)
    except Infeasible:
        return None
    except PaseError as e:
        # The requested option does not apply to the program, which is not a missing feature.
        if "cannot be run in stages" in str(e) or "has no repeated block" in str(e):
            return None
        raise
    return plan.scheduled() if kind == "scheduled" else plan
