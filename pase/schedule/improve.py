"""The fast solver's local search: move, merge, split and reorder messages; compiled.

State: atoms (pieces of tensors, each in one message) and the order of the messages. An evaluation is one pass
over the atoms and one over the messages; a run is a fixed number of them, seeded, so that it repeats exactly.
"""

from __future__ import annotations

import numpy as np

from pase.schedule.greedy import Instance

__all__ = ["improve"]

Pieces = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def improve(
    inst: Instance, pieces: Pieces, *, evaluations: int, bound_s: float, seed: int, heat: float = 0.02
) -> tuple[float, Pieces]:
    """(iteration seconds, pieces) no worse than those given. Stops early at the bound.

    heat: worsenings accepted at first, as a share of the gap to the bound."""
    from pase.schedule.kernels_search import search

    cost, found = search(inst, *pieces, evaluations, bound_s, seed, heat)
    return float(cost), found
