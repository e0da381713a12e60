"""Deadlines: no piece of work starts if it would end too late."""

from __future__ import annotations

import time

from pase.clock import Deadline


def test_a_piece_begins_where_its_like_would_end_in_time() -> None:
    clock = Deadline(time.perf_counter() + 60.0)
    assert clock.allows("move")
    clock.took("move", 1.0)
    clock.took("move", 0.5)
    assert clock.longest == {"move": 1.0} and clock.allows("move")
    clock.took("bound", 59.0)  # more than a minute with its margin
    assert not clock.allows("bound") and clock.allows("move")
    assert clock.run("other", lambda a, b: a + b, 2, b=3) == 5
    assert set(clock.longest) == {"move", "bound", "other"}
    assert not Deadline(time.perf_counter() - 1.0).allows("move")
