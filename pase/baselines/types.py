"""A baseline, the intent it is made from, and why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from pase.ir import Node
from pase.machine import Mesh

__all__ = ["Allow", "Baseline", "Intent", "Skipped"]

Allow = Callable[[Node, np.ndarray, Mesh], np.ndarray]
"""(node, its configs int8 [K, axes], mesh) -> bool [K]: the configs that the method has for this node."""


@dataclass(frozen=True, kw_only=True)
class Intent:
    """What a method decides: a mesh, and which configs each node may have. The search fills in the rest,
    so that a baseline is the best that its method can do, not our first guess at it.

    Intents of one name are variants of one method (two orders of the mesh's axes); the cheapest is used.
    """

    name: str
    mesh: Mesh
    allow: Allow
    alike: Mapping[str, int] = field(default_factory=dict)
    """Node -> a number; of nodes of one number and equal configs, ``allow`` is asked about one. Others: each."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Baseline:
    """A method's strategy: node name -> int8 [axes], indices into the node's dims or -1.

    cost: in the cost model's unit. notes: what the method could not do to this model.
    """

    name: str
    mesh: Mesh
    strategy: Mapping[str, np.ndarray]
    cost: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A method that does not apply to this model on these devices."""

    name: str
    reason: str
