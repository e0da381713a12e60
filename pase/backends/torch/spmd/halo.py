"""Convolutions and pools on one rank: a halo exchange along split dims, then the window over the local rows.

The exchange and the way back of its gradients are one ``autograd.Function``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pase.backends.torch.spmd.nests import with_neighbours
from pase.backends.torch.spmd.rules import RANK_RULES, RankCall
from pase.backends.torch.spmd.values import NotOnParts
from pase.local.halo import borders_of
from pase.local.parts import held

if TYPE_CHECKING:
    from torch import Tensor

__all__: list[str] = []

_POOLS = (
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_pool2d_with_indices",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
)
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution")


@RANK_RULES.register(*_CONVOLUTIONS)
def _convolution(call: RankCall) -> Tensor:
    """The batch, channels, groups and spatial dims may be split, and the elements of the filter."""
    x, w = call.given["input"], call.given["weight"]
    n, groups = w.dim() - 2, call.given.get("groups", 1)
    whole = _whole_filter(call, n)
    if call.given.get("transposed"):
        return _unsplit(call, "input", whole)
    changes = {"weight": whole} | ({} if groups == 1 else {"groups": x.shape[-w.dim() + 1] // w.shape[1]})
    if not call.split("input") & set(range(x.dim() - n, x.dim())):
        return call.run(**changes)
    x, left = _with_neighbours(call, "input", _each(call.given["padding"], n), None)
    return call.run(input=x, padding=left, **changes)


def _whole_filter(call: RankCall, n: int) -> Tensor:
    """The filter, with zeros for what other ranks have of its last n dims: the first element places the window."""
    import torch

    w, (shape, layout), groups = call.given["weight"], call.layouts["weight"], call.groups
    for d in call.split("weight") & set(range(w.dim() - n, w.dim())):
        own = torch.tensor(held(shape, layout, groups.place, groups.mesh)[d].tolist(), device=w.device)
        w = w.new_zeros((*w.shape[:d], shape[d], *w.shape[d + 1 :])).index_copy(d, own, w)
    return w


@RANK_RULES.register("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed(call: RankCall) -> Tensor:
    return _unsplit(call, "input", _whole_filter(call, call.given["weight"].dim() - 2))


@RANK_RULES.register(
    *(f"adaptive_{kind}_pool{n}d" for kind in ("avg", "max") for n in (1, 2, 3)),
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
)
def _adaptive_pool(call: RankCall) -> Tensor | tuple[Tensor, ...]:
    """Where windows do not overlap, a rank has whole ones, and makes as many elements as it has windows."""
    x, (whole, _), n = (
        call.given["self"],
        call.layouts["self"],
        int(str(call.target).partition("_pool")[2][0]),
    )
    sizes = list(call.whole[0].shape[-n:])
    for k, d in enumerate(range(x.dim() - n, x.dim())):
        if d not in call.split() or sizes[k] == 1:
            continue
        if whole[d] % sizes[k]:
            raise NotOnParts("its windows overlap, and a dim along which they move is split")
        sizes[k] = sizes[k] * x.shape[d] // whole[d]
    return call.run(output_size=sizes)


@RANK_RULES.register(*_POOLS)
def _pool(call: RankCall) -> Tensor:
    n, largest = int(str(call.target).partition("_pool")[2][0]), "max_pool" in str(call.target)
    x = call.given["self"]
    if not call.split("self") & set(range(x.dim() - n, x.dim())):
        return call.run()
    padding = _each(call.given.get("padding", 0), n)
    if call.given.get("ceil_mode") or (any(padding) and not call.given.get("count_include_pad", True)):
        raise NotOnParts(
            "its windows at the borders differ from the others, and a dim along which they move is split"
        )
    x, left = _with_neighbours(call, "self", padding, float("-inf") if largest else None)
    return call.run(self=x, padding=left)


def _unsplit(call: RankCall, name: str, weight: Tensor) -> Tensor:
    if any(o.halo for op in call.ops for o in op.operands):
        raise NotOnParts("it is transposed, and a dim along which its window moves is split")
    return call.run(weight=weight)


def _each(given: int | Sequence[int], n: int) -> list[int]:
    found = [given] if isinstance(given, int) else list(given)
    return found * n if len(found) == 1 else found


def _with_neighbours(
    call: RankCall, name: str, padding: Sequence[int], edge: float | None
) -> tuple[Tensor, list[int]]:
    """(the operand with the halo rows that its windows read, the padding that is still to be applied).

    edge: the value past the ends; None for zeros.
    """
    x, layout = call.given[name], call.layouts[name][1]
    op = next(o.op for o in call.ops if o.op.kind in ("conv", "window"))
    borders = borders_of(op, sorted(call.split(name)), x.dim())
    left = [0 if x.dim() - len(padding) + k in borders else n for k, n in enumerate(padding)]
    return with_neighbours(x, borders, layout, edge, call.groups), left
