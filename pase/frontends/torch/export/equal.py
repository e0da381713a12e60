"""Finds the layers of a module that are equal by structure: in their classes, attributes, hooks, shapes and ties.

A number that only counts the layers (``layer_idx``) may differ; ``reading`` tells whether a layer's code reads it.
``PythonState`` holds the Python state that a module can reach, to detect changes and to undo them.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pase.frontends.torch.values import TorchOperand

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["EqualLayer", "PythonState", "equal_layers", "is_word", "kind_of", "reading"]

_FEWEST = 4
"""The smallest number of equal layers that are folded: three of them are traced anyway."""


@dataclass(frozen=True)
class EqualLayer:
    """A layer that is equal to other layers.

    path: in the user's module. group: the number of its group of equal layers. counts: the attributes that only number
    the layers, as (module that holds it, name). last: whether it is the last of its group in the module's order.
    """

    module: Module
    path: str
    group: int
    counts: tuple[tuple[Module, str], ...]
    last: bool


def equal_layers(module: Module, paths: Mapping[str, str]) -> dict[Module, EqualLayer]:
    """The children of lists of modules that are equal to enough of their siblings.

    Children without submodules are left out, because folding a single op saves nothing.
    """
    import torch

    held: dict[str, list[str]] = {}
    for path, first in paths.items():
        held.setdefault(first, []).append(path)
    found: dict[Hashable, list[tuple[Module, str, tuple[tuple[Module, str], ...]]]] = {}
    for outer, m in module.named_modules():
        if not isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential)):
            continue
        children = [(f"{outer}.{k}".lstrip("."), c) for k, c in m._modules.items() if c is not None]
        counts = _counting(c for _, c in children)
        for path, child in children:
            if child._modules:
                print_, numbers = _structure(child, path, counts, paths, held)
                found.setdefault(print_, []).append((child, path, numbers))
    return {
        child: EqualLayer(child, path, group, counts, path == equal[-1][1])
        for group, equal in enumerate(found.values())
        if len(equal) >= _FEWEST
        for child, path, counts in equal
    }


def _counting(children: Iterable[Module]) -> set[tuple[str, str]]:
    """(path inside a child, attribute) of integers that count the children: the child's index plus a constant."""
    offsets: dict[tuple[str, str], list[int]] = {}
    for i, child in enumerate(children):
        for path, m in child.named_modules():
            for k, v in vars(m).items():
                if type(v) is int:
                    offsets.setdefault((path, k), []).append(v - i)
    return {key for key, each in offsets.items() if len(each) >= _FEWEST and len(set(each)) == 1}


def _structure(
    layer: Module,
    path: str,
    counts: set[tuple[str, str]],
    paths: Mapping[str, str],
    held: Mapping[str, Sequence[str]],
) -> tuple[Hashable, tuple[tuple[Module, str], ...]]:
    """A key that two layers share exactly if they are equal, and the counting attributes that are not part of it."""
    out: list[Hashable] = []
    numbers = []
    inside = path + "."
    for name, m in layer.named_modules(remove_duplicate=False):
        kept = m._non_persistent_buffers_set
        out.append((name, type(m), m.training, tuple(sorted(kept))))
        for kind, tensors in (("parameter", m._parameters), ("buffer", m._buffers)):
            for k, t in tensors.items():
                full = ".".join(p for p in (path, name, k) if p)
                alike = held.get(paths.get(full, full), [full])
                ties = tuple(
                    p.removeprefix(inside) if p.startswith(inside) else f"outside {p}" for p in alike
                )
                out.append((kind, k, None if t is None else kind_of(t), ties if t is not None else ()))
        for k, v in sorted(vars(m).items()):
            if k in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                continue
            if (name, k) in counts:
                numbers.append((m, k))
                out.append(("counts", k))
            else:
                out.append((k, _value(v)))
    return tuple(out), tuple(numbers)


