"""The ways to plan and run a PyTorch program. A way is a word, such as ``random3@2x2/eager/adam``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.composer.draws import Manner, plan_of_word

if TYPE_CHECKING:
    from bench.cases.plans import Case
    from bench.composer.torch_programs import TorchProgramMade
    from pase.api import Plan

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

OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {"devices": 1},
    "accumulated": {"accumulate": 2, "memory_limit": "none"},
    "staged": {"pipeline": 2, "mesh": "2", "accumulate": 2, "memory_limit": "none"},
}


def planned(program: TorchProgramMade, word: str) -> Plan | None:
    """Returns the plan that a word names; None if the program has no such plan. Raises PaseError."""
    import pase

    def case(devices: int) -> Case:
        """The program's case on the first devices of an h100x8."""
        from bench.cases.plans import Case
        from pase import machine
        from pase.compiler.problem.problem import SplitProblem

        problem = SplitProblem.of(program.traced.graph, devices, machine.load("h100x8"), "analytic", "adam")
        return Case(traced=program.traced, problem=problem)

    return plan_of_word(
        word, case, lambda **given: pase.compile(program.module(), program.batch, **given), OPTIONS
    )
