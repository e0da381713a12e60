"""Equal layers (``torch_equal``) are exported once.

The first of them is traced between two marks. Where an equal layer is called with inputs of the same kind, one node
stands for it; afterwards that node becomes a copy of what the first became, with the layer's own parameters. The graph
is the one that PyTorch would have traced layer by layer. Layers whose code looks at their number, writes to operands or
buffers, or keeps something as an attribute are traced one by one.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from pase.frontends.torch_equal import EqualLayer, attributes, equal_layers, is_word, kind_of, watched
from pase.frontends.torch_values import TorchOperand
from pase.pytree import Tree

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram
    from torch.fx import Graph
    from torch.nn import Module

__all__ = ["Folding", "folding", "unfolded"]

FoldNode: TypeAlias = TorchOperand
"""A node of torch.fx, whose own types say too little of its operands."""
_LIBRARY = "pase_fold"


@dataclass(frozen=True)
class _TracedLayer:
    """What the first of equal layers became. made: its results, tensors by what they are; tree: how they are held."""

    path: str
    made: tuple[tuple[object, ...], ...]
    others: tuple[object, ...]
    tree: TorchOperand


@dataclass
class Folding:
    """One export. regions: number -> what was traced once. copies: call -> (its region, its layer's path)."""

    layers: Mapping[int, EqualLayer]
    paths: Mapping[str, str]
    regions: dict[int, _TracedLayer] = field(default_factory=dict)
    copies: list[tuple[int, str]] = field(default_factory=list)
    known: dict[Hashable, int | None] = field(default_factory=dict)
    inside: bool = False

    def made(self, copy: int) -> tuple[FoldNode, ...]:
        """What a call makes that stands for a layer."""
        return self.regions[self.copies[copy][0]].made

    def call(
        self, plainly: Callable[..., Tree], layer: EqualLayer, args: TorchOperand, kwargs: TorchOperand
    ) -> Tree:
        """A layer's forward: traced, or, where an equal call was traced, one node."""
        import torch
        from torch.fx.experimental.proxy_tensor import get_proxy_mode
        from torch.utils._pytree import tree_flatten, tree_unflatten

        mode = get_proxy_mode()
        leaves, tree = tree_flatten((args, kwargs))
        if self.inside or mode is None or not all(_is_plain(x) for x in leaves):
            return plainly(*args, **kwargs)
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        key = (id(mode), layer.group, str(tree), modes, *map(kind_of, leaves))
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
        graph: TorchOperand = mode.tracer.graph
        entered = iter(_ops().begin(tensors, number))
        given = [next(entered) if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(given, tree)
        self.inside = True
        try:
            with watched(layer.counts) as looked:
                before = attributes(layer.module)
                out = plainly(*args, **kwargs)
                changed = attributes(layer.module) != before
        finally:
            self.inside = False
        results, held = tree_flatten(out)
        if looked() or changed or not all(_is_plain(x) for x in results) or _writes(graph):
            return out
        tensors = [x for x in results if isinstance(x, torch.Tensor)]
        left = iter(_ops().end(tensors, number))
        self.known[key] = number
        others = tuple(_TENSOR if isinstance(x, torch.Tensor) else x for x in results)
        self.regions[number] = _TracedLayer(layer.path, tuple(kind_of(t) for t in tensors), others, held)
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
    layers = equal_layers(module, paths) if wanted else {}
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


def _is_plain(x: object) -> bool:
    """A tensor of known shape, or what is compared by value."""
    import torch

    if isinstance(x, torch.Tensor):
        return x.layout is torch.strided and all(type(s) is int for s in (*x.shape, *x.stride()))
    return is_word(x) and not isinstance(x, torch.SymInt)


def _writes(graph: Graph) -> bool:
    """Does what was traced since the last mark write to what is not its own: its operands, a parameter, a buffer?"""
    import torch

    own: list[FoldNode] = []
    rest = iter(reversed(graph.nodes))
    for n in rest:
        if n.target is _ops().begin.default:
            break
        own.append(n)
    if any(n.target is torch.ops.aten.batch_norm.default for n in own):  # to its statistics
        return True
    written = {_storage(m) for n in own for m in _written(n)}
    if not written:
        return False
    entered = [n for n in own if n.target is operator.getitem and n.args[0].target is _ops().begin.default]
    return not written.isdisjoint(map(_storage, (*entered, *rest)))


def _written(n: FoldNode) -> list[FoldNode]:
    """The operands that an op writes to."""
    schema = getattr(n.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    return [
        value
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None
        and a.alias_info.is_write
        and (value := n.args[i] if i < len(n.args) else n.kwargs.get(a.name)) is not None
    ]


def _storage(n: FoldNode) -> int | None:
    """What a node's tensor lies in: views have it in common."""
    import torch

    t = n.meta.get("val")
    return t.untyped_storage()._cdata if isinstance(t, torch.Tensor) else None


@cache
def _library() -> TorchOperand:
    """The marks, as ops that PyTorch traces and does not look into. They return new tensors of their operands' kind."""
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


def _ops() -> TorchOperand:
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
    regions: dict[int, _Between] = {}
    for number in {r for r, _ in fold.copies}:
        regions[number] = _Between.of(*marks[number])
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
class _Between:
    """The nodes between two marks. entered: node -> which operand of the layer it is. outer: what else they read."""

    begin: FoldNode
    end: FoldNode
    nodes: tuple[FoldNode, ...]
    entered: Mapping[FoldNode, int]
    outer: frozenset[FoldNode]

    @staticmethod
    def of(begin: FoldNode, end: FoldNode) -> _Between:
        entered = {g: g.args[1] for g in begin.users}
        nodes = []
        n = begin.next
        while n is not end:
            if n not in entered:
                nodes.append(n)
            n = n.next
        read = {m for n in (*nodes, end) for m in n.all_input_nodes}
        return _Between(begin, end, tuple(nodes), entered, frozenset(read - set(nodes) - set(entered)))

    def leaks(self) -> bool:
        own = {*self.nodes, self.end}
        return any(u not in own for n in (*self.nodes, *self.entered) for u in n.users)


def _held(exported: ExportedProgram, first: Mapping[str, str], prefix: str) -> dict[str, FoldNode]:
    """First path of a tensor -> a placeholder of it."""
    signature = exported.graph_signature
    named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    nodes = {n.name: n for n in exported.graph_module.graph.nodes if n.op == "placeholder"}
    paths = {name: path.removeprefix(prefix) for name, path in named.items()}
    return {first.get(path, path): nodes[name] for name, path in paths.items()}


def _inside(
    there: _Between, layer: str, held: Mapping[str, FoldNode], first: Mapping[str, str]
) -> dict[FoldNode, str]:
    """The layer's own tensors among what its nodes read: placeholder -> path inside of the layer."""
    own = {f: p.removeprefix(layer + ".") for p, f in first.items() if p.startswith(layer + ".")}
    at = {n: path for path, n in held.items()}
    return {n: own[at[n]] for n in there.outer if at.get(n) in own}


def _calls(graph: Graph) -> list[FoldNode]:
    return [n for n in graph.nodes if n.target is _ops().again.default]


def _marks(graph: Graph) -> dict[int, tuple[TorchOperand, TorchOperand]]:
    """Number -> (begin, end or None)."""
    out: dict[int, tuple[TorchOperand, TorchOperand]] = {}
    for n in graph.nodes:
        if n.target is _ops().begin.default:
            out[n.args[1]] = (n, None)
        elif n.target is _ops().end.default:
            out[n.args[1]] = (out[n.args[1]][0], n)
    return out


def _copied(
    graph: Graph,
    call: FoldNode,
    there: _Between,
    swapped: Mapping[FoldNode, FoldNode],
    paths: tuple[str, str],
) -> None:
    """The traced nodes once more, instead of the call. swapped: the traced layer's tensors -> this layer's. paths: of
    the traced layer and of this one, in the module that is exported."""
    env: dict[TorchOperand, TorchOperand] = {n: call.args[0][i] for n, i in there.entered.items()}
    env |= swapped
    stacks: dict[int, object] = {}
    marks = call.meta.get("custom") or {}
    with graph.inserting_before(call):
        for n in there.nodes:
            new = graph.node_copy(n, lambda m: env.get(m, m))
            stack = n.meta.get("nn_module_stack")
            if stack is not None:
                if id(stack) not in stacks:
                    stacks[id(stack)] = {k: (_moved(path, *paths), of) for k, (path, of) in stack.items()}
                new.meta["nn_module_stack"] = stacks[id(stack)]
            if marks or n.meta.get("custom"):
                new.meta["custom"] = _custom(n.meta.get("custom") or {}, there, marks, call.name)
            env[n] = new
    _replaced(graph, call, [env.get(m, m) for m in there.end.args[0]])


def _custom(
    own: Mapping[str, TorchOperand], there: _Between, marks: Mapping[str, TorchOperand], copy: str
) -> dict[str, TorchOperand]:
    """A copy's marks: those around the layer are the call's, those inside of it are the copy's own."""
    around = there.begin.meta.get("custom") or {}
    inside = {k: v for k, v in own.items() if around.get(k) != v}
    return {**{k: v if v == 1 else f"{v} of {copy}" for k, v in inside.items()}, **marks}


def _moved(path: str, before: str, after: str) -> str:
    return after + path[len(before) :] if path == before or path.startswith(before + ".") else path


def _replaced(graph: Graph, mark: FoldNode, by: Sequence[FoldNode]) -> None:
    for reader in list(mark.users):
        assert reader.target is operator.getitem, reader
        reader.replace_all_uses_with(by[reader.args[1]])
        graph.erase_node(reader)
    graph.erase_node(mark)
