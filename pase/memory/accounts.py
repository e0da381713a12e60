"""Selects the memory account of a step for a machine, which depends on what the machine's compiler keeps.

``pase.memory.account`` adds up what is kept and the most that is in flight. It applies to programs that are not
trained, and to the stages of a pipeline, where gradients are summed over micro-batches. A training step is followed
from moment to moment: by ``pase.memory.course`` if the compiler runs light ops inside of products, and otherwise by
``pase.memory.backward``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pase.ir import Graph
from pase.machine import BUCKET_BYTES, Machine, Mesh
from pase.memory import account, backward, course
from pase.memory.account import KeptPart, Memory
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
        search. It leaves out what is in flight. spaces: per node, its configs, int8 [K, axes].
    in_flight_at_least: (graph, mesh, spaces) -> what each node has in flight at least, whatever the other nodes do:
        bytes [K], one value for each of its configs.
    unseen: (memory, seen) -> the part of a strategy's memory that the profile leaves out. seen: the most that the
        profile counts at any time.
    parts: (graph, mesh, configs, optimizer) -> what each node keeps, without what is in flight.
    """

    memory: Callable[[Graph, Mesh, Configs, str], Memory]
    profile: Callable[[Graph, Mesh, Spaces, float, str], MemoryProfile]
    in_flight_at_least: Callable[[Graph, Mesh, Spaces], list[np.ndarray]]
    unseen: Callable[[Memory, float], float]
    parts: Callable[[Graph, Mesh, Configs, str], Iterable[KeptPart]]


KEPT_AND_IN_FLIGHT = Account(
    memory=account.memory,
    profile=account.profile,
    in_flight_at_least=account.in_flight_at_least,
    unseen=lambda memory, seen: memory.buffers,
    parts=account.parts,
)
"""What is kept, throughout the step or in a region, plus the most that is in flight at once."""


def _course(tile: tuple[int, ...]) -> Account:
    """Returns the account of the step's worst moment.

    tile: the rows and columns of a tile of the device's memory; empty if arrays are not padded.
    """
    return Account(
        memory=partial(course.peak, tile=tile),
        profile=partial(course.profile, tile=tile),
        in_flight_at_least=_nothing,
        unseen=lambda memory, seen: memory.total - seen,
        parts=account.parts,
    )


def _backward(workspace: int, prefetch: bool, bucket_bytes: float) -> Account:
    """Returns the account of the backward pass's worst moment.

    workspace: the bytes that the library of products takes, and those of constants. prefetch: whether loops gather
    parameters one iteration early. bucket_bytes: the size of messages that carry gradients.
    """

    def profile(
        graph: Graph, mesh: Mesh, spaces: Spaces, limit_bytes: float, optimizer: str = "adam"
    ) -> MemoryProfile:
        return backward.profile(graph, mesh, spaces, max(limit_bytes - workspace, 0.0), optimizer)

    return Account(
        memory=partial(backward.peak, workspace=workspace, prefetch=prefetch, bucket_bytes=bucket_bytes),
        profile=profile,
        in_flight_at_least=_nothing,
        unseen=lambda memory, seen: memory.total - seen - workspace,
        parts=backward.parts,
    )


def _nothing(graph: Graph, mesh: Mesh, spaces: Spaces) -> list[np.ndarray]:
    """What is in flight at one moment bounds no other moment from below."""
    return [np.zeros(len(configs)) for configs in spaces]


def account_for(machine: Machine, graph: Graph, prefetch: bool) -> Account:
    """Returns the account that applies to what the machine's compiler keeps (``Machine.fuses_products``).

    In a graph that is not trained, nothing is kept for backward, and live tensors are counted alike on all machines.

    prefetch: whether loops gather parameters one iteration early, because collectives of parameters overlap with
        compute. It has no effect if the compiler fuses products: such a step is annotated and does not prefetch.
    """
    if is_trained(graph):
        if machine.fuses_products:
            return _course(machine.device.memory_tile)
        workspace = machine.device.workspace_bytes + graph.facts.constant_bytes
        return _backward(workspace, prefetch, machine.bucket_bytes or BUCKET_BYTES)
    if not prefetch:
        return KEPT_AND_IN_FLIGHT
    return replace(KEPT_AND_IN_FLIGHT, memory=partial(account.memory, prefetch=True))
