"""A compiled version of ``kernels_numpy`` that works action by action. Both return the same bits.

It imports numba, so import it only inside functions.
"""

from __future__ import annotations

import numpy as np

from pase.compiled import jit

__all__ = ["run"]


@jit()
def run(wave, before, waits, spent, late, begin):
    end, by = np.empty(spent.size), np.empty(spent.size, np.int64)
    for a in range(spent.size):
        own, other = before[a], waits[a]
        at = end[own] if own >= 0 else begin[a]
        by[a] = own
        if other >= 0 and end[other] + late[a] > at:
            at = end[other] + late[a]
            by[a] = other
        end[a] = at + spent[a]
    return end, by
