"""Schedules by name. A new one is a registered function in a file of `schedules`; searches, tables and tests then have
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pase.errors import PaseError
from pase.pipeline.types import Action, Schedule
from pase.registry import Registry

__all__ = ["SCHEDULES", "Discipline", "looped", "register", "schedule", "vee"]

Orders = Callable[[int, int, int], Sequence[Sequence[Action]]]
"""(ranks, micro-batches, chunks) -> per rank its actions in order."""
StageRanks = Callable[[int, int], tuple[int, ...]]
"""(ranks, chunks) -> the rank of each stage."""


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stages round the ranks, over and over: rank r has stages r, r + ranks, …

    >>> looped(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(ranks)) * chunks


def vee(ranks: int, chunks: int) -> tuple[int, ...]:
    """There and back: the first rank has the first and the last stage.

    >>> vee(3, 2)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(ranks), *range(ranks - 1, -1, -1))


@dataclass(frozen=True, kw_only=True)
class Discipline:
    """A way to schedule. chunks: how many stages a rank may have: (least, most), most 0: any number.

    multiple: the number of micro-batches is a multiple of the ranks'; least: at least so many times the ranks.
    runs: who is known to run it. source: where it is from.
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
        """Why it has no such schedule; None where it has."""
        low, high = self.chunks
        if chunks < low or (high and chunks > high):
            many = f"{low}" if low == high else f"at least {low}"
            return f"schedule '{self.name}' has {many} stages on each rank, not {chunks}"
        if self.multiple and chunks > 1 and micro_batches % ranks:
            return (
                f"schedule '{self.name}' takes micro-batches in groups of {ranks} ranks: {micro_batches} are not whole "
                f"groups"
            )
        if micro_batches < self.least * ranks:
            return (
                f"schedule '{self.name}' needs {self.least * ranks} micro-batches on {ranks} ranks, not "
                f"{micro_batches}"
            )
        return None


SCHEDULES = Registry[Discipline]("pipeline schedule", package="pase.pipeline.schedules")
"""Every file of `pase/pipeline/schedules` is imported when this is first read; each registers what it defines."""


def register(
    name: str, summary: str, *, source: str, rank: int = 0, **more: object
) -> Callable[[Orders], Orders]:
    """Decorator: make the function, which writes the ranks' lists, a schedule of that name."""

    def add(orders: Orders) -> Orders:
        made = Discipline(name=name, summary=summary, orders=orders, source=source, **more)  # type: ignore[arg-type]
        SCHEDULES.add(name, made, rank=rank)
        return orders

    return add


@lru_cache(maxsize=256)
def schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The schedule of that name. PaseError where there is none for these numbers, or of that name.

    >>> print(schedule("1f1b", 2, 3))
    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2
    """
    d = SCHEDULES[name]
    if min(ranks, micro_batches, chunks) < 1:
        raise PaseError(
            f"a pipeline of {ranks} ranks, {micro_batches} micro-batches, {chunks} chunks is none"
        )
    why_not = d.refuses(ranks, micro_batches, chunks)
    if why_not is not None:
        raise PaseError(why_not)
    orders = tuple(tuple(order) for order in d.orders(ranks, micro_batches, chunks))
    return Schedule(
        name=name,
        micro_batches=micro_batches,
        rank_of=d.placement(ranks, chunks),
        orders=orders,
        lockstep=d.lockstep,
    )
