"""A deadline for work in pieces that cannot be interrupted.

A piece starts only if the longest piece of the same kind so far would end in time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["Deadline", "Stopped", "never"]

P = ParamSpec("P")
T = TypeVar("T")

_MARGIN = 1.25  # a piece is assumed to take at most this factor times the longest piece of its kind


class Stopped(Exception):
    """Raised by work that was asked to stop and has no result."""


def never() -> bool:
    """Returns False: a stop condition for work that is never stopped."""
    return False


class Deadline:
    """A deadline that remembers the seconds of the longest piece of each kind.

    ends_at: seconds of ``time.perf_counter``; inf for no deadline.
    """

    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at
        self.longest: dict[str, float] = {}

    @classmethod
    def after(cls, began: float, seconds: float | None) -> Deadline:
        """The deadline this many seconds after ``began``. None: there is no deadline."""
        return cls(math.inf if seconds is None else began + seconds)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.ends_at - time.perf_counter()

    def past(self, part: float) -> Callable[[], bool]:
        """A function that returns whether this fraction of the time that is left now has passed."""
        at = time.perf_counter() + part * max(self.left, 0.0)
        return lambda: time.perf_counter() >= at

    def allows(self, kind: str) -> bool:
        """Whether a piece of this kind is expected to end in time. A new kind may start if any time is left."""
        return self.left > _MARGIN * self.longest.get(kind, 0.0)

    def took(self, kind: str, seconds: float) -> None:
        """Record the seconds of a piece."""
        self.longest[kind] = max(self.longest.get(kind, 0.0), seconds)

    def run(self, kind: str, piece: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Run a piece and record its seconds."""
        began = time.perf_counter()
        try:
            return piece(*args, **options)
        finally:
            self.took(kind, time.perf_counter() - began)
