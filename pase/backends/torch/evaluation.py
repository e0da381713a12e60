"""Evaluates a sharded module by its own forward, with whole parameters for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pase.errors import PaseError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor
    from torch.nn import Module

__all__ = ["evaluated"]


@contextlib.contextmanager
def evaluated(module: Module, name: str) -> Iterator[Module]:
    """The module in evaluation mode, without gradients, with whole parameters and buffers on every rank.

    Every rank must enter it, because each DTensor is gathered. Afterwards the module has its DTensors and its modes
    again.

    name: of the model, for errors. Raises PaseError at the end if a parameter or a buffer was written: only a tensor
    that is whole on every rank has the new value then.
    """
    import torch
    from torch.distributed.tensor import DTensor

    modes = [(m, m.training) for m in module.modules()]
    sharded: list[tuple[dict[str, Tensor | None], str, DTensor]] = []
    whole: dict[int, tuple[str, Tensor, int]] = {}
    try:
        for path, m in module.named_modules():
            for held in (m._parameters, m._buffers):
                for key, x in held.items():
                    if not isinstance(x, DTensor):
                        continue
                    if id(x) not in whole:
                        made = _gathered(x)
                        whole[id(x)] = f"{path}.{key}".lstrip("."), made, made._version
                    sharded.append((held, key, x))
        for held, key, x in sharded:
            held[key] = whole[id(x)][1]
        module.eval()
        with torch.no_grad():
            yield module
        written = [whole[id(x)][0] for held, key, x in sharded if held[key] is not whole[id(x)][1]]
        written += [path for path, x, before in whole.values() if x._version != before]
        if written:
            raise PaseError(
                f"it wrote '{written[0]}', and not every rank's part may have the new value",
                where=f"the evaluation of '{name}'",
                fix="leave parameters and buffers as they are in evaluation mode",
            )
    finally:
        for held, key, x in sharded:
            held[key] = x
        for m, mode in modes:
            m.training = mode


def _gathered(x: DTensor) -> Tensor:
    """The whole tensor, as a parameter if it is one."""
    import torch
    from torch import nn

    with torch.no_grad():
        made = x.full_tensor().detach()
    return nn.Parameter(made, requires_grad=False) if isinstance(x, nn.Parameter) else made
