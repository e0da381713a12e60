"""Look-ups in a dim that is split over ranks, as one op each: rows, elements, and the log-probability of a label.

A rank looks up its own elements and has zeros for the others; the edge to the reader sums over the ranks. Op by op,
autograd would keep each step, and backward would make an array of the operand's size for each reader of the logits.
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
    from torch import Tensor
    from torch.autograd import Function as TorchFunction

__all__ = ["PickOps", "SplitLabel", "attained", "elements", "rows"]

_PICK = ("reduce_max", "stop_gradient", "sub", "exp", "reduce_sum", "log", "sub", "gather")


@dataclass(frozen=True, kw_only=True)
class PickOps:
    """The ops of a node that takes the log-softmax of scores over the last dim at a label.

    own: the ops from the maximum to the look-up, without views. labels: the views of the labels before them.
    rest: the other ops of the node.
    axes: the mesh axes over which the last dim is split; there may be none.
    differentiated: whether the gradient is summed over them, too. There is none if the scores have none.
    """

    own: Sequence[OpPair]
    labels: Sequence[OpPair]
    rest: Sequence[OpPair]
    axes: tuple[str, ...]
    differentiated: bool

    @classmethod
    def of(cls, work: Sequence[OpPair]) -> PickOps | None:
        """These ops of a node's work, in traced order. None if it is no such look-up."""
        own = [p for p in work if not p.is_view][: len(_PICK)]
        if tuple(p.op.function.name for p in own) != _PICK:
            return None
        until = work.index(own[-1])
        labels, rest = [p for p in work[:until] if p.is_view], list(work[until + 1 :])
        scores, ids = own[0].reads[0], own[-1].reads[1]
        top, fixed, off, powers, total, log, logp = (p.makes for p in own[:-1])
        reads = [(scores,), (top,), (scores, fixed), (off,), (powers,), (total,), (off, log), (logp, ids)]
        if [p.reads for p in own] != reads:
            return None
        first, again = own[0].local.operands[0], own[2].local.operands[0]
        axes, back = own[0].local.results[0].summed, own[6].local.operands[1].summed
        inner = [o for p in own[1:7] for o in p.local.operands if o is not again]
        of_scores, of_ids, of_result = (
            own[-1].op.reads[0].map.walks,
            own[-1].op.reads[1].map.walks,
            own[-1].op.writes[0].map.walks,
        )
        if (
            own[4].local.results[0].summed != axes
            or back not in (axes, ())
            or (first.transfer, first.layout, first.summed) != (again.transfer, again.layout, ())
            or any(o.transfer is not None or o.constant for o in inner)
            or any(o.summed for o in inner if o is not own[6].local.operands[1])
            or any(o.constant for o in (first, *own[-1].local.operands))
            or any("partial" in r.layout for p in own[:-1] for r in p.local.results)
            or own[-1].local.results[0].summed
            or not of_scores[:-1] == of_ids[:-1] == of_result
            or len(of_ids) != len(of_scores)
        ):
            return None
        return cls(own=own, labels=labels, rest=rest, axes=axes, differentiated=back == axes)

    @property
    def negation(self) -> OpPair | None:
        """The op that gives the result the other sign. None if it is not the next op."""
        first = self.rest[0] if self.rest else None
        negates = first is not None and first.op.function.name == "neg"
        return first if first is not None and negates and first.reads == (self.own[-1].makes,) else None

    def hiding(self, classes: int) -> tuple[OpPair, str] | None:
        """The op that puts zero where a label is a number that is no class, so that the result is zero there already,
        and the labels' tensor. None if there is no such op."""
        tests = {
            p.makes: (p.reads[0], numbers[1])
            for p in self.rest
            if p.op.function.name == "ne" and len(numbers := p.op.numbers or ()) == 2 and numbers[0] is None
        }
        of = (self.own[-1] if self.negation is None else self.negation).makes
        for p in self.rest:
            if p.op.function.name != "where" or p.op.numbers != (None, None, 0.0) or p.reads[1:] != (of,):
                continue
            labels, number = tests.get(p.reads[0], ("", None))
            if isinstance(number, int) and not 0 <= number < classes:
                return p, labels
        return None

    @property
    def inside(self) -> set[str]:
        """The tensors that nothing else may read, because they are not made."""
        return {p.makes for p in self.own[:-1]}


@cache
def _functions() -> tuple[type[TorchFunction], type[TorchFunction]]:
    """The autograd functions of ``rows`` and ``elements``."""
    import torch
    from torch.autograd.function import once_differentiable

    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: OpContext[int], table: Tensor, here: Tensor, others: Tensor, unlearnt: Tensor
        ) -> Tensor:
            ctx.besides = table.shape[0]
            ctx.save_for_backward(here, unlearnt)
            return torch.nn.functional.embedding(here, table).masked_fill_(others, 0)

        @staticmethod
        @once_differentiable
        def backward(ctx: OpContext[int], gradient: Tensor) -> tuple[Tensor | None, ...]:
            here, unlearnt = ctx.saved_tensors
            learnt = gradient.masked_fill(unlearnt, 0)
            made = torch.ops.aten.embedding_dense_backward(learnt, here, ctx.besides, -1, False)
            return made, None, None, None

    class Elements(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: OpContext[tuple[int, Sequence[int]]], x: Tensor, dim: int, here: Tensor, *others: Tensor
        ) -> Tensor:
            ctx.besides = dim, x.shape
            ctx.save_for_backward(here, *others)
            made = x.gather(dim, here)
            return made.masked_fill_(others[0], 0) if others else made

        @staticmethod
        @once_differentiable
        def backward(
            ctx: OpContext[tuple[int, Sequence[int]]], gradient: Tensor
        ) -> tuple[Tensor | None, ...]:
            (here, *others), (dim, shape) = ctx.saved_tensors, ctx.besides
            own = gradient.masked_fill(others[0], 0) if others else gradient
            made = own.new_zeros(shape).scatter_add_(dim, here, own)
            return made, None, None, *(None for _ in others)

    return Rows, Elements


