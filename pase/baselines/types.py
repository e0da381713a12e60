"""A baseline, the intent from which it is made, and the reason if there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from pase.ir import Node
from pase.machine import Mesh

__all__ = ["Allow", "Baseline", "Intent", "Skipped"]

Allow = Callable[[Node, np.ndarray, Mesh], np.ndarray]
"""(node, its configs int8 [K, axes], mesh) -> bool [K]: the configs that the baseline allows for this node."""


@dataclass(frozen=True, kw_only=True)
class Intent:
    """What a baseline decides: a mesh, and the configs that each node may have. The search fills in the rest,
    so each baseline is the best that its idea allows, not an arbitrary instance of it.

    Intents with the same name are variants of one baseline (such as two orders of the mesh's axes); the cheapest is
    used.
    """

    name: str
    mesh: Mesh
    allow: Allow
    alike: Mapping[str, int] = field(default_factory=dict)
    """Node -> a number. ``allow`` is called once for nodes with the same number and equal configs; other nodes get one
    call each."""
    stored: tuple[int, ...] = ()
    """The axes of the mesh over which the method stores every parameter, or its state, split. If it cannot, because
    they do not divide its dims, the baseline has a note."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Baseline:
    """A baseline's strategy: node name -> int8 [axes], indices into the node's dims or -1.

    cost: in the cost model's unit. notes: what the baseline could not do with this model.
    """

    name: str
    mesh: Mesh
    strategy: Mapping[str, np.ndarray]
    cost: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A baseline that does not apply to this model on these devices."""

    name: str
    reason: str
