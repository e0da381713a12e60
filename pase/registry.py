"""Registries of things by name: rules, frontends, backends, cost models, policies, … Names are unique in a registry.

Modules of the user's own may add members, too: those that the environment variable PASE_PLUGINS names are imported
after pase's own.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from pase.errors import PaseError, did_you_mean

__all__ = ["PLUGINS", "Registry", "import_plugins"]

PLUGINS = "PASE_PLUGINS"
"""The environment variable that names modules to import, separated by commas."""

T = TypeVar("T")
V = TypeVar("V")


class Registry(Mapping[str, T], Generic[T]):
    """A mapping to which modules add their definitions. It refuses a name that is already registered.

    kind: what a name stands for, in the singular, for messages.
    package: a package whose modules register their members when they are imported. All of them are imported when the
        registry is first read, and then the user's own modules, so a new member only needs a new file.
    prefix: import only modules whose names start with this.
    each: import the module of this name in each subpackage, instead of the package's own modules.

    Members are sorted by ``rank``, then by the order of their registration. Those of a package are sorted by rank and
    name, because the order of imports may vary.

    >>> shapes = Registry[int]("shape")
    >>> shapes.add("square", 4)
    4
    >>> shapes["sqare"]
    Traceback (most recent call last):
    pase.errors.PaseError: no shape 'sqare' (did you mean 'square'?); choose from: square
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
        """Register a member. Raises ValueError if the name is already registered."""
        if name in self._members:
            raise ValueError(f"{self.kind} '{name}' is registered twice")
        self._members[name] = (rank, member)
        return member

    def register(self, *names: str, rank: int = 0) -> Callable[[V], V]:
        """Decorator: register the decorated object under each of these names.

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
        """Remove a member, for tests that have added one."""
        del self._members[name]

    def __getitem__(self, name: str) -> T:
        self._discover()
        if name in self._members:
            return self._members[name][1]
        known = list(self)
        raise PaseError(
            f"no {self.kind} '{name}'{did_you_mean(str(name), known)}",
            fix=f"choose from: {', '.join(known) or 'nothing, because none is registered'}",
        )

    def __contains__(self, name: object) -> bool:
        self._discover()
        return name in self._members

    def get(self, name: str, default: V | None = None) -> T | V | None:  # type: ignore[override]
        """The member of this name, or the default if there is none."""
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
        """Import the package's modules, once. If a module cannot be imported, every call raises its error."""
        if self._done:
            return
        with self._lock:  # another thread waits until all modules are imported
            if self._found:
                return
            self._found = True  # a module may read the registry while it is imported
            try:
                for name in self._modules():
                    importlib.import_module(name)
                import_plugins()
            except BaseException:
                self._found = False
                raise
            self._done = True

    def _modules(self) -> Iterator[str]:
        """The full names of the modules that register members."""
        package = importlib.import_module(str(self._package))
        for module in pkgutil.iter_modules(package.__path__):
            name = f"{self._package}.{module.name}"
            if not self._each:
                if module.name.startswith(self._prefix):
                    yield name
            elif module.ispkg and importlib.util.find_spec(f"{name}.{self._each}") is not None:
                yield f"{name}.{self._each}"


def import_plugins() -> None:
    """Import the user's own modules, which add members to registries. Raises PaseError if one cannot be found."""
    for name in filter(None, os.environ.get(PLUGINS, "").split(",")):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as e:
            if e.name != name:
                raise
            raise PaseError(
                f"there is no module '{name}'",
                where=PLUGINS,
                fix="install its package, or add its folder to PYTHONPATH",
            ) from e