@cache
def _label_function() -> type[TorchFunction]:
    """The autograd function of ``SplitLabel``."""
    import torch
    from torch.autograd.function import once_differentiable

    class Label(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: OpContext[SplitLabel], label: SplitLabel, scores: Tensor, here: Tensor, others: Tensor
        ) -> Tensor:
            top = label.groups.all_reduce(scores.amax(-1, keepdim=True), label.axes, "max")
            off = scores - top
            picked = off.gather(-1, here)
            powers = off.exp_()
            total = label.groups.all_reduce(powers.sum(-1, keepdim=True), label.axes)
            ctx.besides = label
            ctx.save_for_backward(powers, total, here, others)
            log = total.log()
            made = log.sub_(picked) if label.negated else picked.sub_(log)
            return made.masked_fill_(others, 0)

        @staticmethod
        @once_differentiable
        def backward(ctx: OpContext[SplitLabel], gradient: Tensor) -> tuple[Tensor | None, ...]:
            (powers, total, here, others), label = ctx.saved_tensors, ctx.besides
            own = gradient.masked_fill(others, 0)
            every = label.groups.all_reduce(own, label.axes)
            if label.negated:
                own = -own
            else:
                every = -every
            return None, torch.mul(powers, every / total).scatter_add_(-1, here, own), None, None

    return Label


@cache
def _extreme() -> type[TorchFunction]:
    """The autograd function of ``attained``."""
    import torch
    from torch.autograd.function import once_differentiable

    class Attained(torch.autograd.Function):
        @staticmethod
        def forward(ctx: OpContext[None], x: Tensor, top: Tensor, reached: Tensor, shares: Tensor) -> Tensor:
            ctx.save_for_backward(reached, shares)
            return top.view_as(top)

        @staticmethod
        @once_differentiable
        def backward(ctx: OpContext[None], gradient: Tensor) -> tuple[Tensor | None, ...]:
            reached, shares = ctx.saved_tensors
            each = (gradient.reshape(shares.shape) / shares).to(gradient.dtype)
            return torch.where(reached, each, each.new_zeros(())), None, None, None

    return Attained


def rows(table: Tensor, here: Tensor, mine: Tensor, padding: Tensor | None) -> Tensor:
    """The rows of this rank's part of a table, [*indices, row]; zeros where an index is another rank's.

    here: the indices into the part. mine: whether they are in it. padding: the indices whose rows get no gradient.
    """
    of_rows, _ = _functions()
    others = (~mine).unsqueeze(-1)
    unlearnt = others if padding is None else others | padding.unsqueeze(-1)
    made: Tensor = whole(of_rows.apply, table, here, others, unlearnt, name="rows")
    return made


def elements(x: Tensor, dim: int, here: Tensor, mine: Tensor | None) -> Tensor:
    """``x.gather(dim, here)``, with zeros where an index is another rank's. Unlike PyTorch's op, it keeps no ``x``.

    mine: whether the indices are in this rank's part; None if all are.
    """
    _, of_elements = _functions()
    others = () if mine is None else (~mine,)
    made: Tensor = whole(of_elements.apply, x, dim, here, *others, name="elements")
    return made


def attained(x: Tensor, top: Tensor, reached: Tensor, shares: Tensor) -> Tensor:
    """``top``, an extreme of x over dims that are split. The elements that attain it share its gradient, also where it
    is infinite.

    reached: which elements of x attain it. shares: how many do on all ranks, with the dims kept.
    """
    made: Tensor = whole(_extreme().apply, x, top, reached, shares, name="extreme")
    return made


@dataclass(frozen=True, kw_only=True)
class SplitLabel:
    """The log-softmax of scores [..., classes] at one class each. The classes are split over these mesh axes, if any.

    It keeps the exponentials, and sends what the ops of the plan send: the maximum, the sum, and the sum's gradient.

    negated: whether its result has the other sign, which a loss has.
    """

    groups: AxisGroups
    axes: tuple[str, ...]
    negated: bool

    def __call__(self, scores: Tensor, here: Tensor, mine: Tensor) -> Tensor:
        """[..., 1]: this rank's share, which is zero where the class is another rank's.

        here: the classes as indices into this rank's part, [..., 1]. mine: whether they are in it.
        """
        of_label = _label_function()
        made: Tensor = whole(partial(of_label.apply, self), scores, here, ~mine, name="log_probability")
        return made
