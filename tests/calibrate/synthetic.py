"""A simulated machine with known times, and a clock that advances only while it works."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pase.calibrate import Level, Target, Task
from pase.calibrate.types import LIGHT_BYTES


@dataclass(kw_only=True)
class Fake:
    """Implements ``Bench``: rooflines plus a launch, and ring collectives with a latency and a bandwidth per level.

    noise: sigma of a log-normal factor on every program. broken: key -> seconds, for deliberately wrong times.
    """

    levels: tuple[Level, ...]
    noise: float = 0.0
    seed: int = 0
    peak: float = 1e12
    memory: float = 1e11
    light: float = 0.25
    launch: float = 2e-6
    host: tuple[float, float] = (2e-5, 5e-5)
    window: float = 0.02
    """The fraction of the vector rate that pooling reaches."""
    latency: tuple[float, ...] = (5e-6, 5e-5)
    bandwidth: tuple[float, ...] = (1e10, 1e9)
    broken: dict[str, float] = field(default_factory=dict)
    clock: float = 0.0
    others: float = 0.0
    timed: list[str] = field(default_factory=list)
    stop_after: int | None = None

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def truth(self, t: Task) -> float:
        """The true seconds, by formulas that are independent of pase.calibrate and the cost models."""
        if t.op.startswith(("matmul", "conv")):
            factor = {"matmul.nt": 0.9, "matmul.tn": 1.1, "matmul.nn": 1.0}.get(t.op, 2.0)
            return self.launch + factor * t.work / self.peak
        if t.op in ("elementwise", "reduction"):
            return self.launch + t.nbytes / self.memory
        if t.op == "vector":
            return t.work / (self.peak / 10)
        if t.op == "light":
            return LIGHT_BYTES / self.memory / self.light
        if t.op == "window":
            return t.work / (self.window * self.peak / 10)
        if t.op in ("launch", "dispatch"):
            return self.launch
        if t.op.startswith("host."):
            return self.host[t.op == "host.op"]
        ways = [(l, w) for l, w in enumerate(t.ways) if w > 1]
        steps = sum((w - 1) * self.latency[l] for l, w in ways)
        total = math.prod(t.ways)
        pace = max(1 / self.bandwidth[l] for l, _ in ways)
        passes = {"all_reduce": 2.0, "permute": total / (total - 1)}.get(t.op, 1.0)
        return steps * math.ceil(passes) + passes * (total - 1) / total * t.nbytes * pace

    def prepare(self, task: Task) -> Callable[[int], float]:
        if self.stop_after is not None and len(self.timed) >= self.stop_after:
            raise KeyboardInterrupt
        self.timed.append(task.key)
        seconds = self.broken.get(task.key, self.truth(task))

        def run(inner: int) -> float:
            took = inner * seconds * math.exp(self.noise * self.random.standard_normal())
            self.clock += took
            return took

        return run

    def share(self, values: list[float]) -> list[list[float]]:
        return [list(values)]

    def now(self) -> float:
        return self.clock

    def others_s(self) -> float:
        return self.others


ONE = (Level(name="device", ways=4),)
TWO = (Level(name="device", ways=4), Level(name="process", ways=2))

HERE = {"host": "a", "devices": 4}
"""The fingerprint of the simulated machine."""


def target(levels: tuple[Level, ...] = ONE) -> Target:
    return Target(levels=levels, dtypes=("float32",), largest_extent=512, largest_traffic=1 << 26)
