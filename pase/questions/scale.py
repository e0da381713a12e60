"""How many devices? The best plan at each number of them, and what it costs."""

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
    """The best plan for this number of devices. If plan is None, why_not says why there is none."""

    devices: int
    plan: PlanData | None
    why_not: str | None = None

    @property
    def device_s(self) -> float | None:
        """Device-seconds of a step, summed over all devices: what is paid for."""
        return None if self.plan is None else self.plan.cost * self.devices


def parse_devices(text: str) -> tuple[int, ...]:
    """Numbers of devices: ``8..4096`` doubles from the first to the last; a list is used as given.

    >>> parse_devices("8..64"), parse_devices("8,24,96")
    ((8, 16, 32, 64), (8, 24, 96))
    """
    first, dots, last = text.partition("..")
    parts = [first, last] if dots else text.split(",")
    if not all(p.strip().isascii() and p.strip().isdigit() and 0 < int(p) <= _MOST for p in parts):
        raise PaseError(f"--devices '{text}': write 8..4096, or a list as 8,24,96, of 1 to {_MOST:,} devices")
    numbers = [int(p) for p in parts]
    if not dots:
        return tuple(dict.fromkeys(sorted(numbers)))
    if numbers[1] < numbers[0]:
        raise PaseError(f"--devices '{text}': the last number is below the first")
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
    """The best plan of the same model with the same global batch, for each number of devices. The devices in options
    are ignored. A number without a plan says why."""
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
