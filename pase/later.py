"""Values that are computed when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

__all__ = ["Later", "Once"]

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class Once(Generic[T]):
    """Calls a function once and keeps what it returned, not the function. If it raises, the next call tries again."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._made: list[T] = []

    def __call__(self) -> T:
        make = self._make
        if make is not None:
            self._made = [make()]
            self._make = None
        return self._made[0]


class Later(Mapping[K, V]):
    """A mapping whose entries are computed at the first use. Copied or pickled, it is a dict.

    >>> squares = Later(lambda: {n: n * n for n in range(3)})
    >>> squares[2], squares == {0: 0, 1: 1, 2: 4}
    (4, True)
    """

    def __init__(self, make: Callable[[], Mapping[K, V]]) -> None:
        self._entries = Once(make)

    def __getitem__(self, key: K) -> V:
        return self._entries()[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[type[dict[K, V]], tuple[dict[K, V]]]:
        return dict, (dict(self),)
