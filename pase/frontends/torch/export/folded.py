"""Traces equal layers (``equal``) only three times, however many there are: the first, the second and the last.

The three traces must agree in everything but the layers' own tensors. Every other layer that is called with inputs of
the same kind becomes a single node. Afterwards (``unfolded``), that node is replaced by a copy of the first layer's
trace with the layer's own parameters. The resulting graph is the one that PyTorch would have traced layer by layer.

A layer is traced by itself if its code reads its index, writes to tensors that it did not make, returns views of such
tensors, or changes Python state that it holds.
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
"""A node of torch.fx. PyTorch's own types say too little about its operands."""
LIBRARY = "pase_fold"
"""Name of the PyTorch op library that has the marks: the ops begin, end and again."""


@dataclass(frozen=True)
class _LayerResult:
    """A tensor among a layer's results.

    made: its index among the tensors that the layer makes; None if it is one of the layer's operands. operand: then the
    operand's index.
    """

    made: int | None
    operand: int = -1


@dataclass(frozen=True)
class _TracedLayer:
    """The trace of a layer.

    path: of the layer. made: the kind (``kind_of``) of each tensor that it makes. others: its results, flattened, with
    tensors as _LayerResult. tree: the structure of the results.
    """

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
    """The state of one export.

    layers: id of a layer's attributes -> the layer.
    paths: path of a tensor -> the first path of the same tensor.
    regions: number -> the trace between a begin and an end mark.
    copies: index of a call that stands for a layer -> (the region to copy, the layer's path).
    known: kind of a call -> the region to copy for it; None if such calls are traced.
    checks: region -> the regions that must be the same.
    begun: how many regions have been begun.
    inside: whether a layer is being traced.
    unequal: whether a layer turned out to be different after others had been taken for the same.
    """

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
        """The kinds of the tensors that are made by a call that stands for a layer."""
        return self.regions[self.copies[copy][0]].made

    def call(
        self, plainly: Callable[..., Tree], layer: EqualLayer, args: TorchOperand, kwargs: TorchOperand
    ) -> Tree:
        """A layer's forward: one node if equal calls have been traced, otherwise a trace."""
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
        """A layer's results, and the number of its region; None if the region must not be copied for other layers."""
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
    """The global state that PyTorch's tracing depends on, besides the operands."""
    import torch

    autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES]
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        tuple(autocast),
    )


def _tensors(leaves: Sequence[TorchOperand]) -> list[Tensor]:
    """The tensors among the leaves, each once."""
    import torch

    return list({id(x): x for x in leaves if isinstance(x, torch.Tensor)}.values())


def _same_places(leaves: Sequence[TorchOperand]) -> tuple[int, ...]:
    """For each tensor, the index at which the same tensor first occurs, because a layer may test ``x is y``."""
    import torch

    first: dict[int, int] = {}
    return tuple(first.setdefault(id(x), len(first)) for x in leaves if isinstance(x, torch.Tensor))


def _may_fold(layer: EqualLayer, leaves: Sequence[TorchOperand]) -> bool:
    """Whether a call may be folded: its operands are plain and include a tensor, but no tensor of the layer itself.

    The layer's code may treat its own tensors differently.
    """
    own = {id(t) for m in layer.module.modules() for d in (m._parameters, m._buffers) for t in d.values()}
    tensors = _tensors(leaves)
    return bool(tensors) and all(map(_is_plain, leaves)) and own.isdisjoint(map(id, tensors))


def _gradients_as_marked(leaves: Sequence[TorchOperand], results: Sequence[Tensor]) -> bool:
    """Whether the results need gradients exactly if an operand does, as the results of a mark do."""
    import torch

    needs = torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(leaves))
    return all(t.requires_grad == (needs and (t.is_floating_point() or t.is_complex())) for t in results)


_CURRENT: list[Folding] = []
"""The export that is running, innermost last. The shape rule of a mark asks it what a call makes."""
_PATCHING = threading.RLock()
"""Only one thread at a time may patch classes."""


@contextlib.contextmanager
def folding(module: Module, paths: Mapping[str, str], wanted: bool) -> Iterator[Folding]:
    """Within, equal layers of the module are folded. wanted: if False, no layer is.

    paths: path of a tensor -> the first path of the same tensor. Calls are intercepted in the layers' classes, not in
    the layers, because tracing may call a stand-in that shares the layer's attributes.
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
    """Whether something is a tensor of known shape, or is compared by value."""
    import torch

    if isinstance(x, torch.Tensor):
        return x.layout is torch.strided and all(type(s) is int for s in (*x.shape, *x.stride()))
    return is_word(x) and not isinstance(x, torch.SymInt)


def _keeps_to_itself(graph: Graph, results: Sequence[Tensor]) -> bool:
    """Whether the nodes since the last mark write only to tensors that they made, and made all results.

    Each result must have memory of its own. False if this cannot be determined.
    """
    import torch

    own: list[FoldNode] = []
    rest = iter(reversed(graph.nodes))
    for n in rest:
        if n.target is fold_ops().begin.default:
            break
        own.append(n)
    if any(n.target is torch.ops.aten.batch_norm.default for n in own):  # it writes to its running statistics
        return False
    try:
        others = {_storage(t) for n in (*rest, *(n for n in own if n.op == "get_attr")) for t in _values(n)}
        written = {_storage(t) for n in own for m in _written(n) for t in _values(m)}
        made = [_storage(t) for t in results]
    except NotImplementedError:  # raised for a tensor without an accessible storage, as under vmap
        return False
    return others.isdisjoint((*written, *made)) and len(set(made)) == len(made)


def _written(n: FoldNode) -> list[FoldNode]:
    """The operands that an op writes to, including those in lists."""
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
    """An identifier of the memory that a tensor is stored in. Views share it."""
    return t.untyped_storage()._cdata


@cache
def _library() -> TorchOperand:
    """The marks, as ops that PyTorch traces as one node each. begin returns nothing; end and again return tensors."""
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
    """The ops begin, end and again, which mark layers in a graph."""
    import torch

    _library()
    return getattr(torch.ops, LIBRARY)
