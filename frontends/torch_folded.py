"""Equal layers are exported once. The first of them is traced between two marks; where a layer that is equal by
structure is called with inputs of the same kind, one node stands for it, and afterwards that node becomes a copy of what
the first became, with the layer's own parameters. The graph is the one that PyTorch would have traced layer by layer.

Layers are equal if their classes, attributes, hooks, shapes and ties are. A number that only counts the layers
(``layer_idx``) may differ as long as the layer's code does not look at it. Layers that write in place or to their own
buffers are traced one by one.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from pase.frontends.torch_types import FxNode
from pase.pytree import Tree

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram
    from torch.fx import Graph
    from torch.nn import Module

__all__ = ["Folding", "folding", "unfolded"]

_FEWEST = 3
"""So many equal layers are worth two marks."""
_LIBRARY = "pase_fold"


@dataclass(frozen=True)
class _Layer:
    """A module that has equals. path: in the user's module. group: equal for equal layers. counts: its attributes that
    only number the layers, (module that holds it, name)."""

    path: str
    group: int
    counts: tuple[tuple[Module, str], ...]


@dataclass(frozen=True)
class _Region:
    """What the first of equal layers became. made: its results, tensors by what they are; tree: how they are held."""

    path: str
    made: tuple[tuple[object, ...], ...]
    others: tuple[object, ...]
    tree: Any


@dataclass
class Folding:
    """One export. regions: number -> what was traced once. copies: number of a call -> (its region, its layer's path)."""

    layers: Mapping[int, _Layer]
    paths: Mapping[str, str]
    regions: dict[int, _Region] = field(default_factory=dict)
    copies: list[tuple[int, str]] = field(default_factory=list)
    known: dict[Hashable, int | None] = field(default_factory=dict)
    inside: bool = False

    def made(self, copy: int) -> tuple[Any, ...]:
        """What a call makes that stands for a layer."""
        return self.regions[self.copies[copy][0]].made

    def call(self, plainly: Callable[..., Tree], layer: _Layer, args: Any, kwargs: Any) -> Tree:
        """A layer's forward: traced, or, where an equal call was traced, one node."""
        import torch
        from torch.fx.experimental.proxy_tensor import get_proxy_mode
        from torch.utils._pytree import tree_flatten, tree_unflatten

        mode = get_proxy_mode()
        leaves, tree = tree_flatten((args, kwargs))
        if self.inside or mode is None or not all(_is_plain(x) for x in leaves):
            return plainly(*args, **kwargs)
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        key = (id(mode), layer.group, str(tree), modes, *map(_kind, leaves))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if key in self.known:
            number = self.known[key]
            if number is None:
                return plainly(*args, **kwargs)
            region = self.regions[number]
            self.copies.append((number, layer.path))
            made = iter(_ops().again(tensors, len(self.copies) - 1) if tensors or region.made else ())
            every = [next(made) if x is _TENSOR else x for x in region.others]
            return tree_unflatten(every, region.tree)
        number = len(self.known)
        self.known[key] = None
        graph: Any = mode.tracer.graph
        entered = iter(_ops().begin(tensors, number))
        given = [next(entered) if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(given, tree)
        self.inside = True
        try:
            with _watched(layer.counts) as looked:
                out = plainly(*args, **kwargs)
        finally:
            self.inside = False
        results, held = tree_flatten(out)
        if looked() or not all(_is_plain(x) for x in results) or _writes(graph):
            return out
        tensors = [x for x in results if isinstance(x, torch.Tensor)]
        left = iter(_ops().end(tensors, number))
        self.known[key] = number
        others = tuple(_TENSOR if isinstance(x, torch.Tensor) else x for x in results)
        self.regions[number] = _Region(layer.path, tuple(_kind(t) for t in tensors), others, held)
        return tree_unflatten([next(left) if x is _TENSOR else x for x in others], held)


_TENSOR = object()
"""Stands for a tensor among a layer's results."""
_CURRENT: list[Folding] = []
"""The export that is under way: a mark's shape rule asks it what a call makes."""


@contextlib.contextmanager
def folding(module: Module, paths: Mapping[str, str], wanted: bool) -> Iterator[Folding]:
    """Within, equal layers of the module are traced once. paths: of each tensor -> the first path of the same tensor.

    Calls are caught in the layers' classes, not in the layers: tracing may call them by a stand-in, which shares the
    layer's attributes.
    """
    layers = _equal_layers(module, paths) if wanted else {}
    fold = Folding({id(vars(m)): layer for m, layer in layers.items()}, paths)
    classes = {type(m) for m in layers}
    own = {c: vars(c).get("forward") for c in classes}

    def caught(forward: Callable[..., Tree]) -> Callable[..., Tree]:
        def call(self: Module, *args: Tree, **kwargs: Tree) -> Tree:
            layer = fold.layers.get(id(vars(self)))
            if layer is None:
                return forward(self, *args, **kwargs)
            return fold.call(lambda *a, **k: forward(self, *a, **k), layer, args, kwargs)

        return call

    try:
        for c in classes:
            c.forward = caught(c.forward)
        _CURRENT.append(fold)
        yield fold
    finally:
        _CURRENT.remove(fold)
        for c, forward in own.items():
            if forward is None:
                del c.forward
            else:
                c.forward = forward


def _equal_layers(module: Module, paths: Mapping[str, str]) -> dict[Module, _Layer]:
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
        child: _Layer(path, group, watched)
        for group, equal in enumerate(found.values())
        if len(equal) >= _FEWEST
        for child, path, watched in equal
    }


def _counting(children: Any) -> set[tuple[str, str]]:
    """(path inside of a child, attribute) of whole numbers that number the children: each one's place and a constant."""
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
                out.append((kind, k, None if t is None else _kind(t), ties if t is not None else ()))
        for k, v in sorted(vars(m).items()):
            if k in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                continue
            if (name, k) in counts:
                watched.append((m, k))
                out.append(("counts", k))
            else:
                out.append((k, _value(v)))
    return tuple(out), tuple(watched)


def _value(v: object) -> Hashable:
    """An attribute, to compare: numbers, words and lists of them by value, anything else by identity."""
    if isinstance(v, (tuple, list)):
        return type(v), tuple(map(_value, v))
    if isinstance(v, dict):
        return type(v), tuple((_value(k), _value(x)) for k, x in v.items())
    return (type(v), v) if _is_word(v) else ("is", id(v))


def _is_word(v: object) -> bool:
    import torch

    return v is None or isinstance(
        v, (bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)
    )


def _is_plain(x: object) -> bool:
    """A tensor of known shape, or what is compared by value."""
    import torch

    if isinstance(x, torch.Tensor):
        return x.layout is torch.strided and all(type(s) is int for s in (*x.shape, *x.stride()))
    return _is_word(x) and not isinstance(x, torch.SymInt)


def _kind(x: Any) -> tuple[object, ...]:
    """Of a tensor what its tracing depends on, else the value."""
    import torch

    if isinstance(x, torch.Tensor):
        return "tensor", tuple(x.shape), tuple(x.stride()), x.dtype, x.device, x.requires_grad
    return type(x), x


def _writes(graph: Graph) -> bool:
    """Does what was traced since the last mark write in place, or have a region in which such a thing may be?"""
    import torch

    for n in reversed(graph.nodes):
        if n.target is _ops().begin.default:
            return False
        schema = getattr(n.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return True
        if isinstance(n.target, torch._ops.HigherOrderOperator) or n.target is torch.ops.aten.batch_norm.default:
            return True
    return True


class _Watched:
    """A whole number that notes whether anything looked at it."""

    def __init__(self, number: int) -> None:
        vars(self).update(number=number, looked=False)

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            return object.__getattribute__(self, name)
        own = vars(self)
        own["looked"] = True
        return getattr(own["number"], name)


def _looking(name: str) -> Callable[..., object]:
    def method(self: _Watched, *others: Any) -> object:
        return getattr(self, name)(*(vars(x)["number"] if type(x) is _Watched else x for x in others))

    return method


_INHERITED = ("__new__", "__init__", "__getattribute__", "__setattr__", "__class__", "__init_subclass__")
for _name in dir(int):
    if _name.startswith("__") and callable(getattr(int, _name)) and _name not in _INHERITED:
        setattr(_Watched, _name, _looking(_name))


@contextlib.contextmanager
def _watched(counts: Sequence[tuple[Module, str]]) -> Iterator[Callable[[], bool]]:
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


@cache
def _library() -> Any:
    """The marks, as ops that PyTorch traces and does not look into. They return new tensors of their operands' kinds."""
    import torch

    library = torch.library.Library(_LIBRARY, "DEF")

    def alike(tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]

    def again(tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        return [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for _, shape, stride, dtype, device, _ in _CURRENT[-1].made(number)
        ]

    for name, rule in (("begin", alike), ("end", alike), ("again", again)):
        library.define(f"{name}(Tensor[] tensors, int number) -> Tensor[]")
        library.impl(name, rule, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_LIBRARY}::{name}", rule, lib=library)
    return library


def _ops() -> Any:
    import torch

    _library()
    return getattr(torch.ops, _LIBRARY)


def unfolded(exported: ExportedProgram, fold: Folding, prefix: str) -> bool:
    """Writes each call that stands for a layer out, and removes the marks. False where something else uses what was
    made inside of the layer that was traced (the graph is then of no use). prefix: of the user's module's paths."""
    if not fold.known:
        return True
    graph = exported.graph_module.graph
    marks = _marks(graph)
    outputs = {m for n in graph.nodes if n.op == "output" for m in n.all_input_nodes}
    regions: dict[int, _Traced] = {}
    for number in {r for r, _ in fold.copies}:
        regions[number] = _Traced.of(*marks[number])
        if regions[number].leaks():
            return False
    every = [n for pair in marks.values() for n in pair if n is not None]
    if any(m in outputs for n in (*every, *_calls(graph)) for m in n.users):
        return False
    held = _held(exported, fold.paths, prefix)
    own_tensors = {r: _inside(t, fold.regions[r].path, held, fold.paths) for r, t in regions.items()}
    for n in _calls(graph):
        number, path = fold.copies[n.args[1]]
        there = regions[number]
        own = fold.regions[number].path
        swapped = {p: held[fold.paths[f"{path}.{rel}"]] for p, rel in own_tensors[number].items()}
        _copied(graph, n, there, swapped, (prefix + own, prefix + path))
    for begin, end in marks.values():
        for mark in (begin, end):
            if mark is not None:
                _replaced(graph, mark, mark.args[0])
    return True


@dataclass(frozen=True)
class _Traced:
    """The nodes between two marks. entered: node -> which operand of the layer it is. outer: what else they read."""

    begin: Any
    end: Any
    nodes: tuple[Any, ...]
    entered: Mapping[Any, int]
    outer: frozenset[Any]

    @staticmethod
    def of(begin: Any, end: Any) -> _Traced:
        entered = {g: g.args[1] for g in begin.users}
        nodes = []
        n = begin.next
        while n is not end:
            if n not in entered:
                nodes.append(n)
            n = n.next
        read = {m for n in (*nodes, end) for m in n.all_input_nodes}
        return _Traced(begin, end, tuple(nodes), entered, frozenset(read - set(nodes) - set(entered)))

    def leaks(self) -> bool:
        own = {*self.nodes, self.end}
        return any(u not in own for n in (*self.nodes, *self.entered) for u in n.users)


def _held(exported: ExportedProgram, first: Mapping[str, str], prefix: str) -> dict[str, FxNode]:
    """First path of a tensor -> a placeholder of it."""
    signature = exported.graph_signature
    named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    nodes = {n.name: n for n in exported.graph_module.graph.nodes if n.op == "placeholder"}
    paths = {name: path.removeprefix(prefix) for name, path in named.items()}
    return {first.get(path, path): nodes[name] for name, path in paths.items()}


def _inside(there: _Traced, layer: str, held: Mapping[str, FxNode], first: Mapping[str, str]) -> dict[Any, str]:
    """The layer's own tensors among what its nodes read: placeholder -> path inside of the layer."""
    own = {f: p.removeprefix(layer + ".") for p, f in first.items() if p.startswith(layer + ".")}
    at = {n: path for path, n in held.items()}
    return {n: own[at[n]] for n in there.outer if at.get(n) in own}


def _calls(graph: Graph) -> list[Any]:
    return [n for n in graph.nodes if n.target is _ops().again.default]


def _marks(graph: Graph) -> dict[int, tuple[Any, Any]]:
    """Number -> (begin, end or None)."""
    out: dict[int, tuple[Any, Any]] = {}
    for n in graph.nodes:
        if n.target is _ops().begin.default:
            out[n.args[1]] = (n, None)
        elif n.target is _ops().end.default:
            out[n.args[1]] = (out[n.args[1]][0], n)
    return out


def _copied(
    graph: Graph, call: Any, there: _Traced, swapped: Mapping[Any, Any], paths: tuple[str, str]
) -> None:
    """The traced nodes once more, instead of the call. swapped: the traced layer's tensors -> this layer's. paths: of
    the traced layer and of this one, in the module that is exported."""
    env: dict[Any, Any] = {n: call.args[0][i] for n, i in there.entered.items()}
    env |= swapped
    stacks: dict[int, object] = {}
    marks = call.meta.get("custom") or {}
    with graph.inserting_before(call):
        for n in there.nodes:
            new = graph.node_copy(n, lambda m: env.get(m, m))
            stack = n.meta.get("nn_module_stack")
            if stack is not None:
                if id(stack) not in stacks:
                    stacks[id(stack)] = {
                        k: (_moved(path, *paths), of) for k, (path, of) in stack.items()
                    }
                new.meta["nn_module_stack"] = stacks[id(stack)]
            if marks or n.meta.get("custom"):
                new.meta["custom"] = _custom(n.meta.get("custom") or {}, there, marks, call.name)
            env[n] = new
    _replaced(graph, call, [env.get(m, m) for m in there.end.args[0]])


def _custom(own: Mapping[str, Any], there: _Traced, marks: Mapping[str, Any], copy: str) -> dict[str, Any]:
    """A copy's marks: those around the layer are the call's, those inside of it are the copy's own."""
    around = there.begin.meta.get("custom") or {}
    inside = {k: v for k, v in own.items() if around.get(k) != v}
    return {**{k: v if v == 1 else f"{v} of {copy}" for k, v in inside.items()}, **marks}


def _moved(path: str, before: str, after: str) -> str:
    return after + path[len(before) :] if path == before or path.startswith(before + ".") else path


def _replaced(graph: Graph, mark: Any, by: Sequence[Any]) -> None:
    for reader in list(mark.users):
        assert reader.target is operator.getitem, reader
        reader.replace_all_uses_with(by[reader.args[1]])
        graph.erase_node(reader)
    graph.erase_node(mark)
