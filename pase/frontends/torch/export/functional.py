"""Recognizes exported graphs that are already functional, and inlines their ``torch.no_grad`` regions.

Such graphs skip PyTorch's decomposition, which traces the graph a second time and takes half of the time to read a
model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pase.errors import PaseError
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import op_name

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.fx import GraphModule

__all__ = [
    "NO_GRADIENT",
    "bodies_of",
    "inline_regions",
    "is_functional",
    "recorded_autocast",
    "refuse_autocast",
    "refuse_idle_autocast",
    "unwatch",
    "watch_views",
]

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
    """Whether no op writes in place and PyTorch's decomposition would keep every op that pase has a rule for.

    reads: tells whether pase has a rule for an op. Ops without a rule are not considered, because they are decomposed
    one by one when the graph is lowered. Neither are the ops in ``_READ_AS_THEY_ARE``. Regions under ``torch.no_grad``
    are checked too. Other regions are not
    functional: the casts of autocast, for example, appear only after decomposition.
    """
    return all(_is_plain(n, graph_module, reads) for n in graph_module.graph.nodes if n.op == "call_function")


def _is_plain(n: FxNode, graph_module: GraphModule, reads: Callable[[str], bool]) -> bool:
    """``is_functional`` for one node."""
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
    """Raise PaseError if ``torch.autocast`` is active. what: what the caller does, as the message's first words.

    The graph of a step does not contain an autocast around the step, so a plan could not reproduce its dtypes.
    """
    import torch

    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        raise PaseError(
            f"{what} under torch.autocast, which the plan does not contain",
            fix="use autocast inside of the step, around the operations that it is for (in the module's forward, or in "
            "loss=lambda module, *batch: …)",
        )


@contextmanager
def recorded_autocast() -> Iterator[None]:
    """Lets a traced step enter ``torch.autocast`` for GPUs where there is none, which PyTorch otherwise switches off
    with a warning."""
    import torch

    common, cuda = torch.cuda.amp.common, torch.cuda
    kept = common.amp_definitely_not_available, cuda.is_bf16_supported
    if not torch.cuda.is_available():
        common.amp_definitely_not_available = lambda: False
        cuda.is_bf16_supported = lambda *_, **__: True
    try:
        yield
    finally:
        common.amp_definitely_not_available, cuda.is_bf16_supported = kept


def refuse_idle_autocast(graph_module: GraphModule, name: str) -> None:
    """Raise PaseError if an autocast is for another device than the tensors that it is around, so that it casts
    nothing. On its own device it would, and the plan would be of another step. name: the module's."""
    import torch

    region = torch.ops.higher_order.wrap_with_autocast
    for n in graph_module.graph.nodes:
        if n.op != "call_function" or not str(n.target).startswith("wrap_with"):
            continue
        inner = next(a for a in n.args if getattr(a, "op", "") == "get_attr").target
        body = getattr(graph_module, inner)
        refuse_idle_autocast(body, name)
        made = (m.meta.get("val") for m in body.graph.nodes)
        there = {t.device.type for t in made if isinstance(t, torch.Tensor)} - {"meta"}
        if n.target is region and n.args[2] and there and n.args[0] not in there:
            (here,) = sorted(there)[:1]
            raise PaseError(
                f"its torch.autocast is for '{n.args[0]}' and casts nothing of the step, whose tensors are on '{here}' "
                "where it is planned",
                where=name,
                fix="write torch.autocast(x.device.type, ...), or move the module and the batch to that device first",
            )


def unwatch(n: FxNode) -> None:
    """Mark a node as one that runs without gradients (``NO_GRADIENT``)."""
    n.meta["custom"] = {**(n.meta.get("custom") or {}), NO_GRADIENT: 1}


def bodies_of(n: FxNode) -> list[GraphModule]:
    """The bodies of a higher-order op (``cond``, ``scan``). Regions, such as ``torch.no_grad``, are none."""
    import torch

    if str(n.target).startswith("wrap_with"):
        return []
    held = (m for m in n.all_input_nodes if m.op == "get_attr")
    found = (getattr(m.graph.owning_module, m.target, None) for m in held)
    return [body for body in found if isinstance(body, torch.fx.GraphModule)]


def watch_views(graph_module: GraphModule) -> None:
    """Remove ``unwatch``'s mark from the views that decomposition makes anew because their memory was written.

    PyTorch marks such a view like the last write through it. In a step that PyTorch runs, the view itself was made with
    gradients, or nothing with gradients reads it.
    """
    for n in graph_module.graph.nodes:
        if n.meta.get("is_functional_regenerated") and NO_GRADIENT in (n.meta.get("custom") or {}):
            n.meta["custom"] = {k: v for k, v in n.meta["custom"].items() if k != NO_GRADIENT}
        for body in bodies_of(n):
            watch_views(body)


def inline_regions(graph_module: GraphModule) -> None:
    """Inline the regions that switch gradients on or off. Nodes that run without gradients are marked."""
    import torch

    graph = graph_module.graph
    for n in list(graph.nodes):
        if n.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
            continue
        grad_enabled, region_attr, *operands = n.args
        region = getattr(graph_module, region_attr.target)
        copies = dict(zip((m for m in region.graph.nodes if m.op == "placeholder"), operands, strict=True))
        with graph.inserting_before(n):
            results: Any = graph.graph_copy(region.graph, copies)
        for m in region.graph.nodes:
            if not grad_enabled and m.op == "call_function":
                unwatch(copies[m])
        for user in list(n.users):
            assert user.target is operator.getitem, user
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(n)
