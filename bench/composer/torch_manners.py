"""The ways to plan and run a PyTorch program. A way is a word, such as ``random3@2x2/eager/adam``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from bench.composer.jax_manners import DEVICES, Manner, slow_machine
from pase.api import Plan

if TYPE_CHECKING:
    from bench.cases.plans import Case
    from bench.composer.torch_programs import TorchProgramMade

__all__ = ["TORCH_MANNERS", "planned"]

RUNS = ("eager",) * 18 + ("aot_eager", "graph")
"""How ops run: one by one, or as one graph. ``inductor`` is not drawn, because it takes a minute."""


def _manner(odds: float, *plans: str, runs: tuple[str, ...] = RUNS, **what: bool) -> Manner:
    return Manner(odds=odds, plans=plans, lowerings=runs, optimizers=("sgd", "adam", "adamw"), **what)


TORCH_MANNERS = {
    "default": _manner(4, "default"),
    "method": _manner(2, "method#"),
    "random": _manner(5, "random#@4", "random#@2x2", "random#@2x2", "random#@2"),
    "expensive": _manner(1.5, "ours@4", "ours@2x2"),
    "accumulated": _manner(1, "accumulated", micro_batches=True),
    "recomputed": _manner(1, "remat-all", "remat-light", "limited", layers=True),
    "staged": _manner(2, "staged", runs=("eager",), micro_batches=True, layers=True),
    "scheduled": _manner(0.5, "scheduled"),
}
"""Name -> a kind of plan."""


def case_of(program: TorchProgramMade, devices: int) -> Case:
    """Returns the program's case on the first devices of an h100x8."""
    from bench.cases.plans import Case
    from pase import machine
    from pase.compiler.problem.problem import SplitProblem

    problem = SplitProblem.of(program.traced.graph, devices, machine.load("h100x8"), "analytic", "adam")
    return Case(traced=program.traced, problem=problem)


def planned(program: TorchProgramMade, word: str) -> Plan | None:
    """Returns the plan that a word names; None if the program has no such plan. Raises PaseError."""
    kind, _, mesh = word.partition("@")
    if mesh:
        return case_of(program, int(np.prod([int(n) for n in mesh.split("x")]))).plan(word)
    if kind.startswith("method"):
        return _method(program, int(kind.removeprefix("method")))
    return _compiled(program, kind)


def _method(program: TorchProgramMade, number: int) -> Plan | None:
    """Returns the plan of one of the baselines that apply; even small parameters are split."""
    from pase.baselines import Baseline, baselines, masks
    from pase.compiler.meshes.plans import plan_of

    case = case_of(program, DEVICES)
    p = case.problem
    with patch.object(masks, "PERSISTENT_ELEMENTS", 0):
        made = [b for b in baselines(p.graph, p.devices, p.machine, p.model) if isinstance(b, Baseline)]
    if not made:
        return None
    b = made[number % len(made)]
    return Plan.of(plan_of(p, b.strategy, b.mesh, "method", case.traced))


def _compiled(program: TorchProgramMade, kind: str) -> Plan | None:
    """Returns a plan compiled as by a user, on a machine on which it is worth splitting."""
    import pase
    from pase.errors import Infeasible, PaseError

    def compiled(**options: Any) -> Plan:
        given: dict[str, Any] = {"devices": DEVICES, "machine": slow_machine(), "work": 5.0} | options
        return pase.compile(program.module(), program.batch, **given)

    options: dict[str, Callable[[], dict[str, Any]]] = {
        "default": dict,
        "alone": lambda: {"devices": 1},
        "accumulated": lambda: {"accumulate": 2, "memory_limit": "none"},
        "remat-all": lambda: {"remat": "all"},
        "remat-light": lambda: {"remat": "light"},
        "limited": lambda: {"memory_limit": 0.8 * compiled().memory.total},
        "staged": lambda: {"pipeline": 2, "mesh": "2", "accumulate": 2, "memory_limit": "none"},
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
