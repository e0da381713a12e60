"""Equal layers (``equal``) are traced three times, whatever their number: the first, the second and the last.

The traces must be the same but for the layers' own tensors. Of the others each becomes one node when it is called with
inputs of the same kind; afterwards that node becomes a copy of what the first became, with the layer's own parameters.
The graph is the one that PyTorch would have traced layer by layer. Layers whose code reads their number, writes to what
is not its own, returns views of it, or changes Python state that it holds are traced one by one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from pase.frontends.torch.export.equal import EqualLayer, PythonState, equal_layers, is_word, kind_of, reading
from pase.frontends.torch.values import TorchOperand
from pase.pytree import Tree

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Graph
    from torch.nn import Module

__all__ = ["LIBRARY", "FoldNode", "Folding", "fold_ops", "folding"]

FoldNode: TypeAlias = TorchOperand
"""A node of torch.fx, whose own types say too little of its operands."""
LIBRARY = "pase_fold"
"""Of PyTorch's libraries of ops, the one that the marks are in."""


@dataclass(frozen=True)
class _LayerResult:
    """A tensor among a layer's results. made: which of those that it makes, None: it is the operand of this place."""

    made: int | None
    operand: int = -1


@dataclass(frozen=True)
class _TracedLayer:
    """What a layer became. made: its new tensors, by what they are; others: its results; tree: how they are held."""

    path: str
    made: tuple[tuple[object, ...], ...]
    others: tuple[object, ...]
    tree: TorchOperand

    def results(self, made: Sequence[Tensor], leaves: Sequence[TorchOperand]) -> Tree:
        from torch.utils._pytree import tree_unflatten

        every = [
            x if not isinstance(x, _LayerResult) else leaves[x.operand] if x.made is None else made[x.made]
            for x in self.others
        ]
        return tree_unflatten(every, self.tree)


@dataclass
class Folding:
    """One export. regions: number -> what was traced between marks. copies: call -> (its region, its layer's path).
    known: kind of call -> the region for it, None where there is none. checks: region -> those that must be the same.
    unequal: did one turn out to be different when others had been taken for the same?"""

    layers: Mapping[int, EqualLayer]
    paths: Mapping[str, str]
    regions: dict[int, _TracedLayer] = field(default_factory=dict)
    copies: list[tuple[int, str]] = field(default_factory=list)
    known: dict[Hashable, int | None] = field(default_factory=dict)
    checks: dict[int, list[int]] = field(default_factory=dict)
    begun: int = 0
    inside: bool = False
    unequal: bool = False

    def made(self, copy: int) -> tuple[FoldNode, ...]:
        """What a call makes that stands for a layer."""
        return self.regions[self.copies[copy][0]].made

    def call(
        self, plainly: Callable[..., Tree], layer: EqualLayer, args: TorchOperand, kwargs: TorchOperand
    ) -> Tree:
        """A layer's forward: traced, or, where equal calls were traced, one node."""
        from torch.fx.experimental.proxy_tensor import get_proxy_mode
        from torch.utils._pytree import tree_flatten

        mode = get_proxy_mode()
        leaves, tree = tree_flatten((args, kwargs))
        if self.inside or mode is None or not _may_fold(layer, leaves):
            return plainly(*args, **kwargs)
        key = (mode, layer.group, str(tree), _modes(), _same_places(leaves), *map(kind_of, leaves))
        if key not in self.known:
            out, self.known[key] = self._traced(plainly, layer, args, kwargs, mode.tracer.graph)
            return out
        number = self.known[key]
        if number is None:
            return plainly(*args, **kwargs)
        first = self.regions[number]
        checked = {self.regions[n].path for n in self.checks.get(number, ())} - {first.path}
        if checked and not layer.last:
            self.copies.append((number, layer.path))
            return first.results(fold_ops().again(_tensors(leaves), len(self.copies) - 1), leaves)
        out, check = self._traced(plainly, layer, args, kwargs, mode.tracer.graph)
        if check is None or replace(self.regions[check], path=first.path) != first:
            self.known[key] = None
            self.unequal |= any(n == number for n, _ in self.copies)
        else:
            self.checks.setdefault(number, []).append(check)
        return out

    def _traced(
        self,
        plainly: Callable[..., Tree],
        layer: EqualLayer,
        args: TorchOperand,
        kwargs: TorchOperand,
        graph: Graph,
    ) -> tuple[Tree, int | None]:
        """A layer's results, and the number of the region that it became, None where no other may be a copy of it."""
        from torch.utils._pytree import tree_flatten

        leaves, _ = tree_flatten((args, kwargs))
        self.begun += 1
        number = self.begun
        fold_ops().begin(_tensors(leaves), number)
        self.inside = True
        try:
            with reading(layer.counts) as read:
                held = PythonState.by(layer.module)
                out = plainly(*args, **kwargs)
                changed = held.changed()
        finally:
            self.inside = False
        results, tree = tree_flatten(out)
        if read() or changed or not all(_is_plain(x) for x in results):
            return out, None
        at = {id(x): i for i, x in enumerate(leaves)}
        new = _tensors([x for x in results if id(x) not in at])
        if not new or not _gradients_as_marked(leaves, new) or not _keeps_to_itself(graph, new):
            return out, None
        made = {id(t): i for i, t in enumerate(new)}
        others = tuple(_described(x, made, at) for x in results)
        self.regions[number] = _TracedLayer(layer.path, tuple(map(kind_of, new)), others, tree)
        return self.regions[number].results(fold_ops().end(new, number), leaves), number


