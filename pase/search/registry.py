"""Searches by name. To add one, register a function in a file of `methods`; `pase solve` and the tests then use it."""

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
    """Options of a search, as in `pase.search.solve`. A search ignores options that it does not need."""

    time_limit: float | None = None
    rounds: int | None = None
    seed: int = 0
    kernel: KernelName = "numba"
    progress: SearchProgress | None = None


RunSearch = Callable[[CostTables, MemoryProfile | None, SearchOptions], Solution]


@dataclass(frozen=True, kw_only=True)
class Search:
    """A registered search.

    run: maps tables, limit (None unless ``takes_limit``) and options to a solution. It raises Infeasible only if that
    is proven.
    """

    name: str
    summary: str
    run: RunSearch
    takes_limit: bool = True


SEARCHES = Registry[Search]("search", package="pase.search.methods")


def register(
    name: str, summary: str, *, takes_limit: bool = True, rank: int = 1
) -> Callable[[RunSearch], RunSearch]:
    """Returns a decorator that registers a function as the search of this name. rank: its position in lists."""

    def add(run: RunSearch) -> RunSearch:
        SEARCHES.add(name, Search(name=name, summary=summary, run=run, takes_limit=takes_limit), rank=rank)
        return run

    return add
