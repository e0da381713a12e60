"""Computes once, when a program is recorded, what each step would compute from the program alone: positions, which of
them are another rank's, and the number of a label that does not count.

Only whole numbers and flags, because they are the same on every device, and only rows of them (at most one dim is
longer than 1), because the program keeps them from step to step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pase.backends.torch.spmd.record import ProgramCall
from pase.backends.torch.spmd.tidy import acts

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Graph
    from torch.fx import Node as FxNode

    from pase.frontends.torch.values import TorchOperand

__all__ = ["folded"]

_LIKE = frozenset({"new_full", "new_zeros", "new_ones"})
"""Methods that read only the dtype of their tensor."""


def folded(graph: Graph, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fold constants of a graph in place. The values of its nodes (``meta["val"]``) must be known.

    held: name -> tensors that are part of the program. Returns these and the new ones, on the CPU where they are made.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    known: dict[FxNode, Tensor] = {}
    out = dict(held)
    with _disable_current_modes():
        for n in graph.nodes:
            if n.op == "get_attr" and _is_row(n.meta.get("val")):
                known[n] = held[str(n.target)].cpu()
            elif _is_row(n.meta.get("val")) and _can_fold(n, known):
                known[n] = _computed(n, known)
    first = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    for n, value in known.items():
        if n.op == "get_attr" or all(u in known for u in n.users):
            continue
        name = f"constant_{len(out)}"
        out[name] = value
        with graph.inserting_before(first):
            made = graph.get_attr(name)
        made.meta |= n.meta
        n.replace_all_uses_with(made)
    for n in reversed(known):
        if not n.users and n.op != "get_attr":
            graph.erase_node(n)
    return out


def _is_row(val: TorchOperand) -> bool:
    import torch

    if not isinstance(val, torch.Tensor) or val.is_floating_point() or val.is_complex():
        return False
    return sum(size > 1 for size in val.shape) <= 1


def _can_fold(n: FxNode, known: Mapping[FxNode, Tensor]) -> bool:
    if n.op == "call_method" and n.target in _LIKE:
        return len(n.all_input_nodes) == 1
    pure = n.op == "call_method" or (n.op == "call_function" and not isinstance(n.target, ProgramCall))
    return pure and not acts(n) and all(m in known for m in n.all_input_nodes)


def _computed(n: FxNode, known: Mapping[FxNode, Tensor]) -> Tensor:
    """The value of a node, computed on the CPU."""
    import torch
    from torch.fx.node import map_arg

    like = n.op == "call_method" and n.target in _LIKE

    def of(m: FxNode) -> Tensor:
        return torch.empty(0, dtype=m.meta["val"].dtype) if like else known[m]

    args, kwargs = map_arg((n.args, dict(n.kwargs)), of)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    made: Tensor = (
        getattr(args[0], n.target)(*args[1:], **kwargs)
        if n.op == "call_method"
        else n.target(*args, **kwargs)
    )
    return made
