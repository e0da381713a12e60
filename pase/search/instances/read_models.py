"""Instances of other solvers: weighted CSPs (.wcsp) and graphical models (.uai), as text.

Files come from strangers: sizes are bounded before memory is taken, and whatever is wrong becomes one PaseError that
names the file and the place in it.
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
    """The words of a file, one after another; an error says which one was wrong."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.words, self.at = path, text.split(), 0

    def take(self, what: str) -> str:
        if self.at >= len(self.words):
            raise PaseError(f"{self.path}: the file ends where {what} should be")
        self.at += 1
        return self.words[self.at - 1]

    def whole(self, what: str, least: int, most: int) -> int:
        """A whole number from least to most."""
        word = self.take(what)
        try:
            value = int(word)
        except ValueError:
            raise self.wrong(word, what, "a whole number") from None
        if not least <= value <= most:
            raise self.wrong(word, what, f"a number from {least} to {most}")
        return value

    def numbers(self, what: str, many: int) -> np.ndarray:
        """float64 [many]."""
        if len(self.words) - self.at < many:
            raise PaseError(f"{self.path}: {what} has {len(self.words) - self.at} numbers; {many} are needed")
        words = self.words[self.at : self.at + many]
        self.at += many
        try:
            values = np.array(words, dtype=np.float64)
        except ValueError:
            raise PaseError(
                f"{self.path}: {what} holds a word that is no number, at word {self.at - many + 1} to "
                f"{self.at}"
            ) from None
        if np.isnan(values).any():
            raise PaseError(f"{self.path}: {what} holds NaN")
        return values

    def wrong(self, word: str, what: str, want: str) -> PaseError:
        return PaseError(f"{self.path}: word {self.at}, {word[:40]!r}, should be {what}: {want}")

    def end(self) -> None:
        if self.at < len(self.words):
            raise PaseError(
                f"{self.path}: more follows after the last function, from {self.words[self.at][:40]!r} on"
            )


class _Room:
    """Cells of all functions so far; refuses more than are read."""

    def __init__(self, path: Path, sizes: list[int]) -> None:
        self.path, self.sizes, self.cells = path, sizes, 0

    def add(self, scope: tuple[int, ...], what: str) -> tuple[int, ...]:
        """The shape of a function of ``scope``."""
        if len(set(scope)) < len(scope):
            raise PaseError(f"{self.path}: {what} names a variable twice")
        self.cells += cells(self.sizes, scope)
        if self.cells > MAX_CELLS:
            raise PaseError(f"{self.path}: with {what} there are more than {MAX_CELLS:,} costs; refused")
        return tuple(self.sizes[v] for v in scope)


def read_wcsp(path: Path, text: str) -> CostTables:
    """A weighted CSP in toulbar2's .wcsp form: costs at or above its upper bound are forbidden.

    Global cost functions and functions that share their tuples are refused.
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
        arity = words.whole(f"the number of variables of {what} (shared functions are not read)", 0, n)
        scope = tuple(words.whole(f"a variable of {what}", 0, n - 1) for _ in range(arity))
        default = words.whole(
            f"the default cost of {what} (global cost functions are not read)", 0, 2**63 - 1
        )
        tuples = words.whole(f"the number of tuples of {what}", 0, MAX_CELLS)
        cost = np.full(room.add(scope, what), float(default))
        rows = words.numbers(what, tuples * (arity + 1)).reshape(tuples, arity + 1)
        if not scope and tuples > 1:
            raise PaseError(f"{path}: {what} has no variable and {tuples} tuples")
        at = rows[:, :-1].astype(np.int64)
        if (at != rows[:, :-1]).any() or (at < 0).any() or (at >= np.array(cost.shape)).any():
            raise PaseError(f"{path}: {what} has a tuple outside the domains of its variables")
        cost[tuple(at.T)] = rows[:, -1] if scope else rows[:, -1].sum() if tuples else default
        if (cost < 0).any():
            raise PaseError(f"{path}: {what} has a negative cost, which the form does not allow")
        functions.append(CostFunction(scope=scope, cost=np.where(cost >= top, np.inf, cost)))
    words.end()
    return tables_of(sizes, functions, [f"x{v}" for v in range(n)])


def read_uai(path: Path, text: str) -> CostTables:
    """A Markov or Bayes network in the UAI form; a choice costs -ln of its weight: the cheapest is likeliest."""
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
            raise PaseError(f"{path}: function {i} has a weight that is negative or infinite")
        with np.errstate(divide="ignore"):
            functions.append(CostFunction(scope=scope, cost=-np.log(weight)))
    words.end()
    return tables_of(sizes, functions, [f"x{v}" for v in range(n)])


TEXT_READERS: dict[str, Callable[[Path, str], CostTables]] = {".wcsp": read_wcsp, ".uai": read_uai}
