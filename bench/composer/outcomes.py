"""How a run of a program ended, and with which message."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

__all__ = ["FAULTS", "OF_LEVEL", "Difference", "End", "Outcome", "level_of", "outcome_of", "tolerance"]

End = Literal[
    "agrees",
    "wrong",
    "refused",
    "refused without a line",
    "exception",
    "aborted",
    "too long",
    "unstable",
    "no plan",
]
FAULTS: tuple[End, ...] = ("wrong", "refused without a line", "exception", "aborted", "too long")
"""Ends that are faults. A refusal that names op and line is not; for a common pattern it is a missing feature.
"unstable": rounding alone changes the unsharded step by as much."""


def tolerance(epsilon: float) -> float:
    """Returns the allowed difference from the unsharded step, relative to the largest update of a parameter: 1e-9 in
    float64.

    A split program adds in another order, so the bound depends on the narrowest type. A wrong gradient differs by much
    more.
    """
    return 1e-9 if epsilon <= 2.0**-52 else 1e3 * epsilon if epsilon <= 2.0**-23 else 16 * epsilon


OF_LEVEL = 1e-2
"""The allowed difference of a parameter without a slope, relative to the largest update: optimizers that divide by
|g| + 1e-3 amplify the rounding in its gradient."""


def level_of(gradients: Mapping[str, float]) -> frozenset[str]:
    """Returns the parameters whose largest gradient is rounding compared with the largest of all, also in parts that a
    library computes in float32. gradients: the largest element by name."""
    return frozenset(name for name, g in gradients.items() if g <= 1e-7 * max(gradients.values()))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A value that differs. off: the difference over the allowed one."""

    what: str
    off: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a program ended. fell_back: the warning of a program that was not lowered as requested."""

    end: End
    message: str = ""
    fell_back: str = ""

    def warned(self, said: Sequence[str]) -> Outcome:
        left = [w for w in said if "left to XLA" in w or "annotat" in w]
        return replace(self, fell_back=left[0][:400]) if left else self

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {"end": self.end}
        if self.message:
            row["message"] = self.message
        if self.fell_back:
            row["fell_back"] = self.fell_back
        return row


def outcome_of(
    run: Callable[[], list[Difference] | None], unstable: Callable[[], bool] = lambda: False
) -> Outcome:
    """Returns the outcome of a run. run: returns the differences, or None if there is nothing to compare. unstable:
    returns whether the unsharded step differs as much from itself with other rounding; called if something differs."""
    from pase.errors import PaseError

    try:
        off = run()
    except PaseError as e:
        text = str(e)[:600]
        return Outcome(
            end="refused" if re.search(r"\.py:\d+", text) else "refused without a line", message=text
        )
    except Exception as e:  # any other exception is a fault
        where = "".join(traceback.format_exception(e)[-4:])[-900:]
        return Outcome(end="exception", message=f"{type(e).__name__}: {str(e)[:400]}\n{where}")
    if off is None:
        return Outcome(end="no plan")
    if off:
        worst = ", ".join(f"{d.what} {d.off:.2g}" for d in sorted(off, key=lambda d: -d.off)[:6])
        return Outcome(end="unstable" if unstable() else "wrong", message=f"times what is allowed: {worst}")
    return Outcome(end="agrees")
