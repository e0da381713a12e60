"""The branches of a conditional. Each is lowered like any body, and their results meet in one tensor."""

from __future__ import annotations

from collections.abc import Sequence

from pase.errors import PaseError
from pase.ir import AccessMap, Tensor
from pase.ops.builder import GraphBuilder, Read, Write, parallel_dims, plain_map
from pase.ops.loops import loop_copy

__all__ = ["SELDOM", "chances", "leave", "meet", "told"]

SELDOM = 1e-3
"""The probability of a branch that is not the most expensive one. It adds almost nothing to the step's time, but the
search still chooses a layout for it."""


def chances(flops: Sequence[float]) -> tuple[float, ...]:
    """The probability at which each branch is priced, given the branches' FLOPs: the most expensive one is taken.

    >>> chances([10.0, 500.0, 500.0])
    (0.001, 1.0, 0.001)
    """
    most_expensive = max(range(len(flops)), key=lambda k: flops[k])
    return tuple(1.0 if k == most_expensive else SELDOM for k in range(len(flops)))


def told(name: str, given: Sequence[float], count: int) -> tuple[float, ...]:
    """The probabilities of a conditional's branches as the user gave them. Raises PaseError if they are not valid.

    >>> told("cond0", (0.9, 0.1), 2)
    (0.9, 0.1)
    """
    if len(given) != count or not all(0 <= p <= 1 for p in given) or abs(sum(given) - 1) > 1e-6:
        raise PaseError(
            f"the chances are {', '.join(map(str, given))}",
            where=f"conditional '{name}'",
            fix=f"give one chance per branch, {count} numbers from 0 to 1 whose sum is 1",
        )
    return tuple(max(float(p), SELDOM) for p in given)


def leave(b: GraphBuilder, x: Tensor) -> Tensor:
    """A branch's result, within the branch. Resharding it to the layout that all branches return is priced there."""
    return loop_copy(b, x, "branch_result")


def meet(b: GraphBuilder, index: Tensor | None, results: Sequence[Tensor]) -> Tensor:
    """The result of the branch that is taken; all have one shape. It moves no data: the branch writes it where it is
    read."""
    shape = results[0].shape
    dims, m = parallel_dims(shape), plain_map(shape)
    reads = [Read(t, m, sparse=True) for t in results]
    if index is not None:
        reads.append(Read(index, AccessMap(())))
    write = Write(shape, results[0].dtype, m, sparse=True)
    return b.nest("cond", "view", reads, [write], dims, flops=0, over=())[0]
