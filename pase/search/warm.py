"""Compiles all kernels into numba's cache: run ``python -m pase.search.warm`` after an install."""

from __future__ import annotations

import time

import numpy as np

from pase.search.bounded.flat import flatten
from pase.search.bounded.rows import Limit

__all__ = ["warm"]


def warm() -> float:
    """Compile every kernel, or load it from the cache. Returns the seconds that this took."""
    began = time.perf_counter()
    from pase.search.bounded import kernels_depth, kernels_memory
    from pase.search.elimination import kernels_numba
    from pase.search.limits import kernels_labels
    from pase.tables import distinct, walks

    kernels_labels.undominated(
        np.ones(2, bool), np.zeros(2), np.eye(2), np.zeros(2, bool), 1, np.zeros(2, bool)
    )
    kernels_numba.row_classes(np.eye(2))
    flat = flatten([np.zeros(2), np.zeros(2)], [(0, 1)], [np.eye(2)])
    none = np.zeros(0)
    rows = Limit(ptr=np.zeros(5, np.int64), point=np.zeros(0, np.int64), change=none, capacity=none)
    choice, price, message = np.zeros(2, np.int64), np.zeros(0), np.zeros(flat.messages)
    state, active = np.array([-np.inf, 0.0, 0.0, 0.0, 0.0, 0.0]), np.zeros(4, np.int64)
    limited = kernels_memory.Limited(flat.graph, rows, flat.cost)
    kernels_memory.dual_ascent(limited, price, message, choice, active, state, np.inf, 1)
    kernels_memory.polish(flat.graph, flat.cost, choice, 1, 0)
    kernels_memory.lns(limited, price, choice, choice.copy(), 1, 2, 0)
    kernels_depth.descend(flat.graph, flat.cost, kernels_depth.new_tree(flat.slot, message), np.inf, 0.0, 1.0)
    distinct.hashed(np.zeros(1, np.int64))
    walks.compiled(np.full((1, 3, 2), -1))
    return time.perf_counter() - began


if __name__ == "__main__":
    print(f"kernels of the search: {warm():.1f} s")
