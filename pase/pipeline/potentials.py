"""When each action of a pipeline ends, as rows of a linear program whose unknowns are also what actions take.

An action ends no earlier than it takes after the action before it on its rank, and after the one whose result it needs.
The least step under these rows is the longest of all paths through the schedule, each linear in the times: there are
far too many of those to be listed, and few of these. (The dual of the longest path: Kelley and Walker 1959.)
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
    """rows @ columns <= -crossed @ seconds of a transfer. Columns: seconds of each kind of action of each stage [kinds,
    stages], of what a rank does before its first and after its last action [2, ranks], the step, and then when actions
    end. crossed: the transfers of each row, forward and back, float64 [rows, 2 * (stages - 1)]."""

    rows: csr_array
    crossed: csr_array

    @property
    def columns(self) -> int:
        return int(self.rows.shape[1])

    def tops(self, send: np.ndarray) -> np.ndarray:
        """The rows' right sides. send: seconds, float64 [2, stages - 1]."""
        out: np.ndarray = -(self.crossed @ send.ravel())
        return out


@lru_cache(maxsize=64)
def step_rows(s: Schedule) -> StepRows:
    """Those of all actions. Not for a schedule in lockstep, whose idle turns take time that no path includes."""
    from scipy.sparse import csr_array

    o, many = order_of(s), s.stages
    n, step, ends = o.kind.size, len(Kind) * many + 2 * s.ranks, len(Kind) * many + 2 * s.ranks + 1
    every, own = np.arange(n), o.kind * many + o.stage
    begin = len(Kind) * many + o.rank
    after = np.where(
        o.before >= 0, ends + o.before, begin
    )  # the rank's action before, or what it does at first
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
    """Those of some paths alone: a relaxation, for schedules of more actions than a program can have."""
    from scipy.sparse import csr_array

    many = s.stages
    rows = np.zeros((len(known), len(Kind) * many + 2 * s.ranks + 1))
    for row, p in zip(rows, known, strict=True):
        row[: p.runs.size] = p.runs.ravel()
        row[[p.runs.size + p.first, p.runs.size + s.ranks + p.last]] += 1.0
    rows[:, -1] = -1.0
    return StepRows(rows=csr_array(rows), crossed=csr_array(np.array([p.crossed.ravel() for p in known])))
