"""An optimizer's update on this rank's parts of its parameters.

PyTorch runs each op of an update on DTensors in Python, and never joins those of many parameters in one kernel, because
DTensors are not plain tensors. An optimizer that computes each element from that element alone does the same on this
rank's parts. They are put in the place of the parameters while it runs; before and after, it has the DTensors, so
checkpoints see them.

On a GPU, PyTorch by default joins all parameters of a group, and makes temporary arrays of all of them. Here it joins
as many as are no larger than the largest, so that the update needs no more memory than parameter by parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from pase.backends.torch.gradients import distributed_like

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor
    from torch.optim import Optimizer

__all__ = ["on_local_parts"]

_ELEMENTWISE = [
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]
_NUMBERS = frozenset(("step", "eta", "mu", "mu_product"))
"""States of these optimizers that are one number for a parameter."""


@cache
def _elementwise() -> frozenset[type[Optimizer]]:
    """The optimizers that compute each element from that element alone. A subclass may do something else."""
    from torch import optim

    return frozenset(getattr(optim, name) for name in _ELEMENTWISE)


@contextlib.contextmanager
def on_local_parts(optimizer: Optimizer) -> Iterator[None]:
    """Let the optimizer update this rank's parts inside. Nothing changes for an optimizer that may need more, or that
    has hooks, which see its parameters."""
    from torch.distributed.tensor import DTensor

    stored = list[DTensor]()
    if type(optimizer) in _elementwise() and not _has_hooks(optimizer):
        stored = [p for g in optimizer.param_groups for p in g["params"] if isinstance(p, DTensor)]
    given = {p: g for p in stored if (g := p.grad) is not None}
    gradients = {p: g for p, g in given.items() if isinstance(g, DTensor) and g.placements == p.placements}
    if not stored or len(gradients) < len(given):
        yield
        return
    part = {p: p._local_tensor for p in stored}
    groups = optimizer.param_groups
    before = {p: optimizer.state.pop(p) for p in stored if p in optimizer.state}
    for p, x in part.items():
        x.grad = gradients[p]._local_tensor if p in gradients else None
        if p in before:
            optimizer.state[x] = {k: getattr(v, "_local_tensor", v) for k, v in before[p].items()}
    local = [{**g, "params": [part.get(p, p) for p in g["params"]]} for g in groups]
    optimizer.param_groups = [{**g, "params": some} for g in local for some in _joined(g)]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for p, x in part.items():
            x.grad = None
            if x in optimizer.state:
                optimizer.state[p] = _distributed(p, optimizer.state.pop(x), before.get(p, {}))


def _has_hooks(optimizer: Optimizer) -> bool:
    from torch.optim import optimizer as every

    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or every._global_optimizer_pre_hooks
        or every._global_optimizer_post_hooks
    )


def _joined(group: Mapping[str, Any]) -> Iterator[Sequence[Tensor]]:
    """The parameters of a group that are updated together: all, if the user says how. Otherwise as many as have no more
    bytes than the largest."""
    if group.get("foreach") is not None or group.get("fused"):
        yield group["params"]
        return
    params: list[Tensor] = sorted(group["params"], key=lambda p: p.nbytes)  # the small ones are many
    together: list[Tensor] = []
    nbytes = 0
    for p in params:
        if nbytes + p.nbytes > params[-1].nbytes:
            yield together
            together, nbytes = [], 0
        together.append(p)
        nbytes += p.nbytes
    yield together


def _distributed(
    p: DTensor, state: Mapping[str, Tensor | None], before: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """The optimizer's state of a parameter, from that of this rank's part. before: that before the update."""
    out: dict[str, Tensor | None] = {}
    for k, v in state.items():
        had = before.get(k)
        same = had is not None and getattr(had, "_local_tensor", had) is v
        out[k] = had if same else v if v is None or k in _NUMBERS else distributed_like(p, v)
    return out
