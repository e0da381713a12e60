"""Gathered parameters that autograd does not keep: backward gathers them again.

A pipeline's stage has several micro-batches between their forward and their backward. If each of them kept the gathered
parameters that its backward reads, a rank would hold as many copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pase.ir import Access, Op
from pase.ir.functions import MUL
from pase.local.types import LocalOp, LocalProgram

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["GatheredAgain", "only_a_factor", "read_again"]


def read_again(program: LocalProgram, number: int, inside: Callable[[LocalOp], bool]) -> bool:
    """Whether backward needs what a transfer brings, outside of recomputed blocks (``pase.ir.recompute``).

    inside: whether an op is in the stage.
    """
    reads = _reads(program, number, inside)
    return any(a.recompute and op.region is None for op, accesses in reads for a in accesses)


def only_a_factor(program: LocalProgram, number: int, inside: Callable[[LocalOp], bool]) -> bool:
    """Whether what a transfer brings is only multiplied with something else, so that its gradient does not depend on
    it."""
    reads = _reads(program, number, inside)
    return all((op.kind in ("matmul", "conv") or op.function is MUL) and len(of) == 1 for op, of in reads)


def _reads(
    program: LocalProgram, number: int, inside: Callable[[LocalOp], bool]
) -> Iterator[tuple[Op, list[Access]]]:
    """The ops that read what a transfer brings, each with its reads of it."""
    tensor = program.original(program.transfers[number].tensor)
    for op in filter(inside, program.users(number)):
        both = zip(op.op.reads, op.operands, strict=True)
        yield op.op, [a for a, o in both if program.original(o.tensor) == tensor]


@dataclass(kw_only=True)
class GatheredAgain:
    """The gathered parameters of one micro-batch in a stage.

    gathers: each gather of the forward, in order. made: their results in the action that runs now, by number.
    """

    gathers: list[_Gather] = field(default_factory=list)
    made: dict[int, Tensor] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)
    """Address of a gathered tensor's storage -> number, during forward."""
    _of_weights: bool = False

    def add(self, made: Tensor, value: Tensor, there: Callable[[Tensor], Tensor], *, factor: bool) -> None:
        """Forward has gathered a parameter: ``made`` is ``there(value)``.

        factor: whether it is only multiplied with something, so that its gradient does not depend on it.
        """
        number = len(self.gathers)
        self.gathers.append(_Gather(value=self._packed(value.detach()), there=there, factor=factor))
        # It lives until forward ends, so that no other storage gets its address.
        self.made[number] = made.detach()
        self._numbers[made.untyped_storage()._cdata] = number

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """While a forward runs: autograd saves no gathered parameter."""
        import torch

        with torch.autograd.graph.saved_tensors_hooks(self._packed, self._unpacked):
            yield
        self._numbers.clear()
        self.made.clear()

    @contextlib.contextmanager
    def backward(self, *, of_weights: bool = False) -> Iterator[None]:
        """While a backward, or a part of it, runs: each parameter is gathered at most once.

        of_weights: whether it computes only gradients of weights.
        """
        self._of_weights = of_weights
        yield
        self.made.clear()

    def _packed(self, x: Tensor) -> Tensor | _GatheredView:
        number = self._numbers.get(x.untyped_storage()._cdata)
        if number is None:
            return x
        return _GatheredView(self, number, x.size(), x.stride(), x.storage_offset(), x.dtype, x.device)

    def _unpacked(self, x: Tensor | _GatheredView) -> Tensor:
        import torch

        if not isinstance(x, _GatheredView):
            return x
        if self._of_weights and self.gathers[x.number].factor:
            # PyTorch asks for all that the op saved, but reads the shape alone. Anything else would become NaN.
            return torch.full((), torch.nan, dtype=x.dtype, device=x.device).expand(x.size)
        if x.number not in self.made:
            gather = self.gathers[x.number]
            with torch.no_grad():
                self.made[x.number] = gather.there(self._unpacked(gather.value))
        return self.made[x.number].as_strided(x.size, x.stride, x.offset)


@dataclass(frozen=True)
class _GatheredView:
    """A view of a gathered parameter, which autograd saves instead of the tensor."""

    of: GatheredAgain
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class _Gather:
    """A gather of a parameter. value: what it begins with. factor: as in ``GatheredAgain.add``."""

    value: Tensor | _GatheredView
    there: Callable[[Tensor], Tensor]
    factor: bool
