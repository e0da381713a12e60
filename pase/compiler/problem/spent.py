"""The work that the searches under a memory limit and over pipelines have spent.

It is counted, not timed, so that a busy machine gives the same answer. The rates are those of one quiet core (x86-64,
2026) in the search for Llama-3 405B on 16,384 devices.
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
    """Work that was spent, and its limits.

    most: seconds of work that may be spent.
    ends_at: when to stop in any case, as a ``perf_counter`` time.
    graphs: how many graphs were traced again and simplified.
    entries: how many numbers of tables were priced.
    operations: how many operations searches over tables took.
    cells: how many numbers the rows of the solved linear and integer programs have.
    """

    most: float = math.inf
    ends_at: float = math.inf
    graphs: int = 0
    entries: int = 0
    operations: int = 0
    cells: int = 0

    @classmethod
    def within(cls, work: float, time_limit: float | None, began: float | None = None) -> Spent:
        """Begin to count.

        work: seconds of a quiet core. time_limit: seconds by the clock; None means no limit. began: when the clock
            started, as a ``perf_counter`` time; None means now.
        """
        if time_limit is None:
            return cls(most=work)
        return cls(most=work, ends_at=(time.perf_counter() if began is None else began) + time_limit)

    def over(self, part: float = 1.0) -> bool:
        """Whether this fraction of the allowed work is spent, or the time is over."""
        return self.seconds > part * self.most or self.left_s() == 0.0

    def left_s(self) -> float | None:
        """Return the seconds by the clock until the end, or None without a time limit."""
        return None if math.isinf(self.ends_at) else max(self.ends_at - time.perf_counter(), 0.0)

    @property
    def seconds(self) -> float:
        """The work in seconds of a quiet core, approximately.

        >>> Spent(graphs=4, entries=1_000_000).seconds
        3.0
        """
        return (
            self.graphs / _GRAPHS_PER_S
            + self.entries / _ENTRIES_PER_S
            + self.operations / _OPERATIONS_PER_S
            + self.cells / _CELLS_PER_S
        )
