"""Schedules by name.

To add a schedule, register a function in a file of `schedules`. Searches, tables and tests then include it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pase.errors import PaseError
from pase.pipeline.types import Action, Schedule
from pase.registry import Registry

__all__ = ["SCHEDULES", "Discipline", "looped", "register", "schedule", "vee"]

Orders = Callable[[int, int, int], Sequence[Sequence[Action]]]
"""(ranks, micro-batches, chunks) -> for each rank, its actions in order."""
StageRanks = Callable[[int, int], tuple[int, ...]]
"""(ranks, chunks) -> the rank of each stage."""


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stages are assigned to ranks round-robin: rank r has stages r, r + ranks, …

    >>> looped(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(ranks)) * chunks


def vee(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stages are assigned along the ranks and back: the first rank has the first and the last stage.

    >>> vee(3, 2)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(ranks), *range(ranks - 1, -1, -1))


@dataclass(frozen=True, kw_only=True)
class Discipline:
    """A kind of schedule.

    summary: one line that describes it. orders: makes the lists of actions. source: the paper or code that defines it.
    chunks: (least, most) stages per rank; a most of 0 allows any number. placement: assigns stages to ranks. lockstep:
    see ``Schedule``. multiple: with several chunks, the number of micro-batches must be a multiple of the number of
    ranks. least: the least number of micro-batches per rank.
    """

    name: str
    summary: str
    orders: Orders
    source: str
    chunks: tuple[int, int] = (1, 1)
    placement: StageRanks = looped
    lockstep: bool = False
    multiple: bool = False
    least: int = 0

    def refuses(self, ranks: int, micro_batches: int, chunks: int) -> str | None:
        """Why there is no such schedule, or None if there is one."""
        low, high = self.chunks
        if chunks < low or (high and chunks > high):
            many = f"{low}" if low == high else f"at least {low}"
            return f"it has {many} stages on each rank, not {chunks}"
        if self.multiple and chunks > 1 and micro_batches % ranks:
            return f"it needs a multiple of {ranks} micro-batches on {ranks} ranks, not {micro_batches}"
        if micro_batches < self.least * ranks:
            return (
                f"it needs at least {self.least * ranks} micro-batches on {ranks} ranks, not {micro_batches}"
            )
        return None


SCHEDULES = Registry[Discipline]("pipeline schedule", package="pase.pipeline.schedules")
"""Every file of `pase/pipeline/schedules` is imported when this is first read, and registers its schedules."""


def register(
    name: str, summary: str, *, source: str, rank: int = 0, **more: object
) -> Callable[[Orders], Orders]:
    """A decorator that registers a function, which makes the ranks' lists of actions, as a schedule of that name."""

    def add(orders: Orders) -> Orders:
        made = Discipline(name=name, summary=summary, orders=orders, source=source, **more)  # type: ignore[arg-type]
        SCHEDULES.add(name, made, rank=rank)
        return orders

    return add


@lru_cache(maxsize=256)
def schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The schedule of that name. Raises PaseError if the name is unknown or there is none for these numbers.

    >>> print(schedule("1f1b", 2, 3))
    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2
    """
    d = SCHEDULES[name]
    if min(ranks, micro_batches, chunks) < 1:
        raise PaseError(
            f"there is no pipeline of {ranks} ranks, {micro_batches} micro-batches and {chunks} stages per rank",
            where=f"schedule '{name}'",
            fix="give numbers of at least 1",
        )
    why_not = d.refuses(ranks, micro_batches, chunks)
    if why_not is not None:
        raise PaseError(
            why_not, where=f"schedule '{name}'", fix="change these numbers, or choose another schedule"
        )
    orders = tuple(tuple(order) for order in d.orders(ranks, micro_batches, chunks))
    return Schedule(
        name=name,
        micro_batches=micro_batches,
        rank_of=d.placement(ranks, chunks),
        orders=orders,
        lockstep=d.lockstep,
    )
