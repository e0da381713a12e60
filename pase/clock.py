"""A deadline for work that comes in pieces which cannot be stopped: one begins where its like would end in time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["Deadline", "Stopped", "never"]

P = ParamSpec("P")
T = TypeVar("T")

_MARGIN = 1.25  # a piece may take this much longer than the longest of its kind


class Stopped(Exception):
    """Work that was asked to stop, and has no result."""


def never() -> bool:
    """For work that nothing stops."""
    return False


class Deadline:
    """ends_at: seconds of ``time.perf_counter``, inf: never. Remembers what the longest piece of each kind took."""

    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at
        self.longest: dict[str, float] = {}

    @classmethod
    def after(cls, began: float, seconds: float | None) -> Deadline:
        """That many seconds after ``began``; None: never."""
        return cls(math.inf if seconds is None else began + seconds)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.ends_at - time.perf_counter()

    def past(self, part: float) -> Callable[[], bool]:
        """Asks whether this part of the time that is left now is over."""
        at = time.perf_counter() + part * max(self.left, 0.0)
        return lambda: time.perf_counter() >= at

    def allows(self, kind: str) -> bool:
        """Whether a piece of this kind would end in time; one not seen yet begins as long as there is time."""
        return self.left > _MARGIN * self.longest.get(kind, 0.0)

    def took(self, kind: str, seconds: float) -> None:
        self.longest[kind] = max(self.longest.get(kind, 0.0), seconds)

    def run(self, kind: str, piece: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        began = time.perf_counter()
        try:
            return piece(*args, **options)
        finally:
            self.took(kind, time.perf_counter() - began)
