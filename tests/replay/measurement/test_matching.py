"""Events of different ranks that belong to one collective."""

from __future__ import annotations

import numpy as np

from pase.replay.measurement.matching import match_collectives
from tests.replay.runs import collectives


def test_uneven_records_are_left_unmatched() -> None:
    t = collectives(1, [0.0, 0.0], [0.0, 0.0])
    missing = t.select(
        np.flatnonzero(~((t.rank_of == 1) & (t["start_ns"] == t["start_ns"][t.rank_of == 1].min())))
    )
    matches, problems = match_collectives(missing)
    assert len(matches) == 48
    assert problems[0].where == "collectives" and "left unmatched" in problems[0].what
