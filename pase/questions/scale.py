"""Finds the best plan for each of several numbers of devices, to decide how many to use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pase.compiler.problem.options import CompileOptions
from pase.errors import Infeasible, PaseError
from pase.pytree import Tree

if TYPE_CHECKING:
    from pase.plan.types import PlanData

__all__ = ["ScalePoint", "parse_devices", "scale"]

_MOST = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ScalePoint:
    """The best plan for this number of devices. If plan is None, why_not gives the reason."""

    devices: int
    plan: PlanData | None
    why_not: str | None = None

    @property
    def device_s(self) -> float | None:
        """Device-seconds of a step, summed over all devices, which is what users pay for."""
        return None if self.plan is None else self.plan.cost * self.devices


def parse_devices(text: str) -> tuple[int, ...]:
    """Parse numbers of devices: ``8..4096`` doubles from the first to the last; ``8,24,96`` is a list.

    >>> parse_devices("8..64"), parse_devices("8,24,96")
    ((8, 16, 32, 64), (8, 24, 96))
    """
    first, dots, last = text.partition("..")
    parts = [first, last] if dots else text.split(",")
    if not all(p.strip().isascii() and p.strip().isdigit() and 0 < int(p) <= _MOST for p in parts):
        raise PaseError(
            f"'{text}' is not a range or list of devices",
            where="--devices",
            fix=f"write 8..4096 or 8,24,96, with 1 to {_MOST:,} devices",
        )
    numbers = [int(p) for p in parts]
    if not dots:
        return tuple(dict.fromkeys(sorted(numbers)))
    if numbers[1] < numbers[0]:
        raise PaseError(
            f"in '{text}', the last number is below the first",
            where="--devices",
            fix="give the smaller number first",
        )
    out = [numbers[0]]
    while out[-1] * 2 <= numbers[1]:
        out.append(out[-1] * 2)
    return tuple(out)


def scale(
    model: Tree,
    devices: Sequence[int],
    options: CompileOptions,
    progress: Callable[[str], None] | None = None,
) -> list[ScalePoint]:
    """Compile the same model with the same global batch for each number of devices.

    The devices in ``options`` are ignored. If there is no plan for a number, its ScalePoint has the reason.
    """
    from pase.compiler.compilation import compile_model

    out = []
    for n in devices:
        if progress is not None:
            progress(f"{n} devices")
        try:
            plan = compile_model(model, None, (), replace(options, devices=n), progress).plan
        except Infeasible as e:
            out.append(ScalePoint(devices=n, plan=None, why_not=str(e)))
        else:
            out.append(ScalePoint(devices=n, plan=plan))
    return out
