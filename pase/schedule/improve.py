"""The compiled local search of the fast solver: it moves bytes between messages, and merges, splits and reorders them.

The state is the atoms (pieces of tensors, each in one message) and the order of the messages. An evaluation is one pass
over the atoms and one over the messages. A run is a fixed number of evaluations with a seed, so it is reproducible.
"""

from __future__ import annotations

import numpy as np

from pase.schedule.greedy import Instance

__all__ = ["improve"]

Pieces = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def improve(
    inst: Instance, pieces: Pieces, *, evaluations: int, bound_s: float, seed: int, heat: float = 0.02
) -> tuple[float, Pieces]:
    """Returns (iteration seconds, pieces) no worse than the given pieces. The search stops early at the bound.

    evaluations: number of moves to try. heat: the initial temperature, as a fraction of the gap to the bound.
    """
    from pase.schedule.kernels_search import search

    cost, found = search(inst, *pieces, evaluations, bound_s, seed, heat)
    return float(cost), found
