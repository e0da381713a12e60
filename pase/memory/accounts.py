"""Which account of a step's memory holds for a machine: what a compiler keeps decides.

``KeptAndInFlight`` (``pase.memory.account``) adds up what is kept and the most that is in flight. ``Course``
(``pase.memory.course``) follows the step from moment to moment: it holds where light ops run inside of products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pase.ir import Graph
from pase.machine import Machine, Mesh
from pase.memory import account, course
from pase.memory.account import Memory
from pase.memory.live import is_trained

if TYPE_CHECKING:
    from pase.search import MemoryProfile

__all__ = ["Account", "Course", "KeptAndInFlight", "account_for"]


class Account(Protocol):
    """Predicts what a strategy holds on a device, and states a limit on it for the search."""

    def memory(
        self,
        graph: Graph,
        mesh: Mesh,
        configs: Mapping[str, np.ndarray],
        optimizer: str,
    ) -> Memory:
        """Peak bytes on one device; configs: node name -> int8 [axes]."""
        ...

    def profile(
        self, graph: Graph, mesh: Mesh, spaces: Sequence[np.ndarray], limit_bytes: float, optimizer: str
    ) -> MemoryProfile:
        """A lower bound on the same account, as a limit for the search: what is in flight is left out.

        spaces: per node its configs, int8 [K, axes].
        """
        ...

    def in_flight_at_least(self, graph: Graph, mesh: Mesh, spaces: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What each node has in flight whatever the others do, a lower bound for each of its configs: bytes [K].

        spaces: per node its configs, int8 [K, axes].
        """
        ...

    def unseen(self, memory: Memory, seen: float) -> float:
        """What of a strategy's memory the profile leaves out; seen: the most that the profile counts at a time."""
        ...


@dataclass(frozen=True, kw_only=True)
class KeptAndInFlight:
    """What is kept throughout or in a region, and the most that is in flight at once."""

    def memory(
        self,
        graph: Graph,
        mesh: Mesh,
        configs: Mapping[str, np.ndarray],
        optimizer: str,
    ) -> Memory:
        return account.memory(graph, mesh, configs, optimizer)

    def profile(
        self, graph: Graph, mesh: Mesh, spaces: Sequence[np.ndarray], limit_bytes: float, optimizer: str
    ) -> MemoryProfile:
        return account.profile(graph, mesh, spaces, limit_bytes, optimizer)

    def in_flight_at_least(self, graph: Graph, mesh: Mesh, spaces: Sequence[np.ndarray]) -> list[np.ndarray]:
        return account.in_flight_at_least(graph, mesh, spaces)

    def unseen(self, memory: Memory, seen: float) -> float:
        return memory.buffers


@dataclass(frozen=True, kw_only=True)
class Course:
    """The step's worst moment. tile: of the device's memory, rows and columns; empty: arrays are not padded."""

    tile: tuple[int, ...]

    def memory(
        self,
        graph: Graph,
        mesh: Mesh,
        configs: Mapping[str, np.ndarray],
        optimizer: str,
    ) -> Memory:
        return course.peak(graph, mesh, configs, optimizer, self.tile)

    def profile(
        self, graph: Graph, mesh: Mesh, spaces: Sequence[np.ndarray], limit_bytes: float, optimizer: str
    ) -> MemoryProfile:
        return course.profile(graph, mesh, spaces, limit_bytes, optimizer, self.tile)

    def in_flight_at_least(self, graph: Graph, mesh: Mesh, spaces: Sequence[np.ndarray]) -> list[np.ndarray]:
        """None: what is in flight is at its moment alone, so it bounds no other moment from below."""
        return [np.zeros(len(configs)) for configs in spaces]

    def unseen(self, memory: Memory, seen: float) -> float:
        return memory.total - seen


def account_for(machine: Machine, graph: Graph) -> Account:
    """The account that holds for what the machine's compiler keeps (``Machine.fuses_products``). A graph that is not
    trained has no course: nothing is kept for backward, and what is live is counted alike on all machines."""
    courses = machine.fuses_products and is_trained(graph)
    return Course(tile=machine.device.memory_tile) if courses else KeptAndInFlight()
