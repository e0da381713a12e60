"""Recognizes exported graphs that are already functional.

They skip PyTorch's decomposition, which traces the graph a second time and takes half of the time to read a model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pase.errors import PaseError
from pase.frontends.torch.numbers import op_name
from pase.frontends.torch.types import FxNode

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.fx import GraphModule

__all__ = ["NO_GRADIENT", "inline_regions", "is_functional", "refuse_autocast", "unwatch"]

NO_GRADIENT = "pase_no_gradient"
"""Mark in ``meta["custom"]`` of the nodes that ran under ``torch.no_grad``."""

_READ_AS_THEY_ARE = frozenset(
    {
        *("chunk", "contiguous", "expand_as", "flatten", "narrow", "reshape", "to", "type_as", "unflatten"),
        "dropout",
    }
)
"""Composite ops that may return their operand itself or a view of it.

Decomposition turns them into a view, a copy or nothing. This makes no difference if nothing is written in place.
"""


def is_functional(graph_module: GraphModule, reads: Callable[[str], bool]) -> bool:
    """Whether no op writes in place and no op that has a rule would be decomposed.

    reads: tells whether an op has a rule. An op without one is decomposed separately. Regions under ``torch.no_grad``
    are checked too. Other regions are not functional: the casts of autocast, for example, appear only after
    decomposition.
    """
    return all(_is_plain(n, graph_module, reads) for n in graph_module.graph.nodes if n.op == "call_function")


def _is_plain(n: FxNode, graph_module: GraphModule, reads: Callable[[str], bool]) -> bool:
    import torch

    if n.target is operator.getitem:
        return True
    if n.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        region = getattr(graph_module, n.args[1].target)
        return all(m.op != "get_attr" for m in region.graph.nodes) and is_functional(region, reads)
    if not isinstance(n.target, torch._ops.OpOverload) or n.target._schema.is_mutable:
        return False
    name = op_name(n)
    return name in _READ_AS_THEY_ARE or not reads(name) or not _is_decomposed(n.target)


def _is_decomposed(op: OpOverload) -> bool:
    """Whether ``run_decompositions({})`` decomposes the op. It keeps composite ops that neither write nor alias."""
    import torch
    from torch._export.utils import _is_preservable_cia_op

    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return op.has_kernel_for_dispatch_key(key) and not _is_preservable_cia_op(op)


def refuse_autocast(what: str) -> None:
    """PaseError under ``torch.autocast``. what: says what is being done, as the start of a sentence.

    The graph of a step does not contain an autocast around the step, so a plan could not reproduce its dtypes.
    """
    import torch

    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        raise PaseError(
            f"{what} under torch.autocast, which the plan does not contain",
            fix="use autocast inside of the step, around the operations that it is for (in the module's forward, or in "
            "loss=lambda module, *batch: …)",
        )


def unwatch(n: FxNode) -> None:
    """Mark a node that has no gradient."""
    n.meta["custom"] = {**(n.meta.get("custom") or {}), NO_GRADIENT: 1}


def inline_regions(graph_module: GraphModule) -> None:
    """Inline the regions that switch gradients on or off. Nodes that run without gradients are marked."""
    import torch

    graph = graph_module.graph
    for n in list(graph.nodes):
        if n.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
            continue
        watched, inner, *given = n.args
        region = getattr(graph_module, inner.target)
        copies = dict(zip((m for m in region.graph.nodes if m.op == "placeholder"), given, strict=True))
        with graph.inserting_before(n):
            made: Any = graph.graph_copy(region.graph, copies)
        for m in region.graph.nodes:
            if not watched and m.op == "call_function":
                unwatch(copies[m])
        for reader in list(n.users):
            assert reader.target is operator.getitem, reader
            reader.replace_all_uses_with(made[reader.args[1]])
            graph.erase_node(reader)
        graph.erase_node(n)
