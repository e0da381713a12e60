"""Events of different ranks that belong to one collective."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pase.replay.measurement.matching import match_collectives
from pase.replay.types import OPERATIONS
from tests.replay.runs import collectives


def test_uneven_records_are_left_unmatched() -> None:
    t = collectives(1, [0.0, 0.0], [0.0, 0.0])
    missing = t.select(
        np.flatnonzero(~((t.rank_of == 1) & (t["start_ns"] == t["start_ns"][t.rank_of == 1].min())))
    )
    matches, problems = match_collectives(missing)
    assert len(matches) == 48
    assert problems[0].where == "collectives" and "left unmatched" in problems[0].what


def test_traces_that_hold_different_collectives_are_left_unmatched() -> None:
    """HTA's sample of two ranks leaves out other collectives on each; matched in order, they waited for each other."""
    t = collectives(1, [0.0, 0.0], [0.0, 0.0])
    first = np.flatnonzero(t.rank_of == 1)[0]
    nbytes = np.full(len(t), 100, t["nbytes"].dtype)
    nbytes[first] += 4
    operation = np.full(len(t), OPERATIONS.index("all_reduce"), t["operation"].dtype)
    changed = replace(t, columns={**t.columns, "nbytes": nbytes, "operation": operation})
    matches, problems = match_collectives(changed)
    assert {m.iteration for m in matches} == set(t["iteration"].tolist()) - {int(t["iteration"][first])}
    assert problems and "bytes" in problems[0].what
