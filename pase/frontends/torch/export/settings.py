"""Records the Python state that a step reads from its module: numbers, flags and strings baked into the exported graph.

``torch.export`` runs the module's Python code once. If a dropout rate, ``training`` or a temperature changes later, the
plan's step does not change with it. Therefore the attributes that are read while the module is traced are recorded, and
their values are compared with those of the module that runs.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.torch.export.equal import is_word

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["ReadNames", "ReadSettings", "reads_noted"]

ReadNames = dict[str, set[str]]
"""Name of a class -> names of the attributes that were read from its objects."""
_ABSENT = "absent"


@contextlib.contextmanager
def reads_noted(found: ReadNames, module: Module) -> Iterator[None]:
    """Within, attributes that are read from modules, and from objects that modules hold, are added to ``found``.

    Dynamo traces the bodies of loops and branches (``scan``, ``map``, ``cond``, flex_attention) and cannot trace the
    code that records reads. While it traces, nothing is recorded, and all numbers and flags of all submodules count as
    read.
    """
    import torch
    import torch._higher_order_ops.utils as bodies
    from torch.nn.attention import flex_attention

    _of_any_module()  # creates a module, whose attribute reads must not be recorded
    usual: dict[type, Callable[[object, str], object] | None] = {}

    def watch(of: type) -> None:
        if any(c in usual for c in of.__mro__):
            return
        own = vars(of).get("__getattribute__")
        before: Callable[[object, str], object] = of.__getattribute__  # type: ignore[assignment]

        def read(self: object, name: str) -> object:
            value = before(self, name)
            if not name.startswith("__") and _is_data(self, name, value):
                found.setdefault(_class(self), set()).add(name)
                if _is_holder(value):
                    watch(type(value))
            return value

        try:
            of.__getattribute__ = read  # type: ignore[method-assign, assignment]
        except TypeError:  # the class is not written in Python: all attributes of its objects are compared
            return
        usual[of] = own

    def unwatch() -> None:
        for of, own in usual.items():
            if own is None:
                del of.__getattribute__
            else:
                of.__getattribute__ = own  # type: ignore[method-assign, assignment]
        usual.clear()

    traced = bodies.setup_compilation_env

    @contextlib.contextmanager
    def unwatched() -> Iterator[object]:
        unwatch()
        for m in module.modules():
            names = [name for name, value in vars(m).items() if _is_data(m, name, value)]
            found.setdefault(_class(m), set()).update(names)
        try:
            with traced() as backend:
                yield backend
        finally:
            watch(torch.nn.Module)

    bodies.setup_compilation_env = flex_attention.setup_compilation_env = unwatched  # type: ignore[assignment]
    watch(torch.nn.Module)
    try:
        yield
    finally:
        bodies.setup_compilation_env = flex_attention.setup_compilation_env = traced
        unwatch()


@dataclass(frozen=True, kw_only=True)
class ReadSettings:
    """The attributes that a step reads.

    values: (path of a module, attribute) -> value. names: the attributes that are read, per class.
    """

    values: Mapping[tuple[str, str], Hashable]
    names: ReadNames = field(repr=False, compare=False)

    @classmethod
    def of(cls, module: Module, names: ReadNames) -> ReadSettings:
        """The present values of the attributes ``names`` of a module."""
        return cls(values=dict(_values(module, names)), names=names)

    def check(self, module: Module) -> None:
        """PaseError if an attribute of the module has another value."""
        now = dict(_values(module, self.names))
        for place, then in self.values.items():
            if now.get(place, _ABSENT) != then:
                raise _changed(module, place, then, now.get(place, _ABSENT))

    def same_objects(self, module: Module) -> Callable[[], bool]:
        """A cheap test to run before each step: whether the module still holds the same objects as now."""
        words, containers = [], []
        for _, m in module.named_modules():
            for name in self.names.get(_class(m), ()):
                holders = (vars(m), *map(vars, type(m).__mro__))
                held = next((d for d in holders if name in d), holders[0])
                words.append((held, name, held.get(name, _ABSENT)))
                if not _is_word(value := held.get(name)):
                    containers.append(value)
        unique = {id(x): x for x in containers}.values()
        before = [(x, _words(x, self.names, ())) for x in unique]
        return lambda: (
            all(d.get(name, _ABSENT) is x for d, name, x in words)
            and all(_words(x, self.names, ()) == then for x, then in before)
        )


def _changed(module: Module, place: tuple[str, str], then: Hashable, now: Hashable) -> PaseError:
    """The error to raise for an attribute that has changed since the plan was compiled."""
    name = ".".join(filter(None, place))
    of = type(module).__name__
    if place[1] == "training":
        was, now_in = ("evaluation", "training") if now == (bool, True) else ("training", "evaluation")
        return PaseError(
            f"the module is in {now_in} mode, but was in {was} mode when the plan was compiled",
            where=place[0] or of,
            fix=f"call module.{'train' if was == 'training' else 'eval'}() before the step, or compile a plan in "
            f"{now_in} mode",
        )
    name, then, now = _first_difference(name, then, now)
    return PaseError(
        f"the step reads '{name}', which was {_text(then)} when the plan was compiled and is {_text(now)} now",
        where=of,
        fix="set it back or compile again; keep a number that changes in training in a buffer (register_buffer)",
    )


def _first_difference(name: str, then: Hashable, now: Hashable) -> tuple[str, Hashable, Hashable]:
    """(name, old value, new value) of the first part in which two values differ."""
    if not (isinstance(then, tuple) and isinstance(now, tuple) and then[0] == now[0]):
        return name, then, now
    kind, before, after = then[0], then[1], now[1]
    if not (isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after)):
        return name, then, now
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        if a != b and isinstance(kind, str) and a[0] == b[0]:  # an object's attributes
            return _first_difference(f"{name}.{a[0]}", a[1], b[1])
        if a != b and kind in (list, tuple):
            return _first_difference(f"{name}[{i}]", a, b)
    return name, then, now


def _text(value: Hashable) -> str:
    if value == _ABSENT:
        return "not there"
    return repr(value[1])[:80] if isinstance(value, tuple) and len(value) == 2 else repr(value)[:80]


def _values(module: Module, names: ReadNames) -> Iterator[tuple[tuple[str, str], Hashable]]:
    """The present values of the attributes that are read from each module."""
    for path, m in module.named_modules():
        for name in sorted(names.get(_class(m), ())):
            yield (path, name), _words(_held(m, name), names, ())


def _class(x: object) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _held(holder: object, name: str) -> object:
    """An attribute as it is stored; properties are not evaluated."""
    own = getattr(holder, "__dict__", {})
    return own[name] if name in own else inspect.getattr_static(type(holder), name, _ABSENT)


def _is_data(holder: object, name: str, value: object) -> bool:
    """Whether an attribute is stored with the value that is read, and that value can be compared."""
    import torch

    if isinstance(value, (torch.Tensor, torch.nn.Module, type)) or (callable(value) and not _is_word(value)):
        return False
    if isinstance(holder, torch.nn.Module) and name in _of_any_module():
        return False
    return _held(holder, name) is value


@cache
def _of_any_module() -> frozenset[str]:
    """The attributes that PyTorch itself keeps in every module, except ``training``."""
    import torch

    return frozenset((*vars(torch.nn.Module()), *vars(torch.nn.Module))) - {"training"}


def _is_word(v: object) -> bool:
    """Whether something is compared by value. A device is not, because the plan decides where tensors are."""
    import numpy as np
    import torch

    return (is_word(v) and not isinstance(v, torch.device)) or isinstance(
        v, (bytes, range, np.generic, enum.Enum)
    )


def _is_holder(v: object) -> bool:
    """Whether something is an object with attributes of its own, such as a configuration."""
    return not _is_word(v) and not callable(v) and isinstance(getattr(v, "__dict__", None), dict)


def _words(v: object, names: ReadNames, outside: tuple[int, ...]) -> Hashable:
    """A value in a form to compare.

    Numbers and strings are compared by value, containers and objects by their contents, and everything else by its
    class. That includes devices, because the plan decides where tensors are. outside: ids of the containers and objects
    that the value is in.
    """
    import torch

    if _is_word(v):
        return type(v), v
    if id(v) in outside or isinstance(v, (torch.Tensor, torch.nn.Module, torch.device)) or callable(v):
        return type(v).__name__
    outside = (*outside, id(v))
    if isinstance(v, (list, tuple)):
        return type(v), tuple(_words(x, names, outside) for x in v)
    if isinstance(v, (set, frozenset)):
        return type(v), frozenset(_words(x, names, outside) for x in v)
    if isinstance(v, dict):
        return type(v), tuple((_words(k, names, outside), _words(x, names, outside)) for k, x in v.items())
    own = getattr(v, "__dict__", None)
    if not isinstance(own, dict):
        return type(v).__name__
    read = names.get(_class(v), own)
    return type(v).__name__, tuple((k, _words(_held(v, k), names, outside)) for k in sorted(read))
