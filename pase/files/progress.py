"""Progress of long work: lines of text, some of which say how much of the work is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["PieceOfWork", "estimating", "seldom"]

_QUIET_S = 2.0
"""Work that takes less time than this needs no estimate."""


class PieceOfWork(str):
    """A line of progress: the piece of work that begins now, after ``done`` of ``total`` similar pieces.

    most: whether the work may end before all pieces are done.

    >>> PieceOfWork("mesh 2×4", 1, 3)
    'mesh 2×4 (2 of 3)'
    >>> variant = PieceOfWork("2 micro-batches", 4, 24, most=True)
    >>> variant
    '2 micro-batches (5 of at most 24)'
    >>> variant.inside(print)("mesh 2×4")
    5 of at most 24: mesh 2×4
    """

    done: int
    total: int
    most: bool
    begins: bool
    """Whether the piece begins with this line."""

    def __new__(cls, text: str, done: int, total: int, *, most: bool = False) -> PieceOfWork:
        return cls._of(f"{text} ({_number(done, total, most)})", done, total, most, True)

    @classmethod
    def _of(cls, line: str, done: int, total: int, most: bool, begins: bool) -> PieceOfWork:
        made = super().__new__(cls, line)
        made.done, made.total, made.most, made.begins = done, total, most, begins
        return made

    def inside(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """Returns a function that says a line of the work within this piece, with the number of this piece."""
        number = _number(self.done, self.total, self.most)
        return lambda text: say(self._of(f"{number}: {text}", self.done, self.total, self.most, False))


def _number(done: int, total: int, most: bool) -> str:
    return f"{done + 1} of {'at most ' if most else ''}{total}"


def estimating(
    say: Callable[[str], None], clock: Callable[[], float] = time.perf_counter
) -> Callable[[str], None]:
    """Returns a function that calls ``say`` with each line and the time so far. For a ``PieceOfWork`` it adds an
    estimate of the remaining time, from the mean time of the finished pieces."""
    start = begun = reached = clock()
    last = ""

    def told(text: str) -> None:
        nonlocal begun, reached, last
        now = clock()
        parts = [str(text)]
        if now - start >= _QUIET_S:
            parts.append(f"{now - start:.0f} s")
        if isinstance(text, PieceOfWork):
            if text.begins and text is not last:
                reached, begun = now, now if text.done == 0 else begun
            if text.done and now - begun >= _QUIET_S:
                each = (reached - begun) / text.done
                left = each * (text.total - text.done - 1) + max(each - (now - reached), 0.0)
                if left >= 0.5:  # the last piece may take longer than those before it
                    parts.append(f"{'at most ' if text.most else ''}about {left:.0f} s left of these")
        last = text
        say(" · ".join(parts))

    return told


@contextmanager
def seldom(
    say: Callable[[str], None], first_s: float = 10.0, every_s: float = 60.0
) -> Iterator[Callable[[str], None]]:
    """Yields a function that takes each line of progress, for a log file: ``say`` gets the latest one, with the time so
    far, after ``first_s`` seconds and then every ``every_s``."""
    line, latest, done = [""], "", threading.Event()
    told = estimating(lambda text: line.__setitem__(0, text))

    def take(text: str) -> None:
        nonlocal latest
        latest = text
        told(text)

    def repeat() -> None:
        wait = first_s
        while not done.wait(wait):
            told(latest)
            say(line[0])
            wait = every_s

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield take
    finally:
        done.set()
        thread.join()