def _described(x: object, made: Mapping[int, int], at: Mapping[int, int]) -> object:
    import torch

    if not isinstance(x, torch.Tensor):
        return x
    return _LayerResult(made[id(x)]) if id(x) in made else _LayerResult(None, at[id(x)])


_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")


def _modes() -> tuple[object, ...]:
    """What PyTorch's tracing depends on beside operands."""
    import torch

    autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES]
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        tuple(autocast),
    )


def _tensors(leaves: Sequence[TorchOperand]) -> list[Tensor]:
    """Each once."""
    import torch

    return list({id(x): x for x in leaves if isinstance(x, torch.Tensor)}.values())


def _same_places(leaves: Sequence[TorchOperand]) -> tuple[int, ...]:
    """Of each tensor the place among tensors where the same one first occurs: a layer may ask ``x is y``."""
    import torch

    first: dict[int, int] = {}
    return tuple(first.setdefault(id(x), len(first)) for x in leaves if isinstance(x, torch.Tensor))


def _may_fold(layer: EqualLayer, leaves: Sequence[TorchOperand]) -> bool:
    """Plain operands, a tensor at least, and none of the layer's own tensors, which it may tell from others."""
    own = {id(t) for m in layer.module.modules() for d in (m._parameters, m._buffers) for t in d.values()}
    tensors = _tensors(leaves)
    return bool(tensors) and all(map(_is_plain, leaves)) and own.isdisjoint(map(id, tensors))


def _gradients_as_marked(leaves: Sequence[TorchOperand], results: Sequence[Tensor]) -> bool:
    """Marks need gradients exactly if an operand does. Layers that do otherwise are no marks."""
    import torch

    needs = torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(leaves))
    return all(t.requires_grad == (needs and (t.is_floating_point() or t.is_complex())) for t in results)


_CURRENT: list[Folding] = []
"""The export that is under way: a mark's shape rule asks it what a call makes."""
_PATCHING = threading.RLock()
"""Classes are patched by one thread at a time."""


