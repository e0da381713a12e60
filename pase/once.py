"""Caches the results of functions with the immutable value (for example a graph) that they were computed from."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, TypeVarTuple

__all__ = ["once"]

T = TypeVar("T")
R = TypeVar("R")
More = TypeVarTuple("More")


def once(function: Callable[[T, *More], R]) -> Callable[[T, *More], R]:
    """Decorator: cache the function's result in its first argument, separately for all values of the other arguments.

    The first argument must be a frozen dataclass without slots, and the other arguments must be hashable. All are given
    by position. A copy of the dataclass (``dataclasses.replace``) has an empty cache.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Side:
    ...     length: int
    >>> @once
    ... def cube(side: Side) -> int:
    ...     print("computed")
    ...     return side.length**3
    >>> side = Side(2)
    >>> cube(side), cube(side)
    computed
    (8, 8)
    """
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def kept(value: T, *more: *More) -> R:
        results: dict[tuple[object, ...], R] = value.__dict__.setdefault(name, {})
        if more not in results:
            results[more] = function(value, *more)
        return results[more]

    return kept
