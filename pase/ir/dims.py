"""Unification of dims: a dim stands for itself, for another dim, or for a product of finer dims."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

from pase.ir.sizes import Size, is_one, quotient
from pase.ir.types import DimKind

__all__ = ["Conflict", "DimTable"]


class Conflict(Exception):
    """These dims cannot be unified."""


class _Unification:
    """A unification that may be undone."""

    def __init__(self) -> None:
        self._undo = False
        self.restricted = False
        """Whether a dim that could be split became one that cannot."""
        self.merged: list[Hashable] = []
        """The dims that were replaced by another dim."""

    def undo(self) -> None:
        self._undo = True


class DimTable:
    """Union-find with refinement. Keys may be any hashable value; finer dims that it creates get integer keys.

    >>> t = DimTable()
    >>> t.add("e", 12, "parallel"); t.add("h", 3, "parallel"); t.add("k", 4, "parallel")
    >>> t.unify(["e"], ["h", "k"])
    >>> len(t.resolve("e")), t.resolve("e") == t.resolve("h") + t.resolve("k")
    (2, True)
    """

    def __init__(self) -> None:
        self._into: dict[Hashable, tuple[Hashable, ...]] = {}
        self._size: dict[Hashable, Size] = {}
        self._kind: dict[Hashable, DimKind] = {}
        self._log: list[tuple[str, Hashable, object]] | None = None
        self._attempt: _Unification | None = None

    def add(self, key: Hashable, size: Size, kind: DimKind) -> None:
        self._size[key], self._kind[key] = size, kind

    def size(self, root: Hashable) -> Size:
        return self._size[root]

    def kind(self, root: Hashable) -> DimKind:
        return self._kind[root]

    def resolve(self, key: Hashable) -> tuple[Hashable, ...]:
        """The finest dims of which this dim is the product, major to minor."""
        out: list[Hashable] = []
        stack = [key]
        while stack:
            k = stack.pop()
            if (into := self._into.get(k)) is None:
                out.append(k)
            else:
                stack += reversed(into)
        return tuple(out)

    def _set(self, key: Hashable, into: tuple[Hashable, ...]) -> None:
        if self._log is not None:
            self._log.append(("into", key, None))
        self._into[key] = into

    def _restrict(self, key: Hashable, kind: DimKind) -> None:
        if self._log is not None:
            self._log.append(("kind", key, self._kind[key]))
        self._kind[key] = kind

    @contextmanager
    def attempt(self) -> Iterator[_Unification]:
        """A context whose changes are rolled back at its end if its ``undo`` was called. Contexts do not nest."""
        if self._attempt is not None:
            raise RuntimeError("attempts do not nest")
        self._log = []
        a = self._attempt = _Unification()
        try:
            yield a
        finally:
            log, self._log, self._attempt = self._log, None, None
            if a._undo:
                for what, key, old in reversed(log):
                    if what == "into":
                        del self._into[key]
                    else:
                        self._kind[key] = old  # type: ignore[assignment]

    def unify(self, left: Sequence[Hashable], right: Sequence[Hashable]) -> None:
        """Unifies two walks of one tensor dim. Raises Conflict if their factors do not nest."""
        a = [r for k in left for r in self.resolve(k) if not is_one(self._size[r])]
        b = [r for k in right for r in self.resolve(k) if not is_one(self._size[r])]
        while a and b:
            x, y = a.pop(0), b.pop(0)
            if (
                x in self._into or y in self._into
            ):  # a dim that occurs twice was replaced earlier in this call
                a, b = [*self.resolve(x), *a], [*self.resolve(y), *b]
                continue
            if x == y:
                continue
            sx, sy = self._size[x], self._size[y]
            if sx == sy:
                self._merge(x, y)
            elif (q := quotient(sx, sy)) is not None:
                minor = self._split(x, y, q)
                a.insert(0, minor)
            elif (q := quotient(sy, sx)) is not None:
                minor = self._split(y, x, q)
                b.insert(0, minor)
            else:
                raise Conflict
        if a or b:
            raise Conflict

    def _merge(self, x: Hashable, y: Hashable) -> None:
        kind = self._joined(x, y)
        if kind != self._kind[x]:
            self._restrict(x, kind)
        if self._attempt is not None:
            self._attempt.merged.append(y)
        self._set(y, (x,))

    def _split(self, whole: Hashable, major: Hashable, q: Size) -> Hashable:
        """Replaces ``whole`` by ``major`` times a new minor dim of size q, and returns the minor dim."""
        minor = len(self._size)
        while minor in self._size:
            minor += 1
        self.add(minor, q, self._kind[whole])
        kind = self._joined(whole, major)
        if kind != self._kind[major]:
            self._restrict(major, kind)
        self._set(whole, (major, minor))
        return minor

    def _joined(self, x: Hashable, y: Hashable) -> DimKind:
        """The kind of a unified dim: replicated takes precedence. A dim that one op reduces and another keeps becomes
        parallel; the ops themselves show which of them reduces it."""
        a, b = self._kind[x], self._kind[y]
        if "replicated" in (a, b):
            if a != b and self._attempt is not None:
                self._attempt.restricted = True
            return "replicated"
        return a if a == b else "parallel"
