"""Batch normalization whose batch is split over ranks, as one op with the plan's sums of statistics and gradients.

Op by op, the sums over ranks would lie between ops, and autograd would keep the centred and the normalized input. Here
the ranks sum what the plan's ops sum, the two sums of backward in one message, and PyTorch's own op normalizes by the
sums. It keeps its input only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from pase.backends.torch.spmd.pairs import OpPair
from pase.backends.torch.spmd.process_groups import AxisGroups
from pase.backends.torch.spmd.record import whole
from pase.backends.torch.spmd.values import OpContext

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.autograd import Function as TorchFunction

__all__ = ["NormOps", "RunningUpdate", "SplitNorm"]

_NORM = ("reduce_sum", "div", "sub", "square", "reduce_sum", "div", "add", "rsqrt", "mul")


@dataclass(frozen=True, kw_only=True)
class RunningUpdate:
    """The ops that update a running statistic: ``kept`` times the present one, plus ``new`` times the batch's.

    fading, added: the product with ``kept``, and the sum.
    batch: the tensor that is the batch's statistic.
    """

    fading: OpPair
    added: OpPair
    batch: str
    kept: float
    new: float

    @classmethod
    def every(
        cls, rest: Sequence[OpPair], statistics: Sequence[str]
    ) -> list[tuple[RunningUpdate, list[OpPair]]]:
        """Each update among these ops, with its ops."""
        found = []
        products = {p.makes: (p, n) for p in rest if (n := _scaled_by(p)) is not None}
        for p in rest:
            read = [products.get(t) for t in p.reads]
            if p.op.function.name != "add" or len(read) != 2 or None in read:
                continue
            (fading, kept), (own, new) = (x for x in read if x is not None)
            batch, *_ = own.reads
            if batch in statistics and all(o.transfer is None for q in (own, p) for o in q.local.operands):
                made = cls(fading=fading, added=p, batch=batch, kept=kept, new=new)
                found.append((made, [fading, own, p]))
        return found

    def __call__(self, present: Tensor, batch: Tensor) -> Tensor:
        """The next value of the statistic, [channels]."""
        import torch

        return torch.add(torch.mul(present, self.kept), batch, alpha=self.new)


@dataclass(frozen=True, kw_only=True)
class NormOps:
    """The ops of a node that normalizes by the statistics of a batch.

    own: the ops from the first sum to the normalized input.
    scale, shift: multiply by the weight and add the bias; None if the norm has none.
    updates: the updates of running statistics.
    rest: the other ops of the node.
    axes: the mesh axes over which the statistics are summed.
    differentiated: whether their gradients are summed, too. They have none if the input has none.
    """

    own: Sequence[OpPair]
    scale: OpPair | None
    shift: OpPair | None
    updates: Sequence[RunningUpdate]
    rest: Sequence[OpPair]
    axes: tuple[str, ...]
    differentiated: bool

    @classmethod
    def of(cls, work: Sequence[OpPair]) -> NormOps | None:
        """These ops of a node's work, in traced order. None if it is no such norm, or nothing is summed."""
        own, rest = work[: len(_NORM)], list(work[len(_NORM) :])
        if tuple(p.op.function.name for p in own) != _NORM:
            return None
        total, mean, centred, squares, summed, variance, shifted, inverse, normal = (p.makes for p in own)
        x = own[0].reads[0]
        reads = [(x,), (total,), (x, mean), (centred,), (squares,), (summed,), (variance,), (shifted,)]
        if [p.reads for p in own] != [*reads, (centred, inverse)]:
            return None
        scale = next((p for p in rest if p.op.function.name == "mul" and normal in p.reads), None)
        shift = None if scale is None else next((p for p in rest if scale.makes in p.reads), None)
        affine = [p for p in (scale, shift) if p is not None]
        axes = own[0].local.results[0].summed
        back = {p.local.operands[1].summed for p in (own[2], own[8])}
        first, again = own[0].local.operands[0], own[2].local.operands[0]
        inner = [o for p in own[1:] for o in p.local.operands if o is not again]
        inner += [o for p in affine for o in p.local.operands[:1]]
        if (
            not axes
            or own[4].local.results[0].summed != axes
            or back not in ({axes}, {()})
            or (first.transfer, first.layout, first.summed) != (again.transfer, again.layout, ())
            or any(o.transfer is not None or o.constant for o in inner)
            or any("partial" in r.layout for p in (*own, *affine) for r in p.local.results)
            or any(p.op.function.name != "add" or len(p.reads) != 2 for p in affine[1:])
            or any(len(p.reads) != 2 or p.local.operands[1].constant for p in affine)
        ):
            return None
        updates = RunningUpdate.every([p for p in rest if p not in affine], (mean, variance))
        done = [*affine, *(p for _, ops in updates for p in ops)]
        return cls(
            own=own,
            scale=scale,
            shift=shift,
            updates=[u for u, _ in updates],
            rest=[p for p in rest if p not in done],
            axes=axes,
            differentiated=back == {axes},
        )

    @property
    def last(self) -> OpPair:
        """The op that makes the result."""
        return self.shift or self.scale or self.own[-1]

    @property
    def inside(self) -> set[str]:
        """The tensors that nothing else may read, because they are not made, or have no gradient."""
        affine = [] if self.scale is None else [self.scale]
        between = {t for u in self.updates for t in u.added.reads}
        return between | {p.makes for p in (*self.own, *affine)} - {self.last.makes}


