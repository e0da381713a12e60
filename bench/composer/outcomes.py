"""How a run of a program ended: in which of a few ways, and with which words."""

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
"""Ends that must not be. A refusal that names op and line is honest; where it is of a common pattern, it is a gap.
"unstable": rounding alone moves the unsharded step as far."""


def tolerance(epsilon: float) -> float:
    """How far a step may be from the unsharded one, relative to the largest update of a parameter: 1e-9 in float64.

    A program that computes in a narrower type adds in another order when it is split, so its bound follows from its
    type; a gradient that is wrong is off by far more.
    """
    return 1e-9 if epsilon <= 2.0**-52 else 1e3 * epsilon if epsilon <= 2.0**-23 else 16 * epsilon


OF_LEVEL = 1e-2
"""How far a parameter without a slope may be off, relative to the largest update: optimizers that divide by |g| + 1e-3
make of rounding in its gradient what they make of it."""


def level_of(gradients: Mapping[str, float]) -> frozenset[str]:
    """Parameters whose largest gradient is rounding beside the largest of all, also in parts that a library computes in
    float32. gradients: the largest by name."""
    return frozenset(name for name, g in gradients.items() if g <= 1e-7 * max(gradients.values()))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """off: how many times more than is allowed."""

    what: str
    off: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """fell_back: what a warning said of a program that was not lowered as asked."""

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
    """run: returns what differs, or None if there is nothing to compare. unstable: whether the unsharded step differs
    as much from itself if its operands are rounded otherwise; asked where something differs."""
    from pase.errors import PaseError

    try:
        off = run()
    except PaseError as e:
        text = str(e)[:600]
        return Outcome(
            end="refused" if re.search(r"\.py:\d+", text) else "refused without a line", message=text
        )
    except Exception as e:  # what else may be raised is what is to be found out
        where = "".join(traceback.format_exception(e)[-4:])[-900:]
        return Outcome(end="exception", message=f"{type(e).__name__}: {str(e)[:400]}\n{where}")
    if off is None:
        return Outcome(end="no plan")
    if off:
        worst = ", ".join(f"{d.what} {d.off:.2g}" for d in sorted(off, key=lambda d: -d.off)[:6])
        return Outcome(end="unstable" if unstable() else "wrong", message=f"times what is allowed: {worst}")
    return Outcome(end="agrees")
