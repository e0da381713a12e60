"""The messages of a local program in PyTorch: one all-reduce for the sums of gradients that a bucket plan joins.

The parameters of a message pass through one ``autograd.Function``. Its backward runs when the gradients of all of them
are ready, so PyTorch's order of backward decides when a message is sent.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

from pase.backends.torch.spmd.process_groups import AxisGroups
from pase.backends.torch.spmd.record import whole
from pase.backends.torch.spmd.values import RankValue
from pase.local.types import LocalMessage, LocalProgram, local_shape

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd import Function as TorchFunction

__all__ = ["joined_sums", "joined_values"]


def joined_sums(program: LocalProgram) -> tuple[tuple[int, ...], ...]:
    """For each message, the transfers whose sums are joined: whole gradients of parameters that are read as stored.

    Warns about messages with no such transfers, because their contents are sent one by one.
    """
    found, alone = [], 0
    for m in program.messages:
        alike: dict[tuple[tuple[str, ...], int], list[int]] = {}
        for number, key in _sums(program, m).items():
            alike.setdefault(key, []).append(number)
        found += [tuple(numbers) for numbers in alike.values() if len(numbers) > 1]
        alone += not alike
    if alone:
        warnings.warn(
            f"{alone} of {len(program.messages)} messages of the bucket plan of '{program.name}' do not join whole "
            f"sums of gradients (they gather, scatter, or cut tensors): PyTorch sends their contents one by one",
            stacklevel=2,
        )
    return tuple(found)


def _sums(program: LocalProgram, message: LocalMessage) -> Mapping[int, tuple[tuple[str, ...], int]]:
    """Transfer -> (axes over which its gradient is summed, bytes per element), for the transfers that can be joined."""
    out: dict[int, tuple[tuple[str, ...], int]] = {}
    for p in message.chunks if message.way == "back" else ():
        t = program.transfers[p.transfer]
        back = program.reshard_steps(p.transfer, "back")
        whole = len(back) == 1 and back[0].kind == "all_reduce" and (p.begin, p.nbytes) == (0, back[0].nbytes)
        stored = t.tensor not in program.originals and program.maker[t.tensor].op.kind == "parameter"
        if whole and stored and not t.forward:
            r = program.result(t.tensor)
            here = math.prod(local_shape(r.shape, r.layout, program.mesh))
            out[p.transfer] = back[0].axes, back[0].nbytes // here
    return out


def joined_values(
    numbers: Sequence[int], program: LocalProgram, values: Mapping[str, RankValue], groups: AxisGroups
) -> dict[int, Tensor]:
    """Transfer -> the tensor that its reader gets, for the transfers of a message. One all-reduce per dtype sums the
    gradients. A parameter with a gradient carrier is left out."""
    by_dtype: dict[object, list[int]] = {}
    for n in numbers:
        v = values[program.transfers[n].tensor]
        if v.gradient_carrier is None and v.array.requires_grad:
            by_dtype.setdefault(v.array.dtype, []).append(n)
    out: dict[int, Tensor] = {}
    for same in by_dtype.values():
        axes = program.reshard_steps(same[0], "back")[0].axes
        arrays = [values[program.transfers[n].tensor].array for n in same]
        read = whole(partial(_joined().apply, groups, axes), *arrays, name="joined_gradients")
        out |= zip(same, read, strict=True)
    return out


@cache
def _joined() -> type[TorchFunction]:
    """The autograd class of a message. It is created on first use, because it needs PyTorch."""
    import torch

    class Joined(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: SimpleNamespace, groups: AxisGroups, axes: Sequence[str], *xs: Tensor
        ) -> tuple[Tensor, ...]:
            ctx.groups, ctx.axes = groups, axes
            return tuple(x.view_as(x) for x in xs)

        @staticmethod
        def backward(ctx: SimpleNamespace, *gs: Tensor) -> tuple[Tensor | None, ...]:
            wire = ctx.groups.all_reduce(torch.cat([g.reshape(-1) for g in gs]), ctx.axes)
            parts = wire.split([g.numel() for g in gs])
            return None, None, *(p.reshape(g.shape) for p, g in zip(parts, gs, strict=True))

    return Joined
