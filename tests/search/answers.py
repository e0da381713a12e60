"""The answer of a search, verified, or None if there is none."""

from __future__ import annotations

from collections.abc import Callable

from pase.errors import Infeasible
from pase.search import (
    Solution,
    verify,
)
from pase.tables.types import CostTables


def answer(f: Callable[[CostTables], Solution], tables: CostTables) -> float | None:
    try:
        s = f(tables)
    except Infeasible:
        return None
    verify(tables, s)
    return s.cost
