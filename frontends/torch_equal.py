"""Which layers of a module are equal by structure: their classes, attributes, hooks, shapes and ties.

A number that only counts the layers (``layer_idx``) may differ; ``watched`` tells whether a layer's code looks at it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pase.frontends.torch_values import TorchOperand

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["EqualLayer", "attributes", "equal_layers", "is_word", "kind_of", "watched"]

_FEWEST = 3
"""So many equal layers are worth two marks."""


@dataclass(frozen=True)
class EqualLayer:
    """A module that has equals. path: in the user's module. group: equal for equal layers. counts: its attributes that
    only number the layers, (module that holds it, name)."""

    module: Module
    path: str
    group: int
    counts: tuple[tuple[Module, str], ...]


def equal_layers(module: Module, paths: Mapping[str, str]) -> dict[Module, EqualLayer]:
    """The children of lists of modules that have equals, but lone ops, of which nothing is saved."""
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
                print_, watched = _structure(child, path, counts, paths, held)
                found.setdefault(print_, []).append((child, path, watched))
    return {
        child: EqualLayer(child, path, group, watched)
        for group, equal in enumerate(found.values())
        if len(equal) >= _FEWEST
        for child, path, watched in equal
    }


def _counting(children: Iterable[Module]) -> set[tuple[str, str]]:
    """(path inside of a child, attribute) of whole numbers that count the children: each's place and a constant."""
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
    """What two layers have in common exactly if they are equal, and those of their attributes that are not compared."""
    out: list[Hashable] = []
    watched = []
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
                watched.append((m, k))
                out.append(("counts", k))
            else:
                out.append((k, _value(v)))
    return tuple(out), tuple(watched)


def attributes(layer: Module) -> list[int]:
    """What the layer and all inside of it hold, by identity: other values are something that a copy would not keep."""
    tables = (t for m in layer.modules() for t in (vars(m), m._parameters, m._buffers))
    return [id(v) for t in tables for v in t.values()]


def _value(v: object) -> Hashable:
    """An attribute, to compare: numbers, words and lists of them by value, anything else by identity."""
    if isinstance(v, (tuple, list)):
        return type(v), tuple(map(_value, v))
    if isinstance(v, dict):
        return type(v), tuple((_value(k), _value(x)) for k, x in v.items())
    return (type(v), v) if is_word(v) else ("is", id(v))


def is_word(v: object) -> bool:
    import torch

    return v is None or isinstance(v, (bool, int, float, complex, str, torch.dtype, torch.device, torch.Size))


def kind_of(x: TorchOperand) -> tuple[object, ...]:
    """Of a tensor what its tracing depends on, else the value."""
    import torch

    if isinstance(x, torch.Tensor):
        return "tensor", tuple(x.shape), tuple(x.stride()), x.dtype, x.device, x.requires_grad
    return type(x), x


class _Watched:
    """A whole number that notes whether anything looked at it."""

    def __init__(self, number: int) -> None:
        vars(self).update(number=number, looked=False)

    def __getattribute__(self, name: str) -> TorchOperand:
        if name == "__dict__":
            return object.__getattribute__(self, name)
        own = vars(self)
        own["looked"] = True
        return getattr(own["number"], name)


def _looking(name: str) -> Callable[..., object]:
    def method(self: _Watched, *others: TorchOperand) -> object:
        return getattr(self, name)(*(vars(x)["number"] if type(x) is _Watched else x for x in others))

    return method


_INHERITED = ("__new__", "__init__", "__getattribute__", "__setattr__", "__class__", "__init_subclass__")
for _name in dir(int):
    if _name.startswith("__") and callable(getattr(int, _name)) and _name not in _INHERITED:
        setattr(_Watched, _name, _looking(_name))


@contextlib.contextmanager
def watched(counts: Sequence[tuple[Module, str]]) -> Iterator[Callable[[], bool]]:
    """Within, these attributes note whether they are looked at; yields the question."""
    before = [vars(m)[k] for m, k in counts]
    stand = [_Watched(n) for n in before]
    for (m, k), w in zip(counts, stand, strict=True):
        vars(m)[k] = w
    try:
        yield lambda: any(vars(w)["looked"] for w in stand)
    finally:
        for (m, k), n in zip(counts, before, strict=True):
            vars(m)[k] = n
