"""Removes from a recorded program what nothing needs: views that undo each other, views and constants made twice, and
ops whose result nothing reads. Light ops that only lead to results of the program (running statistics, counters) are
joined, which takes one launch on a GPU for all of a kind.

The program's results, their derivatives, and what is sent stay the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pase.backends.torch.spmd.collectives import EdgeCall
from pase.backends.torch.spmd.record import Drawn, ProgramCall

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Graph
    from torch.fx import Node as FxNode

    from pase.frontends.torch.values import TorchOperand

__all__ = ["acts", "tidied"]

_RESHAPES = frozenset({"reshape", "view", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten"})
"""Views whose result has the same elements in the same order."""
_PERMUTES = frozenset({"permute", "transpose", "t"})
_OTHERS = frozenset({"expand", "narrow", "slice", "select", "split", "detach", "getitem"})


def tidied(graph: Graph, *, hooks: bool = True) -> None:
    """Tidy a graph in place. The values of its nodes (``meta["val"]``) must be known.

    hooks: whether a hook may send a gradient. A backward in two passes, as a pipeline's stage may run it, would call
        the hook in both.
    """
    _edges_first(graph)
    _views(graph)
    _unequal(graph)
    _made_twice(graph)
    for n in reversed(list(graph.nodes)):
        if not n.users and n.op in ("call_function", "call_method", "get_attr") and not acts(n):
            graph.erase_node(n)
    if hooks:
        _hooked(graph)
    _joined(graph)


def _edges_first(graph: Graph) -> None:
    """Reshape after an edge that is the same in any shape, instead of before it, so that views around it meet."""
    for n in list(graph.nodes):
        edge = n.target.run if isinstance(n.target, ProgramCall) else None
        if not (isinstance(edge, EdgeCall) and edge.anyshape and len(n.args) == 1):
            continue
        base = n.args[0]
        while _name(base) in _RESHAPES and (under := _viewed(base)) is not None:
            base = under
        if base is n.args[0]:
            continue
        with graph.inserting_before(n):
            first = graph.call_function(n.target, (base,))
            first.meta |= n.meta | {"val": base.meta["val"]}
            shaped = graph.call_method("reshape", (first, tuple(n.meta["val"].shape)))
        shaped.meta |= n.meta
        n.replace_all_uses_with(shaped)
        graph.erase_node(n)


def _hooked(graph: Graph) -> None:
    """Hook edges that pass a value on to the op that makes it, if nothing else reads it."""
    for n in graph.nodes:
        edge = n.target.run if isinstance(n.target, ProgramCall) else None
        if not (isinstance(edge, EdgeCall) and edge.passes and edge.later is None and len(n.args) == 1):
            continue
        (base,) = n.args
        if len(base.users) == 1 and base.op.startswith("call") and _is_new(base):
            n.target = ProgramCall(replace(edge, hooks=True), n.target.name)


def _is_new(n: FxNode) -> bool:
    """Whether a node makes an array of its own: a view may be another tensor that is read elsewhere."""
    import torch

    made, *given = (m.meta.get("val") for m in (n, *n.all_input_nodes))
    arrays = [x.untyped_storage()._cdata for x in given if isinstance(x, torch.Tensor)]
    return isinstance(made, torch.Tensor) and made.untyped_storage()._cdata not in arrays


def _views(graph: Graph) -> None:
    """Replace chains of views by the shortest ones. A sum of all elements needs none."""
    for n in list(graph.nodes):
        if n.op == "call_method" and n.target == "sum" and len(n.args) == 1 and not n.kwargs:
            while _name(n.args[0]) in _RESHAPES and (under := _viewed(n.args[0])) is not None:
                n.args = (under,)
        base = _viewed(n)
        if base is None:
            continue
        name, shape = _name(n), tuple(n.meta["val"].shape)
        if name in _RESHAPES:
            while _name(base) in _RESHAPES and (under := _viewed(base)) is not None:
                base = under
            if tuple(base.meta["val"].shape) == shape:
                n.replace_all_uses_with(base)
            elif base is not n.args[0]:
                _become(graph, n, base, "reshape", shape)
        elif name in _PERMUTES:
            order = _order(n)
            while order is not None and _name(base) in _PERMUTES:
                before, under = _order(base), _viewed(base)
                if before is None or under is None:
                    break
                order, base = tuple(before[i] for i in order), under
            if order == tuple(range(len(shape))):
                n.replace_all_uses_with(base)
            elif order is not None and base is not n.args[0]:
                _become(graph, n, base, "permute", order)
        elif name == "expand" and tuple(base.meta["val"].shape) == shape:
            n.replace_all_uses_with(base)


def _unequal(graph: Graph) -> None:
    """Compare for inequality, instead of for equality and the opposite: whether an index is another rank's. Do not
    compare flags with zero."""
    import torch

    for n in list(graph.nodes):
        if n.op == "call_method" and n.target == "ne" and n.args[1:] == (0,):
            base = n.args[0]
            if base.meta["val"].dtype == torch.bool:
                n.replace_all_uses_with(base)
        if n.op == "call_method" and n.target == "__invert__":
            (same,) = n.args
            if same.op == "call_method" and same.target == "__eq__":
                base, other = same.args
                _become(graph, n, base, "__ne__", other)


def _become(graph: Graph, n: FxNode, base: FxNode, method: str, to: tuple[int, ...] | FxNode) -> None:
    """Replace a node by a method of another."""
    with graph.inserting_before(n):
        made = graph.call_method(method, (base, to))
    made.meta |= n.meta
    n.replace_all_uses_with(made)


def _made_twice(graph: Graph) -> None:
    """Compute equal views, and equal constants, once."""
    seen: dict[Hashable, FxNode] = {}
    for n in list(graph.nodes):
        key = _key(n)
        if key is None:
            continue
        first = seen.setdefault(key, n)
        if first is not n:
            n.replace_all_uses_with(first)


def _joined(graph: Graph) -> None:
    """Run products and sums that have no gradient, and lead to nothing but results, as one op for all of a kind."""
    import operator

    import torch

    every = {"mul": torch._foreach_mul, "add": torch._foreach_add}
    last = next(n for n in reversed(graph.nodes) if n.op == "output")
    kinds: dict[FxNode, Hashable] = {}
    for n in reversed(list(graph.nodes)):
        if n.users and all(u is last or u in kinds for u in n.users) and (kind := _light(n)) is not None:
            kinds[n] = kind
    depth: dict[FxNode, int] = {}
    alike: dict[tuple[int, Hashable], list[FxNode]] = {}
    for n in reversed(kinds):
        depth[n] = 1 + max((depth.get(x, 0) for x in n.all_input_nodes), default=0)
        alike.setdefault((depth[n], kinds[n]), []).append(n)
    for _, nodes in sorted(alike.items(), key=lambda item: item[0][0]):
        for n in nodes:  # what it reads may be joined ops, which are here
            last.prepend(n)
        if len(nodes) == 1:
            continue
        ones, others, (alpha, *_) = zip(*map(_operands, nodes), strict=True)
        of_tensors = isinstance(others[0], torch.fx.Node)
        scale = {"alpha": alpha} if of_tensors and _name(nodes[0]) == "add" else {}
        args = list(ones), list(others) if of_tensors else others[0]
        with graph.inserting_before(nodes[0]):
            made = graph.call_function(every[_name(nodes[0])], args, scale)
            made.meta |= nodes[0].meta | {"val": [n.meta["val"] for n in nodes]}
            for i, n in enumerate(nodes):
                part = graph.call_function(operator.getitem, (made, i))
                part.meta |= n.meta
                n.replace_all_uses_with(part)
        for n in nodes:
            graph.erase_node(n)


def _operands(n: FxNode) -> tuple[TorchOperand, TorchOperand, TorchOperand]:
    """(one, other, alpha) of a product, or of the sum of one and ``alpha`` times the other."""
    given = dict(zip(("self", "other"), n.args, strict=False)) | n.kwargs
    return given.get("self", given.get("input")), given.get("other"), given.get("alpha", 1)


def _light(n: FxNode) -> Hashable | None:
    """Equal for two products or sums without gradient that can be one op; None if the node is something else."""
    import torch

    if n.op != "call_function" or _name(n) not in ("mul", "add") or len(n.args) > 2 or _differentiated(n):
        return None
    one, other, alpha = _operands(n)
    node, number = torch.fx.Node, (int, float)
    known = isinstance(one, node) and isinstance(other, (node, *number)) and isinstance(alpha, number)
    if not known or not isinstance(n.meta.get("val"), torch.Tensor):
        return None
    both = [x.meta["val"] for x in (one, other) if isinstance(x, node)]
    forms = {(x.shape, x.dtype, x.device) for x in (n.meta["val"], *both)}
    if len(forms) > 1 or (len(both) == 1 and alpha != 1):
        return None
    of = "tensors" if len(both) == 2 else _frozen(other)
    return _name(n), of, _frozen(alpha), n.meta["val"].dtype, str(n.meta["val"].device)


def _key(n: FxNode) -> Hashable | None:
    """Equal for two nodes that compute the same; None if it must stay alone."""
    import torch

    if n.op not in ("call_function", "call_method") or isinstance(n.target, ProgramCall):
        return None
    name = _name(n)
    pure = isinstance(n.target, torch._ops.OpOverload) and not acts(n)
    if name not in _RESHAPES | _PERMUTES | _OTHERS and not (pure and not _differentiated(n)):
        return None
    return n.op, n.target, _frozen(n.args), _frozen(n.kwargs)


def _frozen(x: TorchOperand) -> Hashable:
    """Arguments as a key. The type is part of it: 1, 1.0 and True are equal, but not the same argument."""
    if isinstance(x, (list, tuple)):
        return tuple(map(_frozen, x))
    if isinstance(x, dict):
        return tuple(sorted((k, _frozen(v)) for k, v in x.items()))
    if isinstance(x, slice):
        return "slice", _frozen(x.start), _frozen(x.stop), _frozen(x.step)
    return type(x).__name__, x


def _differentiated(n: FxNode) -> bool:
    return any(x.requires_grad for x in _tensors(n.meta.get("val")))


def _tensors(val: TorchOperand) -> Iterator[Tensor]:
    import torch

    for x in val if isinstance(val, (list, tuple)) else [val]:
        if isinstance(x, torch.Tensor):
            yield x


def acts(n: FxNode) -> bool:
    """Whether running the node has an effect besides its result: it sends, or draws from PyTorch's generator."""
    import torch

    if isinstance(n.target, ProgramCall):
        return not isinstance(n.target.run, Drawn)
    if isinstance(n.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        schema = n.target._schema if isinstance(n.target, torch._ops.OpOverload) else None
        random = torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
        return "c10d" in str(n.target) or random or schema is None or schema.is_mutable
    return False


def _name(n: FxNode) -> str:
    """The name of a method, a function of PyTorch, or an op."""
    import torch

    if n.op == "call_method":
        return str(n.target)
    if isinstance(n.target, torch._ops.OpOverload):
        return n.target._schema.name.removeprefix("aten::") if n.target.namespace == "aten" else ""
    return "" if isinstance(n.target, ProgramCall) else str(getattr(n.target, "__name__", ""))


def _viewed(n: FxNode) -> FxNode | None:
    """The tensor that a node is a view of; None if the node is no view."""
    import torch

    if n.op not in ("call_function", "call_method") or _name(n) not in _RESHAPES | _PERMUTES | {"expand"}:
        return None
    base = n.args[0] if n.args else n.kwargs.get("self")
    known = isinstance(base, torch.fx.Node) and isinstance(base.meta.get("val"), torch.Tensor)
    return base if known and isinstance(n.meta.get("val"), torch.Tensor) else None


def _order(n: FxNode) -> tuple[int, ...] | None:
    """The order of dims that a permute gives; None if its arguments have another form."""
    rank, name = n.meta["val"].dim(), _name(n)
    rest = [*n.args[1:], *(v for k, v in n.kwargs.items() if k != "self")]
    if name == "t":
        return tuple(reversed(range(rank)))
    if name == "permute":
        dims = rest[0] if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else rest
        return tuple(int(d) % rank for d in dims)
    if len(rest) != 2 or not all(isinstance(d, int) for d in rest) or n.kwargs:
        return None
    order = list(range(rank))
    a, b = (d % rank for d in rest)
    order[a], order[b] = order[b], order[a]
    return tuple(order)
