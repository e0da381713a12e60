"""Finds the best plan for each of several numbers of devices, to decide how many to use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pase.compiler.problem.options import CompileOptions
from pase.errors import Infeasible, PaseError
from pase.machine import DEFAULT
from pase.plan.answer import step_text
from pase.pytree import Tree

if TYPE_CHECKING:
    from pase.plan.types import PlanData

__all__ = ["ScalePoint", "number_text", "parse_devices", "parse_prices", "scale"]

_MOST = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ScalePoint:
    """The best plan for this number of devices. If plan is None, why_not gives the reason.

    machine: its name. price: money for a device-hour; None if it is not stated.
    """

    devices: int
    plan: PlanData | None
    why_not: str | None = None
    machine: str = DEFAULT
    price: float | None = None

    @property
    def at(self) -> tuple[str, int]:
        """The machine's name and the number of devices."""
        return self.machine, self.devices

    @property
    def step(self) -> str:
        """The step's cost with its range, such as "14.1 s ± 14%"."""
        return "" if self.plan is None else step_text(self.plan)

    @property
    def device_s(self) -> float | None:
        """Device-seconds of a step, summed over all devices, which is what users pay for."""
        return None if self.plan is None else self.plan.cost * self.devices

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that all devices together train in a second. None if the batch has no tokens, or costs no seconds."""
        plan = self.plan
        if plan is None or plan.unit != "s" or plan.work is None or not plan.work.tokens:
            return None
        return plan.work.tokens / plan.cost

    @property
    def hours_per_1e9_tokens(self) -> float | None:
        """Device-hours of a billion tokens."""
        speed = self.tokens_per_s
        return None if speed is None else self.devices * 1e9 / speed / 3600

    @property
    def cost_per_1e9_tokens(self) -> float | None:
        """Money for a billion tokens, for all devices that are paid for, idle ones too."""
        hours = self.hours_per_1e9_tokens
        return None if hours is None or self.price is None else hours * self.price


def parse_prices(text: str | None, machines: Sequence[str]) -> dict[str, float]:
    """Parse prices of a device-hour by machine: ``2.5`` for all of them, or ``h100x8=2.5,b200x8=4``.

    >>> parse_prices("2.5", ["h100x8"]), parse_prices("h100x8=2.5,b200x8=4", ["h100x8", "b200x8"])
    ({'h100x8': 2.5}, {'h100x8': 2.5, 'b200x8': 4.0})
    """
    if text is None:
        return {}
    fix = "write 2.5, or one price for each machine: " + ",".join(f"{m}=2.5" for m in machines)
    out: dict[str, float] = {}
    for part in text.split(","):
        name, named, number = part.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if not 0 < value < 1e6:
            raise PaseError(f"'{part}' is not a price of a device-hour", where="--price", fix=fix)
        if named and name not in machines:
            raise PaseError(f"'{name}' is none of the machines", where="--price", fix=fix)
        out |= {name: value} if named else dict.fromkeys(machines, value)
    if missing := [m for m in machines if m not in out]:
        raise PaseError(f"{missing[0]} has no price", where="--price", fix=fix)
    return out


def number_text(value: float | None) -> str:
    """
    >>> number_text(1234.5), number_text(0.01234), number_text(None)
    ('1,234', '0.0123', '')
    """
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


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
    price: float | None = None,
) -> list[ScalePoint]:
    """Compile the same model with the same global batch for each number of devices.

    The devices in ``options`` are ignored. If there is no plan for a number, its ScalePoint has the reason.
    price: money for a device-hour.
    """
    machine = str(options.machine or DEFAULT)
    from pase.compiler.compilation import compile_model

    out = []
    for n in devices:
        if progress is not None:
            progress(f"{n} devices of {machine}")
        try:
            plan = compile_model(model, None, (), replace(options, devices=n), progress).plan
        except Infeasible as e:
            out.append(ScalePoint(devices=n, plan=None, why_not=str(e), machine=machine, price=price))
        else:
            out.append(ScalePoint(devices=n, plan=plan, machine=machine, price=price))
    return out
