"""Constants of a step: values that do not depend on data, such as masks, noise, positions and read-only buffers.

Each rank computes the whole constant, and each reader takes its part of it. A part of a tensor keeps all of its memory
alive, so what a derivative needs of a constant stays whole until backward. What only repeats along a dim is made once
along it and expanded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeGuard

from pase.frontends.common.values import Value
from pase.frontends.torch.rules import POINTWISE
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import TorchScope, op_name
from pase.ir import Graph, Op, Place
from pase.pytree import Tree

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["applied", "constant_bytes"]

_ELEMENT_BY_ELEMENT = frozenset((*POINTWISE, "add", "sub", "rsub", "div", "masked_fill", "to", "_to_copy"))
"""Ops that compute each element from the elements at its place. (PyTorch's tag of them lacks casts and some
overloads.)"""


def _made_once(run: Callable[..., Tensor], args: Sequence[object], kwargs: Mapping[str, object]) -> Tensor:
    """Calls a pointwise op. Along dims on which all of its operands repeat, the result is made once and expanded."""
    import torch

    operands = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    shape = torch.broadcast_shapes(*(x.shape for x in operands))
    repeated = [
        d
        for d in range(-len(shape), 0)
        if shape[d] > 1 and all(x.dim() < -d or x.shape[d] == 1 or x.stride(d) == 0 for x in operands)
    ]
    if not repeated:
        return run(*args, **kwargs)

    def once(x: object) -> object:
        if not isinstance(x, torch.Tensor):
            return x
        few: Tensor = x
        for d in repeated:
            few = few.narrow(d, 0, 1) if few.dim() >= -d and few.shape[d] > 1 else few
        return few

    return run(*map(once, args), **{k: once(x) for k, x in kwargs.items()}).expand(shape)


def applied(n: FxNode, args: Sequence[object], kwargs: Mapping[str, object], device: torch.device) -> Tree:
    """A call of a constant's op on these operands, with its results on this device."""
    import torch

    def there(x: object) -> object:
        return device if isinstance(x, torch.device) else x

    args, kwargs = tuple(map(there, args)), {k: there(x) for k, x in kwargs.items()}
    if op_name(n) in _ELEMENT_BY_ELEMENT:
        return _made_once(n.target, args, kwargs)
    if n.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        return args[0].reshape(args[1])  # type: ignore[attr-defined]  # an expanded tensor may have no such view
    return n.target(*args, **kwargs)


def constant_bytes(graph: Graph, scope: TorchScope, data: Collection[str], buffers: Collection[str]) -> int:
    """Returns the bytes of constants that each rank holds during backward, whatever the strategy.

    These are the buffers, and what derivatives need of values that are computed without data. An attention's mask is
    not counted: most are causal, and attention then runs without one.

    graph: as traced. scope: its nodes. data: the tensors that depend on data. buffers: the placeholders of buffers that
    the step only reads.
    """
    given = {n: n.meta["val"].to("meta") for n in scope.values if n.op == "placeholder" and n.name in buffers}
    values = _OnMeta(scope=scope, data=data, made=dict(given))
    stored = {x.untyped_storage()._cdata: x.untyped_storage() for x in given.values()}
    for n in _needed_in_backward(graph, scope, data):
        for x in values.tensors(n):
            stored[x.untyped_storage()._cdata] = x.untyped_storage()
    return sum(s.nbytes() for s in stored.values())


def _needed_in_backward(graph: Graph, scope: TorchScope, data: Collection[str]) -> Iterator[FxNode]:
    """Yields the constants among the operands of calls whose derivative reads operands."""
    ops_at: dict[Place, list[Op]] = {}
    for op in (op for n in graph.nodes for op in n.ops):
        ops_at.setdefault(op.eqn, []).append(op)
    outer = {k: v for s in scope.scopes() for k, v in s.leaves.items()}
    values = {n: v for s in scope.scopes() for n, v in s.values.items()}
    for n, path in scope.every():
        if not any(_reads_constants(graph, op) for op in ops_at.get(Place(path), ())):
            continue
        for m in n.all_input_nodes:
            while m in outer:
                m = outer[m]
            if _is_constant(v := values.get(m), data) and v.number is None and v.elements > 1:
                yield m


def _is_constant(v: object, data: Collection[str]) -> TypeGuard[Value]:
    """Whether a value is known to depend on no data."""
    if not isinstance(v, Value):
        return False
    return v.note == ("filled",) if v.tensor is None else v.tensor.name not in data


def _reads_constants(graph: Graph, op: Op) -> bool:
    trained = op.differentiable and any(graph.tensors[a.tensor].needs_grad for a in op.writes)
    return trained and op.kind != "attention" and op.function.needs != "nothing"


@dataclass(frozen=True, kw_only=True)
class _OnMeta:
    """Constants as tensors without contents, which have the strides and the memory that a rank's constants have."""

    scope: TorchScope
    data: Collection[str]
    made: dict[FxNode, Tree] = field(default_factory=dict)

    def tensors(self, n: FxNode) -> list[Tensor]:
        import torch
        from torch.utils._pytree import tree_leaves

        return [x for x in tree_leaves(self.of(n)) if isinstance(x, torch.Tensor)]

    def of(self, n: FxNode) -> Tree:
        if n not in self.made:
            self.made[n] = self._worked_out(n)
        return self.made[n]

    def _worked_out(self, n: FxNode) -> Tree:
        import torch

        value, meta = self.scope.values.get(n), torch.device("meta")
        as_exported = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.to(meta), n.meta.get("val"))
        if n.op != "call_function" or not _is_constant(value, self.data):
            return as_exported
        if value.number is not None:
            return torch.empty((), dtype=as_exported.dtype, device=meta).expand(as_exported.shape)
        if n.target is operator.getitem:
            return self.of(n.args[0])[n.args[1]]
        if not isinstance(n.target, torch._ops.OpOverload):  # a loop or a branch
            return as_exported
        args, kwargs = torch.fx.map_arg((n.args, n.kwargs), self.of)
        try:
            return applied(n, args, kwargs, meta)
        except (
            NotImplementedError,
            RuntimeError,
        ):  # what it computes depends on contents: as large as it was exported
            return as_exported
