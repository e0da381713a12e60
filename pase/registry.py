"""Things of one kind by name: rules, frontends, backends, cost models, policies, … A name stands for one of them."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from pase.errors import PaseError

__all__ = ["Registry"]

T = TypeVar("T")
V = TypeVar("V")


class Registry(Mapping[str, T], Generic[T]):
    """A mapping to which modules add what they define, and which refuses a name that is taken.

    kind: what the names stand for, in the singular, as messages say it.
    package: a package whose modules register themselves when they are imported. They are, all of them, when the
        registry is first read; so a new file is all that a new member takes. prefix: only modules of these names.
        each: not the package's own modules, but the module of this name in each package inside it that has one.

    Members come in the order of their ``rank``, then of their registration; those of a package, where chance may
    decide which module is imported first, by rank and name.

    >>> shapes = Registry[int]("shape")
    >>> shapes.add("square", 4)
    4
    >>> shapes["sqare"]
    Traceback (most recent call last):
    pase.errors.PaseError: no shape 'sqare'; there is: square (did you mean 'square'?)
    >>> shapes.add("square", 5)
    Traceback (most recent call last):
    ValueError: shape 'square' is registered twice
    """

    def __init__(self, kind: str, *, package: str | None = None, prefix: str = "", each: str = "") -> None:
        self.kind = kind
        self._package, self._prefix, self._each = package, prefix, each
        self._members: dict[str, tuple[int, T]] = {}
        self._found = self._done = package is None
        self._lock = threading.RLock()

    def add(self, name: str, member: T, *, rank: int = 0) -> T:
        """Register one; ValueError where the name is taken."""
        if name in self._members:
            raise ValueError(f"{self.kind} '{name}' is registered twice")
        self._members[name] = (rank, member)
        return member

    def register(self, *names: str, rank: int = 0) -> Callable[[V], V]:
        """Decorator: what is decorated stands for each of these names.

        >>> tools = Registry("tool")
        >>> @tools.register("saw", "knife")
        ... def cut(): ...
        >>> list(tools)
        ['saw', 'knife']
        """

        def add(member: V) -> V:
            for name in names:
                self.add(name, member, rank=rank)  # type: ignore[arg-type]
            return member

        return add

    def remove(self, name: str) -> None:
        """Take a member out again, as a test does with what it added."""
        del self._members[name]

    def __getitem__(self, name: str) -> T:
        self._discover()
        if name in self._members:
            return self._members[name][1]
        known = list(self)
        there = f"there {'is' if len(known) == 1 else 'are'}: {', '.join(known) or 'none'}"
        near = difflib.get_close_matches(str(name), known, n=1)
        raise PaseError(
            f"no {self.kind} '{name}'; {there}" + (f" (did you mean '{near[0]}'?)" if near else "")
        )

    def __contains__(self, name: object) -> bool:
        self._discover()
        return name in self._members

    def get(self, name: str, default: V | None = None) -> T | V | None:  # type: ignore[override]
        """The member of this name, or the default."""
        self._discover()
        return self._members[name][1] if name in self._members else default

    def __iter__(self) -> Iterator[str]:
        self._discover()
        by_name = self._package is not None
        return iter(sorted(self._members, key=lambda n: (self._members[n][0], n if by_name else "")))

    def __len__(self) -> int:
        self._discover()
        return len(self._members)

    def _discover(self) -> None:
        """Import the package's modules, once. One that cannot be imported is an error, each time it is asked for."""
        if self._done:
            return
        with self._lock:  # another thread waits until all are there
            if self._found:
                return
            self._found = True  # a module may read the registry while it registers
            try:
                for name in self._modules():
                    importlib.import_module(name)
            except BaseException:
                self._found = False
                raise
            self._done = True

    def _modules(self) -> Iterator[str]:
        """The names of the modules that register members."""
        package = importlib.import_module(str(self._package))
        for module in pkgutil.iter_modules(package.__path__):
            name = f"{self._package}.{module.name}"
            if not self._each:
                if module.name.startswith(self._prefix):
                    yield name
            elif module.ispkg and importlib.util.find_spec(f"{name}.{self._each}") is not None:
                yield f"{name}.{self._each}"
