"""Work that the searches under a memory limit and over pipelines have spent, counted and not timed: a busy machine
gives the same answer.

The rates are those of one quiet core (x86-64, 2026) in the search for Llama-3 405B on 16,384 devices.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

__all__ = ["Spent"]

_GRAPHS_PER_S = 4.0
_ENTRIES_PER_S = 5e5
_OPERATIONS_PER_S = 2e7
_CELLS_PER_S = 2e5


@dataclass(kw_only=True, eq=False)
class Spent:
    """graphs: traced again and simplified. entries: numbers of tables that were priced. operations: of searches over
    tables. cells: numbers in the rows of linear and integer programs that were solved. most: seconds of work that may
    be spent. ends_at: when to stop wherever it is, as a ``perf_counter`` time."""

    most: float = math.inf
    ends_at: float = math.inf
    graphs: int = 0
    entries: int = 0
    operations: int = 0
    cells: int = 0

    @classmethod
    def within(cls, work: float, time_limit: float | None) -> Spent:
        """Begin to count. work: seconds of a quiet core. time_limit: seconds by the clock; None: it is not asked."""
        return cls(most=work, ends_at=math.inf if time_limit is None else time.perf_counter() + time_limit)

    def over(self, part: float = 1.0) -> bool:
        """Whether this part of what may be spent is spent, or the time is over."""
        return self.seconds > part * self.most or self.left_s() == 0.0

    def left_s(self) -> float | None:
        """Seconds of the clock until the end; None: no clock is asked."""
        return None if math.isinf(self.ends_at) else max(self.ends_at - time.perf_counter(), 0.0)

    @property
    def seconds(self) -> float:
        """About what a quiet core takes for it.

        >>> Spent(graphs=4, entries=1_000_000).seconds
        3.0
        """
        return (
            self.graphs / _GRAPHS_PER_S
            + self.entries / _ENTRIES_PER_S
            + self.operations / _OPERATIONS_PER_S
            + self.cells / _CELLS_PER_S
        )
