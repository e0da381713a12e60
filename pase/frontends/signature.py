"""The names of a function's arguments, by which a plan calls the batch."""

from __future__ import annotations

import inspect
from typing import Protocol, runtime_checkable

from pase.pytree import Tree

__all__ = ["NamesArguments", "argument_names"]


@runtime_checkable
class NamesArguments(Protocol):
    """A function that pase made of the user's, and whose own signature has not the names of its arguments."""

    def argument_names(self, count: int) -> tuple[str, ...]: ...


def argument_names(fn: Tree, count: int) -> tuple[str, ...]:
    """The name of each of the first ``count`` arguments; the number of one that has no name.

    >>> argument_names(lambda params, x, *more: x, 4)
    ('params', 'x', 'more.0', 'more.1')
    >>> argument_names(max, 2)
    ('0', '1')
    """
    if isinstance(fn, NamesArguments):
        return fn.argument_names(count)
    names: list[str] = []
    try:
        taken = [*inspect.signature(fn).parameters.values()]
    except (TypeError, ValueError):  # the function has no signature
        taken = []
    for p in taken:
        if p.kind is p.VAR_POSITIONAL:
            names += [f"{p.name}.{i}" for i in range(count - len(names))]
        elif p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
    return (*names, *map(str, range(len(names), count)))[:count]
