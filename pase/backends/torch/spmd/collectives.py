"""Edges of a local program on PyTorch tensors.

Each edge is one ``autograd.Function``. The plan gives the reshard steps of both its forward and its backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from pase.backends.torch.spmd.gathered_again import AgainMark, Way
from pase.backends.torch.spmd.process_groups import AxisGroups
from pase.backends.torch.spmd.record import whole
from pase.local.reshard import along
from pase.local.types import Extents
from pase.tables.axis_layout import AxisLayout

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.autograd import Function as TorchFunction

__all__ = ["EdgeCall", "GradientTaker", "SentLater", "passed", "positions", "summed", "there_and_back"]

GradientWay: TypeAlias = "Callable[[Tensor], Tensor | None]"


@cache
def _functions() -> tuple[type[TorchFunction], type[TorchFunction]]:
    """The two autograd classes of an edge. They are created on first use, because they need PyTorch."""
    import torch

    class Edge(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, there: Way, back: GradientWay) -> Tensor:
            ctx.back = back
            made = there(x)
            return made.view_as(made) if made is x else made

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
            return ctx.back(g), None, None

    class OntoCarrier(torch.autograd.Function):
        """Sends the gradient to another tensor than the value, its gradient carrier."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, gradient_carrier: Tensor, there: Way, back: GradientWay) -> Tensor:
            ctx.back = back
            made = there(x)
            return made.view_as(made) if made is x else made

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
            return None, ctx.back(g), None, None

    return Edge, OntoCarrier


def passed(x: Tensor) -> Tensor:
    """The way of a value that nothing is done to."""
    return x


def there_and_back(
    value: Tensor,
    gradient_carrier: Tensor | None,
    there: Way,
    back: Way | None,
    name: str = "edge",
    *,
    anyshape: bool = False,
    later: SentLater | None = None,
    again: AgainMark | None = None,
) -> Tensor:
    """Returns ``there(value)``. The gradient, ``back`` of the incoming gradient, goes to ``gradient_carrier`` if that
    is given, else to ``value``.

    gradient_carrier: a tensor in the layout in which the gradient arrives, if that is not the value's layout.
    back: None means that no gradient passes.
    name: in a recorded program.
    anyshape, later, again: see ``EdgeCall``.
    """
    if back is None or not (value.is_floating_point() or value.is_complex()):
        value = value.detach() if value.requires_grad else value
        return there(value) if again is None else whole(EdgeCall(there, None, again=again), value, name=name)
    carriers = () if gradient_carrier is None else (gradient_carrier,)
    return whole(EdgeCall(there, back, anyshape, later, again), value, *carriers, name=name)


class GradientTaker(Protocol):
    """Takes gradients in backward, to send them beside what follows (``messages.GradientSending``)."""

    @property
    def is_open(self) -> bool: ...

    def announce(self, number: int) -> None: ...

    def give(self, number: int, root: object, gradient: Tensor) -> None: ...

    def take_from(self, number: int, leaf: Tensor) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SentLater:
    """The gradient of an edge that is sent beside what follows.

    number: the edge's transfer. taker: takes the gradient while it is open.
    alone: whether the edge passes a parameter on as it is, and the step reads the parameter through it alone.
    """

    number: int
    taker: GradientTaker
    alone: bool


@dataclass(frozen=True)
class EdgeCall:
    """An edge, as one call with a derivative of its own.

    back: None means that no gradient passes.
    anyshape: whether it does the same to each element, of the value and of the gradient.
    again: backward gathers again what the edge gathers.
    hooks: whether nothing else reads the value that it passes on. A hook on the value then does the same to the
        gradient, and makes no view.
    """

    there: Way
    back: Way | None
    anyshape: bool = False
    later: SentLater | None = None
    again: AgainMark | None = None
    hooks: bool = False

    @property
    def passes(self) -> bool:
        """Whether it passes the value on."""
        return self.there is passed

    def __call__(self, value: Tensor, gradient_carrier: Tensor | None = None) -> Tensor:
        made = self._made(value, gradient_carrier)
        if self.again is not None:
            self.again.give(made, value, self.there)
        return made

    def _made(self, value: Tensor, gradient_carrier: Tensor | None) -> Tensor:
        if self.back is None:
            return self.there(value)
        if self._taken_from_leaf(value, gradient_carrier):
            return value
        if self.hooks and value.requires_grad and not value.is_leaf:
            value.register_hook(self.back)
            return value
        edge, onto_carrier = _functions()
        root, back = self._handed_over(value if gradient_carrier is None else gradient_carrier, self.back)
        if root is value:
            return edge.apply(root, self.there, back)
        return onto_carrier.apply(value.detach(), root, self.there, back)

    def _taken_from_leaf(self, value: Tensor, gradient_carrier: Tensor | None) -> bool:
        """Whether no edge is needed, because the gradient is taken where it arrives at the parameter."""
        later = self.later
        if later is None or not (later.alone and later.taker.is_open) or gradient_carrier is not None:
            return False
        if not (value.is_leaf and value.requires_grad):
            return False
        later.taker.take_from(later.number, value)
        return True

    def _handed_over(self, root: Tensor, here: Way) -> tuple[Tensor, GradientWay]:
        """(the tensor that autograd sees, the way of its gradient to ``root``).

        If the gradient is sent later, autograd's way from the edge to the parameter is gone once, when the gradient has
        arrived. It may keep tensors, so backward must not go it before.
        """
        if self.later is None or not root.requires_grad or not self.later.taker.is_open:
            return root, here
        from torch.autograd.graph import get_gradient_edge

        number, taker = self.later.number, self.later.taker
        taker.announce(number)
        # Autograd holds what it sees, and the tensor itself, until the step ends. Of one that is made, it sees nothing.
        seen = root if root.is_leaf else root.new_empty(0).requires_grad_()
        end = root if root.is_leaf else get_gradient_edge(root)

        def back(g: Tensor) -> None:
            taker.give(number, end, g)

        return seen, back


def summed(x: Tensor, axes: tuple[str, ...], groups: AxisGroups) -> Tensor:
    """All-reduce a result whose reader belongs to the same node. Every summand gets the gradient of the sum."""
    if not x.is_floating_point():
        return groups.all_reduce(x, axes)
    return there_and_back(x, None, lambda y: groups.all_reduce(y, axes), lambda g: g, "all_reduce")


def positions(
    dim: int, shape: Extents, layout: AxisLayout, groups: AxisGroups, device: torch.device
) -> Tensor:
    """Which elements of a whole tensor dim are in this rank's part: int64 [elements on this rank]."""
    import torch

    return along(torch.arange(shape[dim], device=device), dim, shape, layout, groups)
