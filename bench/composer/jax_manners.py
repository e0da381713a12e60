"""The ways to plan and run a JAX program. A way is a word, such as ``random3@2x2/manual/adam``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from bench.composer.jax_optimizers import OPTIMIZERS
from pase.api import Plan

if TYPE_CHECKING:
    from bench.composer.jax_programs import ComposedProgram
    from pase.machine import Machine

__all__ = ["MANNERS", "planned"]

DEVICES = 4


@dataclass(frozen=True, kw_only=True)
class Manner:
    """A way to plan a program. odds: its relative frequency. micro_batches, layers: whether it needs a loss that is a
    mean over examples, or a loop over layers. stateless: whether it only works for programs without state. plans: the
    words of its plans. lowerings: its possible lowerings."""

    odds: float
    plans: tuple[str, ...]
    lowerings: tuple[str, ...] = ("auto", "auto", "manual", "annotated")
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    micro_batches: bool = False
    layers: bool = False
    stateless: bool = False

    def drawn(self, rng: np.random.Generator) -> str:
        words = str(rng.choice(self.plans)), str(rng.choice(self.lowerings)), str(rng.choice(self.optimizers))
        return "/".join([words[0].replace("#", str(rng.integers(1000))), *words[1:]])


MANNERS = {
    "default": Manner(odds=4, plans=("default",), lowerings=("auto",)),
    "method": Manner(odds=2, plans=("method#",)),
    "random": Manner(odds=4, plans=("random#@4", "random#@2x2", "random#@2x2", "random#@2x2x2")),
    "expensive": Manner(odds=1.5, plans=("ours@4", "ours@2x2")),
    "accumulated": Manner(odds=1, plans=("accumulated",), micro_batches=True),
    "once": Manner(odds=0.5, plans=("once",), lowerings=("auto",), micro_batches=True),
    "recomputed": Manner(odds=1, plans=("remat-all", "remat-light", "limited"), layers=True),
    "limited": Manner(odds=0.5, plans=("limited",)),
    "staged": Manner(
        odds=2,
        plans=("staged", "staged", "circular"),
        lowerings=("auto",),
        micro_batches=True,
        layers=True,
        stateless=True,
    ),
    "padded": Manner(odds=0.5, plans=("padded",), lowerings=("auto",), stateless=True),
    "scheduled": Manner(odds=0.5, plans=("scheduled",), lowerings=("auto", "manual")),
}
"""Name -> a kind of plan."""


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


def planned(program: ComposedProgram, word: str) -> Plan | None:
    """Returns the plan that a word names; None if the program has no such plan. Raises PaseError."""
    kind, _, mesh = word.partition("@")
    if mesh:
        from bench.cases.plans import case_of
        from pase.machine import mesh_from

        devices = int(np.prod([int(n) for n in mesh.split("x")]))
        assert mesh_from(mesh, devices)
        case = case_of(program.loss, *program.arguments(), devices=devices, carry=program.carry)
        return case.plan(word)
    if kind.startswith("method"):
        return _method(program, int(kind.removeprefix("method")))
    return _compiled(program, kind)


def _method(program: ComposedProgram, number: int) -> Plan | None:
    """Returns the plan of one of the baselines that apply; even small parameters are split."""
    from bench.cases.plans import case_of
    from pase.baselines import Baseline, baselines, masks
    from pase.compiler.meshes.plans import plan_of

    case = case_of(program.loss, *program.arguments(), devices=DEVICES, carry=program.carry)
    p = case.problem
    with patch.object(masks, "PERSISTENT_ELEMENTS", 0):
        made = [b for b in baselines(p.graph, p.devices, p.machine, p.model) if isinstance(b, Baseline)]
    if not made:
        return None
    b = made[number % len(made)]
    return Plan.of(plan_of(p, b.strategy, b.mesh, "method", case.traced))


def _compiled(program: ComposedProgram, kind: str) -> Plan | None:
    """Returns a plan compiled as by a user, on a machine on which it is worth splitting."""
    import pase
    from pase.errors import Infeasible, PaseError

    def compiled(**options: Any) -> Plan:
        given: dict[str, Any] = {"devices": DEVICES, "machine": slow_machine(), "work": 5.0} | options
        return pase.compile(program.loss, *program.arguments(), carry=program.carry, **given)

    options: dict[str, Callable[[], dict[str, Any]]] = {
        "default": dict,
        "accumulated": lambda: {"accumulate": 2},
        "once": lambda: {"accumulate": 2, "once": "all"},
        "remat-all": lambda: {"remat": "all"},
        "remat-light": lambda: {"remat": "light"},
        "limited": lambda: {"memory_limit": 0.8 * compiled().memory.total},
        "staged": lambda: {"pipeline": 2, "mesh": "2", "accumulate": 2},
        "circular": lambda: {"pipeline": 2, "mesh": "2", "accumulate": 2, "stage_schedule": "circular"},
        "padded": lambda: {"uneven": "padded"},
        "scheduled": dict,
    }
    try:
        plan = compiled(**options[kind]())
    except Infeasible:
        return None
    except PaseError as e:
        # The requested option does not apply to the program, which is not a missing feature.
        if "cannot be run in stages" in str(e) or "has no repeated block" in str(e):
            return None
        raise
    return plan.scheduled() if kind == "scheduled" else plan
