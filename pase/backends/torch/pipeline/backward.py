"""The two parts of a stage's backward: gradients of the stage's inputs, and gradients of its weights.

Other stages wait only for the first part. PyTorch's pipeline schedules divide the autograd graph in the same way, and
their code is used here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["entered_first"]


def entered_first(
    outs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    entered: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> Callable[[], object]:
    """Add the gradients of the stage's inputs (``entered``) to their ``grad``. Returns a function that adds the
    gradients of the weights, which are leaves of autograd.

    If PyTorch's division would miss a weight or visit one twice, all gradients are computed now.
    """
    import torch

    inputs = [x for x in entered if x.requires_grad]
    if not inputs or not _divides(outs, inputs, weights):
        torch.autograd.backward(outs, gradients)
        return lambda: None
    from torch.distributed.pipelining import _backward as halves

    own = [
        x.clone() if x._is_view() or x.is_leaf else x for x in outs
    ]  # PyTorch's code detaches them in place
    _, left = halves.stage_backward_input(own, list(gradients), inputs, iter(weights))  # type: ignore[arg-type]
    return partial(halves.stage_backward_weight, iter(weights), left)  # type: ignore[arg-type]


def _divides(outs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
    """Whether every weight that the results depend on is in exactly one of PyTorch's groups."""
    from torch.distributed.pipelining import _backward as halves

    node = halves._get_grad_fn_or_grad_acc
    behind = halves.construct_reverse_graph([n for x in outs if (n := node(x)) is not None])
    own = [n for w in weights if (n := node(w)) is not None]
    wanted = {n for n in own if n in behind}
    groups = halves.get_param_groups([n for x in inputs if (n := node(x)) is not None], own, behind)
    found = [n for g in groups for n in g["params"]]
    return len(found) == len(set(found)) and set(found) == wanted
