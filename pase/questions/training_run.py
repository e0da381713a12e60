"""What a whole training run takes: steps, failures and checkpoints, device-hours, energy and money."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pase.errors import PaseError
from pase.files.json_values import JsonObject
from pase.machine import Machine
from pase.plan.types import PlanData

__all__ = ["UNCOUNTED", "RunTerms", "TrainingRun", "checkpoint_interval_s", "stretch", "training_run"]


UNCOUNTED = "device-hours, energy and cost are those of a run in which none fails, for every machine"


@dataclass(frozen=True, kw_only=True)
class RunTerms:
    """What a run is asked for, and what a machine file does not know.

    tokens: tokens to train.
    checkpoint_s: seconds for which training waits while a checkpoint is written.
    restart_s: seconds from a failure to the first step after it.
    failures_per_device_hour: instead of the machine's own; None: the machine's.
    price: money for a device-hour; None if unknown.
    """

    tokens: float
    checkpoint_s: float = 60.0
    restart_s: float = 600.0
    failures_per_device_hour: float | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.tokens < 1e20:
            raise PaseError(f"{self.tokens:g} is no number of tokens", where="--tokens", fix="write 15e12")
        for flag, value in (("--checkpoint", self.checkpoint_s), ("--restart", self.restart_s)):
            if not 0 < value < 1e7:
                raise PaseError(f"{value:g} is no time in seconds", where=flag, fix="write 60")
        if self.failures_per_device_hour is not None and not 0 <= self.failures_per_device_hour < 1e3:
            raise PaseError(
                f"{self.failures_per_device_hour:g} is no rate", where="--failures", fix="write 2e-5, or 0"
            )
        if self.price is not None and not 0 < self.price < 1e6:
            raise PaseError(f"{self.price:g} is no price of a device-hour", where="--price", fix="write 2.5")


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run of some tokens on some devices. What depends on an unknown figure is None.

    compute_s: seconds of its steps, without failures and checkpoints. wall_s: with both, as expected.
    failures: the expected number. checkpoint_every_s: the best time of training between two checkpoints.
    device_hours, energy_kwh, cost: of wall_s, or of compute_s where failures are unknown or not counted. The energy is
        at most this: every device at its power limit for the whole time, without hosts, network and cooling.
    """

    steps: int
    compute_s: float
    wall_s: float | None
    failures: float | None
    checkpoint_every_s: float | None
    device_hours: float
    energy_kwh: float | None
    cost: float | None

    def to_json(self) -> JsonObject:
        return {k: getattr(self, k) for k in self.__dataclass_fields__}


def checkpoint_interval_s(checkpoint_s: float, between_failures_s: float) -> float:
    """The seconds of training between checkpoints for which the expected time is least.

    The least of ``stretch`` is where (1 - x) exp(x) = exp(-checkpoint / between failures), for x the interval over the
    mean time between failures: Daly, FGCS 2006, whose estimate is sqrt(2 checkpoint x between failures) - checkpoint
    where failures are rare.

    >>> round(checkpoint_interval_s(60, 3600 * 3))
    1099
    """
    target = -checkpoint_s / between_failures_s
    low, high = 0.0, 1.0
    for _ in range(200):
        x = (low + high) / 2
        # log(1 - x) + x falls from 0 to minus infinity.
        low, high = (x, high) if x < 1 and math.log1p(-x) + x > target else (low, x)
    return high * between_failures_s


def stretch(every_s: float, checkpoint_s: float, restart_s: float, between_failures_s: float) -> float:
    """Expected seconds for a second of training, with failures at a constant rate, also during restarts (Daly 2006).

    >>> round(stretch(1100, 60, 600, 3600 * 3), 3)
    1.177
    """
    m = between_failures_s
    exponent = (every_s + checkpoint_s) / m
    if exponent + restart_s / m > 700:  # beyond any float: no run of this kind ends
        return math.inf
    return m / every_s * math.exp(restart_s / m) * math.expm1(exponent)


def training_run(
    plan: PlanData, machine: Machine, devices: int, terms: RunTerms, *, count_failures: bool = True
) -> TrainingRun:
    """The run of a plan's step on this many devices. Raises PaseError if the step has no tokens or no time.

    count_failures: whether failures count in device-hours, energy and cost. A run is compared with one whose failures
        are unknown without them.
    """
    tokens = None if plan.work is None else plan.work.tokens
    if not tokens or plan.unit != "s":
        raise PaseError(
            "the model's step has no number of tokens"
            if plan.unit == "s"
            else f"a step's cost in {plan.unit} is no time",
            where="--tokens",
            fix="leave out --tokens" if plan.unit == "s" else "use --cost-model analytic",
        )
    steps = math.ceil(terms.tokens / tokens)
    compute_s = steps * plan.cost
    rate = terms.failures_per_device_hour
    rate = machine.failures_per_device_hour if rate is None else rate
    wall_s = failures = every_s = None
    if rate == 0:
        wall_s, failures = compute_s, 0.0
    elif rate is not None:
        between_s = 3600 / (rate * devices)
        every_s = checkpoint_interval_s(terms.checkpoint_s, between_s)
        wall_s = compute_s * stretch(every_s, terms.checkpoint_s, terms.restart_s, between_s)
        failures = wall_s / between_s
    hours = devices * (wall_s if wall_s is not None and count_failures else compute_s) / 3600
    power = machine.device.power_w
    return TrainingRun(
        steps=steps,
        compute_s=compute_s,
        wall_s=wall_s,
        failures=failures,
        checkpoint_every_s=every_s,
        device_hours=hours,
        energy_kwh=None if power is None else hours * power / 1e3,
        cost=None if terms.price is None else hours * terms.price,
    )
