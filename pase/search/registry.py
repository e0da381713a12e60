"""Searches by name. A new one is a registered function in a file of `methods`; `pase solve` and tests then have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pase.registry import Registry
from pase.search.types import MemoryProfile, SearchProgress, Solution
from pase.tables.types import CostTables

if TYPE_CHECKING:
    from pase.search.elimination.exact import KernelName

__all__ = ["SEARCHES", "RunSearch", "Search", "SearchOptions", "register"]


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What a user may set, as `pase.search.solve` has it; a search ignores what it has no use for."""

    time_limit: float | None = None
    rounds: int | None = None
    seed: int = 0
    kernel: KernelName = "numba"
    progress: SearchProgress | None = None


RunSearch = Callable[[CostTables, MemoryProfile | None, SearchOptions], Solution]


@dataclass(frozen=True, kw_only=True)
class Search:
    """run: tables, limit (None unless takes_limit), options -> answer; raises Infeasible only where that is proven."""

    name: str
    summary: str
    run: RunSearch
    takes_limit: bool = True


SEARCHES = Registry[Search]("search", package="pase.search.methods")


def register(
    name: str, summary: str, *, takes_limit: bool = True, rank: int = 1
) -> Callable[[RunSearch], RunSearch]:
    """Decorator: make the function a search of that name. rank: the place in lists."""

    def add(run: RunSearch) -> RunSearch:
        SEARCHES.add(name, Search(name=name, summary=summary, run=run, takes_limit=takes_limit), rank=rank)
        return run

    return add
