"""Compiled kernel that finds the labels that no other label of their state dominates in several sums."""

from __future__ import annotations

import numpy as np

from pase.compiled import jit

__all__ = ["undominated"]


@jit()
def undominated(begins, cost, used, paid, most, keep):
    """Mark the labels that no cheaper label of their state dominates.

    begins: bool [labels], True where a new state begins; the labels of a state are sorted by cost. cost: float64
    [labels]. used: float64 [labels, sums]. paid: bool [sums]; a dominating label may have a larger sum if the sum is
    paid and its cost is smaller by at least the difference. most: a label is compared with at most this many kept
    labels, those that dominated others most recently first. keep: bool [labels], receives the result.
    """
    labels, sums = used.shape
    front = np.empty(most, np.int64)
    size = 0
    for i in range(labels):
        if begins[i]:
            size = 0
        dominated = False
        for j in range(size):
            other = front[j]
            below = True
            spare = cost[i] - cost[other]
            for s in range(sums):
                more = used[other, s] - used[i, s]
                if more > 0.0:
                    spare -= more
                    if spare < 0.0 or not paid[s]:
                        below = False
                        break
            if below:
                dominated = True
                while j > 0:  # a label that dominates one label often dominates the next
                    front[j] = front[j - 1]
                    j -= 1
                front[0] = other
                break
        keep[i] = not dominated
        if not dominated and size < most:
            front[size] = i
            size += 1