def _scaled_by(pair: OpPair) -> float | None:
    """The number that an op multiplies a tensor by; None if it is another op."""
    numbers = [n for n in pair.op.numbers or () if isinstance(n, (int, float))]
    one = pair.op.function.name == "mul" and len(pair.reads) == len(numbers) == 1
    return float(numbers[0]) if one else None


@cache
def _function() -> type[TorchFunction]:
    """The autograd function of ``SplitNorm``."""
    import torch

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: OpContext[SplitNorm], norm: SplitNorm, x: Tensor, weight: Tensor, bias: Tensor | None
        ) -> tuple[Tensor, Tensor, Tensor]:
            mean, variance = norm.statistics(x)
            wide = weight.to(mean.dtype), None if bias is None else bias.to(mean.dtype)
            made: Tensor = torch.native_batch_norm(x, *wide, mean, variance, False, 0.0, norm.eps)[0]
            ctx.besides = norm
            ctx.save_for_backward(x, weight, mean, variance)
            ctx.mark_non_differentiable(mean, variance)
            ctx.set_materialize_grads(False)  # the statistics would get gradients of zeros
            return made, mean, variance

        @staticmethod
        def backward(
            ctx: OpContext[SplitNorm], gradient: Tensor | None, *_: None
        ) -> tuple[Tensor | None, ...]:
            if gradient is None:
                return None, None, None, None
            x, given, mean, variance = ctx.saved_tensors
            weight = given.to(mean.dtype)
            _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
                gradient, x, weight, mean, variance, None, None, False, ctx.besides.eps, [False, True, True]
            )
            own = None
            if ctx.needs_input_grad[1]:
                own = ctx.besides.of_input(gradient, of_weight, of_bias, (x, weight, mean, variance))
            of_weight, of_bias = (g.to(given.dtype) for g in (of_weight, of_bias))
            return None, own, of_weight, of_bias if ctx.needs_input_grad[3] else None

    return Norm


@dataclass(frozen=True, kw_only=True)
class SplitNorm:
    """Batch normalization on one rank, whose part of the batch is [examples, channels, ...].

    axes: the mesh axes over which statistics are summed.
    count: the number of elements of a channel on all ranks together.
    """

    groups: AxisGroups
    axes: tuple[str, ...]
    count: float
    eps: float

    def __call__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(the result, the whole batch's mean [channels], its variance [channels]). The last two have no gradient."""
        if weight is None:
            weight = x.new_ones(x.shape[1], dtype=self.wide(x))
        made: tuple[Tensor, Tensor, Tensor] = whole(
            partial(_function().apply, self), x, weight, bias, name="batch_norm"
        )
        return made

    @staticmethod
    def wide(x: Tensor) -> torch.dtype:
        """The dtype in which statistics are added up."""
        import torch

        return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(mean, variance) of the whole batch, [channels] each."""
        import torch

        own = x.numel() // x.shape[1]
        share = own / self.count
        # The correction makes the sum of squares be divided by the count of all ranks.
        among = [i for i in range(x.dim()) if i != 1]
        variance, mean = torch.var_mean(x.to(self.wide(x)), among, correction=own - self.count)
        all_mean = self.groups.all_reduce(torch.mul(mean, share), self.axes)
        off = mean - all_mean
        return all_mean, self.groups.all_reduce(torch.addcmul(variance, off, off, value=share), self.axes)

    def of_input(
        self, gradient: Tensor, of_weight: Tensor, of_bias: Tensor, residuals: Sequence[Tensor]
    ) -> Tensor:
        """The input's gradient, from that of the result.

        of_weight, of_bias: sums over this rank's part of the result's gradient, times the normalized input or alone.
        Both are summed over the ranks in one message. Their means are the part of the result's gradient that statistics
        take away (Ioffe and Szegedy, 2015): a batch norm of the input with them as weight and bias.
        """
        import torch

        x, weight, mean, variance = residuals
        scale, shift = self.groups.all_reduce_joined([of_weight, of_bias], self.axes)
        taken = torch.native_batch_norm(x, scale, shift, mean, variance, False, 0.0, self.eps)[0]
        left = torch.sub(gradient, taken, alpha=1 / self.count)
        del taken
        made: Tensor = torch.ops.aten.native_batch_norm_backward(
            left, x, weight, mean, variance, None, None, False, self.eps, [True, False, False]
        )[0]
        return made
