"""Which account of a step's memory holds for a machine: what a compiler keeps decides.

One (``pase.memory.account``) adds up what is kept and the most that is in flight. The other
(``pase.memory.course``) follows the step from moment to moment: it holds where light ops run inside of products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pase.ir import Graph
from pase.machine import Machine, Mesh
from pase.memory import account, course
from pase.memory.account import Memory
from pase.memory.live import is_trained

if TYPE_CHECKING:
    from pase.search import MemoryProfile

__all__ = ["KEPT_AND_IN_FLIGHT", "Account", "account_for"]

Configs = Mapping[str, np.ndarray]
Spaces = Sequence[np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Account:
    """Predicts what a strategy holds on a device, and states a limit on it for the search.

    memory: (graph, mesh, configs, optimizer) -> peak bytes on one device; configs: node name -> int8 [axes].
    profile: (graph, mesh, spaces, limit_bytes, optimizer) -> a lower bound on the same account, as a limit for the
        search: what is in flight is left out. spaces: per node its configs, int8 [K, axes].
    in_flight_at_least: (graph, mesh, spaces) -> what each node has in flight whatever the others do, a lower bound for
        each of its configs: bytes [K].
    unseen: (memory, seen) -> what of a strategy's memory the profile leaves out; seen: the most that the profile counts
        at a time.
    """

    memory: Callable[[Graph, Mesh, Configs, str], Memory]
    profile: Callable[[Graph, Mesh, Spaces, float, str], MemoryProfile]
    in_flight_at_least: Callable[[Graph, Mesh, Spaces], list[np.ndarray]]
    unseen: Callable[[Memory, float], float]


KEPT_AND_IN_FLIGHT = Account(
    memory=account.memory,
    profile=account.profile,
    in_flight_at_least=account.in_flight_at_least,
    unseen=lambda memory, seen: memory.buffers,
)
"""What is kept throughout or in a region, and the most that is in flight at once."""


def _course(tile: tuple[int, ...]) -> Account:
    """The step's worst moment. tile: of the device's memory, rows and columns; empty: arrays are not padded."""
    return Account(
        memory=partial(course.peak, tile=tile),
        profile=partial(course.profile, tile=tile),
        # What is in flight is at its moment alone: it bounds no other moment from below.
        in_flight_at_least=lambda graph, mesh, spaces: [np.zeros(len(configs)) for configs in spaces],
        unseen=lambda memory, seen: memory.total - seen,
    )


def account_for(machine: Machine, graph: Graph, prefetch: bool) -> Account:
    """The account that holds for what the machine's compiler keeps (``Machine.fuses_products``). A graph that is not
    trained has no course: nothing is kept for backward, and what is live is counted alike on all machines. prefetch:
    loops gather parameters one turn ahead, because collectives of parameters overlap with compute; where there is a
    course, the step is annotated, and they do not."""
    if machine.fuses_products and is_trained(graph):
        return _course(machine.device.memory_tile)
    if not prefetch:
        return KEPT_AND_IN_FLIGHT
    return replace(KEPT_AND_IN_FLIGHT, memory=partial(account.memory, prefetch=True))
