"""Compiled kernel: which labels no other label of their state dominates in several sums."""

from __future__ import annotations

import numpy as np

from pase.compiled import jit

__all__ = ["undominated"]


@jit()
def undominated(begins, cost, used, paid, most, keep):
    """Mark the labels that no cheaper label of their state dominates.

    begins: bool [labels], where another state begins; the labels of a state are in order of cost. cost: float64
    [labels]. used: float64 [labels, sums]; a sum may be larger by what the cost is smaller if it is paid, bool [sums].
    most: a label is compared with at most so many of those kept, last those that dominated others least recently.
    keep: bool [labels], the result.
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
                while j > 0:  # what dominates one label often dominates the next
                    front[j] = front[j - 1]
                    j -= 1
                front[0] = other
                break
        keep[i] = not dominated
        if not dominated and size < most:
            front[size] = i
            size += 1
