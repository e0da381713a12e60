"""Work that the search over pipelines has spent, counted and not timed: a busy machine gives the same answer.

The rates are those of one quiet core (x86-64, 2026) in the search for Llama-3 405B on 16,384 devices.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Spent"]

_GRAPHS_PER_S = 4.0
_ENTRIES_PER_S = 5e5
_OPERATIONS_PER_S = 2e7
_CELLS_PER_S = 2e5


@dataclass(kw_only=True, eq=False)
class Spent:
    """graphs: traced again and simplified. entries: numbers of tables that were priced. operations: of searches over
    tables. cells: numbers in the rows of linear and integer programs that were solved."""

    graphs: int = 0
    entries: int = 0
    operations: int = 0
    cells: int = 0

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