@contextlib.contextmanager
def folding(module: Module, paths: Mapping[str, str], wanted: bool) -> Iterator[Folding]:
    """Within, equal layers of the module are traced once. paths: of each tensor -> the first path of the same tensor.

    Calls are caught in the layers' classes, not in the layers: tracing may call them by a stand-in, which shares the
    layer's attributes.
    """
    import torch

    layers = equal_layers(module, paths) if wanted else {}
    fold = Folding({id(vars(m)): layer for m, layer in layers.items()}, paths)
    classes = {type(m) for m in layers}

    def caught(forward: Callable[..., Tree]) -> Callable[..., Tree]:
        def call(self: Module, *args: Tree, **kwargs: Tree) -> Tree:
            if torch.compiler.is_dynamo_compiling():  # the body of a scan or a cond
                return forward(self, *args, **kwargs)
            layer = fold.layers.get(id(vars(self)))
            if layer is None:
                return forward(self, *args, **kwargs)
            return fold.call(lambda *a, **k: forward(self, *a, **k), layer, args, kwargs)

        return call

    with _PATCHING:
        own = {c: vars(c).get("forward") for c in classes}
        _CURRENT.append(fold)
        try:
            for c in classes:
                c.forward = caught(c.forward)
            yield fold
        finally:
            _CURRENT.remove(fold)
            for c, forward in own.items():
                if forward is not None:
                    c.forward = forward
                elif "forward" in vars(c):
                    del c.forward


def _is_plain(x: object) -> bool:
    """A tensor of known shape, or what is compared by value."""
    import torch

    if isinstance(x, torch.Tensor):
        return x.layout is torch.strided and all(type(s) is int for s in (*x.shape, *x.stride()))
    return is_word(x) and not isinstance(x, torch.SymInt)


def _keeps_to_itself(graph: Graph, results: Sequence[Tensor]) -> bool:
    """Did what was traced since the last mark write only to what it made itself, and are the results of its own making,
    each with its own memory? No where that cannot be told."""
    import torch

    own: list[FoldNode] = []
    rest = iter(reversed(graph.nodes))
    for n in rest:
        if n.target is fold_ops().begin.default:
            break
        own.append(n)
    if any(n.target is torch.ops.aten.batch_norm.default for n in own):  # writes to its statistics
        return False
    try:
        others = {_storage(t) for n in (*rest, *(n for n in own if n.op == "get_attr")) for t in _values(n)}
        written = {_storage(t) for n in own for m in _written(n) for t in _values(m)}
        made = [_storage(t) for t in results]
    except NotImplementedError:  # PyTorch's word for a tensor without a storage to show, as under vmap
        return False
    return others.isdisjoint((*written, *made)) and len(set(made)) == len(made)


def _written(n: FoldNode) -> list[FoldNode]:
    """The operands that an op writes to, lists of tensors too."""
    schema = getattr(n.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    import torch

    values = [
        n.args[i] if i < len(n.args) else n.kwargs.get(a.name)
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]
    return [v for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, torch.fx.Node)]


def _values(n: FoldNode) -> list[Tensor]:
    import torch

    every = torch.utils._pytree.tree_leaves(n.meta.get("val"))
    return [t for t in every if isinstance(t, torch.Tensor)]


def _storage(t: Tensor) -> int:
    """What a tensor lies in: views have it in common."""
    return t.untyped_storage()._cdata


@cache
def _library() -> TorchOperand:
    """The marks, as ops that PyTorch traces and does not look into. begin only stands there; the others return new
    tensors."""
    import torch

    library = torch.library.Library(LIBRARY, "DEF")

    def nothing(tensors: Sequence[Tensor], number: int) -> None:
        return None

    def alike(tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]

    def again(tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        return [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for _, shape, stride, dtype, device, _ in _CURRENT[-1].made(number)
        ]

    for name, rule, out in (
        ("begin", nothing, "()"),
        ("end", alike, "Tensor[]"),
        ("again", again, "Tensor[]"),
    ):
        library.define(f"{name}(Tensor[] tensors, int number) -> {out}")
        library.impl(name, rule, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{LIBRARY}::{name}", rule, lib=library)
    torch.fx.node.has_side_effect(getattr(torch.ops, LIBRARY).begin.default)
    return library


def fold_ops() -> TorchOperand:
    """The marks begin, end and again."""
    import torch

    _library()
    return getattr(torch.ops, LIBRARY)