@dataclass(frozen=True)
class PythonState:
    """The lists, dicts and sets (including attributes of objects) that a module can reach, each with its contents.

    Tensors, classes, functions and Python modules are not followed.
    """

    each: tuple[tuple[TorchOperand, tuple[TorchOperand, ...]], ...]

    @staticmethod
    def by(module: Module) -> PythonState:
        import torch

        never = (torch.Tensor, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
        seen: dict[int, object] = {}
        each = []
        todo: list[TorchOperand] = [module]
        while todo:
            x = todo.pop()
            if is_word(x) or isinstance(x, never) or id(x) in seen:
                continue
            seen[id(x)] = x
            if isinstance(x, (list, dict, set)):
                each.append((x, _inside(x)))
            if isinstance(x, (list, dict, set, tuple, frozenset)):
                todo += _inside(x)
            if isinstance(own := getattr(x, "__dict__", None), dict):
                todo.append(own)
        return PythonState(tuple(each))

    def changed(self) -> bool:
        """Whether anything changed. Another object of the same value counts as a change."""
        return any(not _identical(_inside(x), before) for x, before in self.each)

    def changes(self, but: Collection[str], apart: Collection[int]) -> list[str]:
        """Names of what has another value now: attributes and dict keys by name, otherwise "a list" or "a set".

        but: names that do not count. apart: ids of dicts that do not count.
        """
        out = set()
        for x, before in self.each:
            now = _inside(x)
            if (
                id(x) in apart
                or _identical(now, before)
                or list(map(_value, now)) == list(map(_value, before))
            ):
                continue
            if not isinstance(x, dict):
                out.add(f"a {type(x).__name__}")
                continue
            old = {id(k): v for k, v in zip(before[::2], before[1::2], strict=True)}
            out |= {str(k) for k, v in x.items() if id(k) not in old or _value(old[id(k)]) != _value(v)} - {
                *but
            }
        return sorted(out)

    def put_back(self) -> None:
        for x, before in self.each:
            if _identical(_inside(x), before):
                continue
            x.clear()
            if isinstance(x, dict):
                x.update(zip(before[::2], before[1::2], strict=True))
            elif isinstance(x, list):
                x.extend(before)
            else:
                x.update(before)


def _inside(x: TorchOperand) -> tuple[TorchOperand, ...]:
    return tuple(part for pair in x.items() for part in pair) if isinstance(x, dict) else tuple(x)


def _identical(a: Sequence[object], b: Sequence[object]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _value(v: object) -> Hashable:
    """An attribute in a form to compare: numbers, strings and containers of them by value, the rest by identity."""
    if isinstance(v, (tuple, list)):
        return type(v), tuple(map(_value, v))
    if isinstance(v, dict):
        return type(v), tuple((_value(k), _value(x)) for k, x in v.items())
    return (type(v), v) if is_word(v) else ("is", id(v))


def is_word(v: object) -> bool:
    """Whether something is None, a number, a string, or a dtype, device or size of PyTorch."""
    import torch

    return v is None or isinstance(v, (bool, int, float, complex, str, torch.dtype, torch.device, torch.Size))


def kind_of(x: TorchOperand) -> tuple[object, ...]:
    """The properties of a tensor that tracing depends on; for anything else, its type and value."""
    import torch

    if isinstance(x, torch.Tensor):
        return "tensor", tuple(x.shape), tuple(x.stride()), x.dtype, x.device, x.requires_grad
    return type(x), x


class _Noted:
    """A descriptor that replaces an attribute of a class's objects and records whether it is read or written."""

    def __init__(self, name: str) -> None:
        self.name, self.read = name, False

    def __get__(self, holder: TorchOperand, of: type) -> TorchOperand:
        self.read = True
        if holder is None or self.name not in vars(holder):
            raise AttributeError(self.name)
        return vars(holder)[self.name]

    def __set__(self, holder: TorchOperand, value: object) -> None:
        self.read = True
        holder.__dict__[self.name] = value


@contextlib.contextmanager
def reading(counts: Sequence[tuple[Module, str]]) -> Iterator[Callable[[], bool]]:
    """Within, reads of these attributes are recorded. Yields a function that tells whether there were any."""
    noted = {(type(m), k): _Noted(k) for m, k in counts}
    before = {(c, k): vars(c)[k] for c, k in noted if k in vars(c)}
    try:
        for (c, k), note in noted.items():
            setattr(c, k, note)
        yield lambda: any(n.read for n in noted.values())
    finally:
        for c, k in noted:
            if (c, k) in before:
                setattr(c, k, before[c, k])
            elif k in vars(c):
                delattr(c, k)
