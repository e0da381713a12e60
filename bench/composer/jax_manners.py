"""The ways to plan and run a JAX program. A way is a word, such as ``random3@2x2/manual/adam``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.composer.draws import Manner, plan_of_word
from bench.composer.jax_optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from bench.cases.plans import Case
    from bench.composer.jax_programs import ComposedProgram
    from pase.api import Plan

__all__ = ["MANNERS", "planned"]

ANY = ("auto", "auto", "manual", "annotated")


def _manner(odds: float, *plans: str, lowerings: tuple[str, ...] = ANY, **what: bool) -> Manner:
    return Manner(odds=odds, plans=plans, lowerings=lowerings, optimizers=tuple(OPTIMIZERS), **what)


MANNERS = {
    "default": _manner(4, "default", lowerings=("auto",)),
    "method": _manner(2, "method#"),
    "random": _manner(4, "random#@4", "random#@2x2", "random#@2x2", "random#@2x2x2"),
    "expensive": _manner(1.5, "ours@4", "ours@2x2"),
    "accumulated": _manner(1, "accumulated", micro_batches=True),
    "once": _manner(0.5, "once", lowerings=("auto",), micro_batches=True),
    "recomputed": _manner(1, "remat-all", "remat-light", "limited", layers=True),
    "limited": _manner(0.5, "limited"),
    "staged": _manner(
        2,
        *("staged", "staged", "circular"),
        lowerings=("auto",),
        micro_batches=True,
        layers=True,
        stateless=True,
    ),
    "padded": _manner(0.5, "padded", lowerings=("auto",), stateless=True),
    "scheduled": _manner(0.5, "scheduled", lowerings=("auto", "manual")),
}
"""Name -> a kind of plan."""

STAGED = {"pipeline": 2, "mesh": "2", "accumulate": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate": 2},
    "once": {"accumulate": 2, "once": "all"},
    "staged": STAGED,
    "circular": STAGED | {"stage_schedule": "circular"},
    "padded": {"uneven": "padded"},
}


def planned(program: ComposedProgram, word: str) -> Plan | None:
    """Returns the plan that a word names; None if the program has no such plan. Raises PaseError."""
    import pase

    def case(devices: int) -> Case:
        from bench.cases.plans import case_of

        return case_of(program.loss, *program.arguments(), devices=devices, carry=program.carry)

    def compiled(**options: Any) -> Plan:
        return pase.compile(program.loss, *program.arguments(), carry=program.carry, **options)

    return plan_of_word(word, case, compiled, OPTIONS)
