"""A function of a graph, or of another value that never changes, is worked out once and kept with the value."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, TypeVarTuple

__all__ = ["forget", "once"]

T = TypeVar("T")
R = TypeVar("R")
More = TypeVarTuple("More")


def once(function: Callable[[T, *More], R]) -> Callable[[T, *More], R]:
    """Decorator: the function's result is kept with its first argument, one for each of its further arguments.

    The first argument is a frozen dataclass without slots, the others can be hashed; all are given by position. A copy
    with other fields (``dataclasses.replace``) has nothing kept.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Side:
    ...     length: int
    >>> @once
    ... def cube(side: Side) -> int:
    ...     print("worked out")
    ...     return side.length**3
    >>> side = Side(2)
    >>> cube(side), cube(side)
    worked out
    (8, 8)
    """
    name = _name(function)

    @wraps(function)
    def kept(value: T, *more: *More) -> R:
        results: dict[tuple[object, ...], R] = value.__dict__.setdefault(name, {})
        if more not in results:
            results[more] = function(value, *more)
        return results[more]

    return kept


def forget(function: Callable[..., object], value: object) -> None:
    """Let a function that is worked out ``once`` be worked out again for this value."""
    value.__dict__.pop(_name(function), None)


def _name(function: Callable[..., object]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
