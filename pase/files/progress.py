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

    >>> PieceOfWork("mesh 2×4", 1, 3)
    'mesh 2×4 (2 of 3)'
    """

    done: int
    total: int

    def __new__(cls, text: str, done: int, total: int) -> PieceOfWork:
        made = super().__new__(cls, f"{text} ({done + 1} of {total})")
        made.done, made.total = done, total
        return made


def estimating(
    say: Callable[[str], None], clock: Callable[[], float] = time.perf_counter
) -> Callable[[str], None]:
    """Returns a function that calls ``say`` with each line and the time so far. For a ``PieceOfWork`` it adds an
    estimate of the remaining time, from the mean time of the finished pieces."""
    start = begun = clock()

    def told(text: str) -> None:
        nonlocal begun
        now = clock()
        parts = [str(text)]
        if now - start >= _QUIET_S:
            parts.append(f"{now - start:.0f} s")
        if isinstance(text, PieceOfWork):
            if text.done == 0:
                begun = now
            elif now - begun >= _QUIET_S:
                left = (now - begun) / text.done * (text.total - text.done)
                parts.append(f"about {left:.0f} s left of these")
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
            first_piece = isinstance(latest, PieceOfWork) and latest.done == 0
            told(str(latest) if first_piece else latest)  # the first piece does not begin again
            say(line[0])
            wait = every_s

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield take
    finally:
        done.set()
        thread.join()
