"""Reads text instances of other solvers: weighted CSPs (.wcsp) and graphical models (.uai).

Files are untrusted: sizes are checked before memory is allocated, and every fault becomes a PaseError that names the
file and the place in it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from pase.errors import PaseError
from pase.search.instances.functions import MAX_CELLS, CostFunction, cells, tables_of
from pase.tables.types import CostTables

__all__ = ["read_uai", "read_wcsp"]

MAX_VARIABLES = 10_000_000


class _Words:
    """The words of a file, one after another. Errors name the wrong word."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.words, self.at = path, text.split(), 0

    def take(self, what: str) -> str:
        """The next word. what: its meaning, for the error if the file has ended."""
        if self.at >= len(self.words):
            raise PaseError(f"the file ends before {what}", where=str(self.path))
        self.at += 1
        return self.words[self.at - 1]

    def whole(self, what: str, least: int, most: int) -> int:
        """The next word, which must be an integer from least to most."""
        word = self.take(what)
        try:
            value = int(word)
        except ValueError:
            raise self.wrong(word, what, "an integer") from None
        if not least <= value <= most:
            raise self.wrong(word, what, f"an integer from {least} to {most}")
        return value

    def numbers(self, what: str, many: int) -> np.ndarray:
        """The next ``many`` words, which must be numbers, as float64 [many]."""
        if len(self.words) - self.at < many:
            raise PaseError(
                f"{what} has {len(self.words) - self.at} numbers, but needs {many}", where=str(self.path)
            )
        words = self.words[self.at : self.at + many]
        self.at += many
        try:
            values = np.array(words, dtype=np.float64)
        except ValueError:
            raise PaseError(
                f"{what} contains a word that is not a number, between words {self.at - many + 1} and {self.at}",
                where=str(self.path),
            ) from None
        if np.isnan(values).any():
            raise PaseError(f"{what} contains NaN", where=str(self.path))
        return values

    def wrong(self, word: str, what: str, want: str) -> PaseError:
        """The error for the last word. what: its meaning. want: what it must be."""
        return PaseError(f"word {self.at} is {word[:40]!r}, but {what} must be {want}", where=str(self.path))

    def end(self) -> None:
        """Raise PaseError unless all words were read."""
        if self.at < len(self.words):
            raise PaseError(
                f"there is more text after the last function, starting with {self.words[self.at][:40]!r}",
                where=str(self.path),
            )


class _Room:
    """Counts the cells of all functions so far, and refuses a file with too many."""

    def __init__(self, path: Path, sizes: list[int]) -> None:
        self.path, self.sizes, self.cells = path, sizes, 0

    def add(self, scope: tuple[int, ...], what: str) -> tuple[int, ...]:
        """The shape of a function over ``scope``."""
        if len(set(scope)) < len(scope):
            raise PaseError(f"{what} contains a variable twice", where=str(self.path))
        self.cells += cells(self.sizes, scope)
        if self.cells > MAX_CELLS:
            raise PaseError(
                f"up to {what}, there are more than {MAX_CELLS:,} costs, the most that can be read",
                where=str(self.path),
            )
        return tuple(self.sizes[v] for v in scope)


def read_wcsp(path: Path, text: str) -> CostTables:
    """Reads a weighted CSP in toulbar2's .wcsp format. Costs at or above its upper bound are forbidden.

    Global cost functions and shared functions are not supported and raise PaseError.
    """
    words = _Words(path, text)
    words.take("the problem's name")
    n = words.whole("the number of variables", 1, MAX_VARIABLES)
    words.whole("the largest domain", 1, MAX_CELLS)
    many = words.whole("the number of cost functions", 0, MAX_CELLS)
    top = words.whole("the upper bound", 0, 2**63 - 1)
    sizes = [words.whole(f"the domain of variable {v}", 1, MAX_CELLS) for v in range(n)]
    room = _Room(path, sizes)
    functions = []
    for i in range(many):
        what = f"cost function {i}"
        arity = words.whole(f"the number of variables of {what} (shared functions are not supported)", 0, n)
        scope = tuple(words.whole(f"a variable of {what}", 0, n - 1) for _ in range(arity))
        default = words.whole(
            f"the default cost of {what} (global cost functions are not supported)", 0, 2**63 - 1
        )
        tuples = words.whole(f"the number of tuples of {what}", 0, MAX_CELLS)
        cost = np.full(room.add(scope, what), float(default))
        rows = words.numbers(what, tuples * (arity + 1)).reshape(tuples, arity + 1)
        if not scope and tuples > 1:
            raise PaseError(f"{what} has no variable, but {tuples} tuples", where=str(path))
        at = rows[:, :-1].astype(np.int64)
        if (at != rows[:, :-1]).any() or (at < 0).any() or (at >= np.array(cost.shape)).any():
            raise PaseError(f"{what} has a tuple outside the domains of its variables", where=str(path))
        cost[tuple(at.T)] = rows[:, -1] if scope else rows[:, -1].sum() if tuples else default
        if (cost < 0).any():
            raise PaseError(f"{what} has a negative cost, which the format does not allow", where=str(path))
        functions.append(CostFunction(scope=scope, cost=np.where(cost >= top, np.inf, cost)))
    words.end()
    return tables_of(sizes, functions, [f"x{v}" for v in range(n)])


def read_uai(path: Path, text: str) -> CostTables:
    """Reads a Markov or Bayes network in the UAI format. A choice costs -ln of its weight, so the cheapest choice is
    the most likely one."""
    words = _Words(path, text)
    kind = words.take("MARKOV or BAYES")
    if kind not in ("MARKOV", "BAYES"):
        raise words.wrong(kind, "the kind of network", "MARKOV or BAYES")
    n = words.whole("the number of variables", 1, MAX_VARIABLES)
    sizes = [words.whole(f"the values of variable {v}", 1, MAX_CELLS) for v in range(n)]
    many = words.whole("the number of functions", 0, MAX_CELLS)
    room = _Room(path, sizes)
    scopes = []
    for i in range(many):
        arity = words.whole(f"the number of variables of function {i}", 0, n)
        scopes.append(tuple(words.whole(f"a variable of function {i}", 0, n - 1) for _ in range(arity)))
    functions = []
    for i, scope in enumerate(scopes):
        shape = room.add(scope, f"function {i}")
        size = cells(sizes, scope)
        words.whole(f"the entries of function {i}", size, size)
        weight = words.numbers(f"function {i}", size).reshape(shape)
        if (weight < 0).any() or np.isinf(weight).any():
            raise PaseError(f"function {i} has a weight that is negative or infinite", where=str(path))
        with np.errstate(divide="ignore"):
            functions.append(CostFunction(scope=scope, cost=-np.log(weight)))
    words.end()
    return tables_of(sizes, functions, [f"x{v}" for v in range(n)])


TEXT_READERS: dict[str, Callable[[Path, str], CostTables]] = {".wcsp": read_wcsp, ".uai": read_uai}
