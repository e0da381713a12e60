"""A linear program for the end times of a pipeline's actions, in which the durations of actions are unknowns too.

An action ends at least its duration after the end of the previous action on its rank, and after the end of the action
whose result it needs. The shortest step under these constraints is the length of the longest path through the schedule.
There are far too many paths to list all of them, but only a few of these rows. (The dual of the longest path: Kelley
and Walker 1959.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from pase.pipeline.order import order_of
from pase.pipeline.simulate import Path
from pase.pipeline.types import Kind, Schedule

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["StepRows", "path_rows", "step_rows"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepRows:
    """Constraints: rows @ columns <= -crossed @ seconds of transfers.

    The columns are, in this order: the seconds of each kind of action of each stage [kinds, stages], the seconds of
    each rank before its first and after its last action [2, ranks], the step, and the end times of actions. crossed:
    the transfers of each row, forward and back, float64 [rows, 2 * (stages - 1)].
    """

    rows: csr_array
    crossed: csr_array

    @property
    def columns(self) -> int:
        return int(self.rows.shape[1])

    def tops(self, send: np.ndarray) -> np.ndarray:
        """The right-hand sides of the rows. send: seconds of transfers, float64 [2, stages - 1]."""
        out: np.ndarray = -(self.crossed @ send.ravel())
        return out


@lru_cache(maxsize=64)
def step_rows(s: Schedule) -> StepRows:
    """The rows of all actions. Not for lockstep schedules, because no path includes the time of their idle slots."""
    from scipy.sparse import csr_array

    o, many = order_of(s), s.stages
    n, step, ends = o.kind.size, len(Kind) * many + 2 * s.ranks, len(Kind) * many + 2 * s.ranks + 1
    every, own = np.arange(n), o.kind * many + o.stage
    begin = len(Kind) * many + o.rank
    after = np.where(
        o.before >= 0, ends + o.before, begin
    )  # the previous action on the rank, or the rank's time before its first action
    late = np.flatnonzero(o.waits >= 0)
    ranks = np.arange(s.ranks)
    at = np.concatenate([every, every, every, n + np.tile(np.arange(late.size), 3)])
    column = np.concatenate([after, own, ends + every, ends + o.waits[late], own[late], ends + late])
    sign = np.repeat([1.0, 1.0, -1.0, 1.0, 1.0, -1.0], [n, n, n, *[late.size] * 3])
    last = n + late.size + ranks
    at = np.concatenate([at, np.tile(last, 3)])
    column = np.concatenate(
        [column, ends + o.last, len(Kind) * many + s.ranks + ranks, np.full(s.ranks, step)]
    )
    sign = np.concatenate([sign, np.repeat([1.0, 1.0, -1.0], s.ranks)])
    count = n + late.size + s.ranks
    sent = np.flatnonzero(o.send[late] >= 0)
    back = (o.kind[late[sent]] != Kind.FORWARD).astype(int)
    crosses = back * (many - 1) + o.send[late[sent]]
    return StepRows(
        rows=csr_array((sign, (at, column)), shape=(count, ends + n)),
        crossed=csr_array((np.ones(sent.size), (n + sent, crosses)), shape=(count, 2 * (many - 1))),
    )


def path_rows(s: Schedule, known: Sequence[Path]) -> StepRows:
    """The rows of the given paths: a relaxation for schedules with too many actions for ``step_rows``."""
    from scipy.sparse import csr_array

    many = s.stages
    rows = np.zeros((len(known), len(Kind) * many + 2 * s.ranks + 1))
    for row, p in zip(rows, known, strict=True):
        row[: p.runs.size] = p.runs.ravel()
        row[[p.runs.size + p.first, p.runs.size + s.ranks + p.last]] += 1.0
    rows[:, -1] = -1.0
    return StepRows(rows=csr_array(rows), crossed=csr_array(np.array([p.crossed.ravel() for p in known])))
