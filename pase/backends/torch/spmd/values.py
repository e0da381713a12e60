"""Values on one rank, which a walk over an exported graph passes from op to op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from pase.errors import PaseError
from pase.frontends.common.values import Value
from pase.frontends.torch.values import shared_heads
from pase.local.types import Extents
from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

__all__ = [
    "NotOnParts",
    "OpContext",
    "RankValue",
    "ReorderStep",
    "ReshapeStep",
    "Steps",
    "apply_views",
    "inverse",
    "layout_through",
    "of_broadcast",
    "steps_from",
    "through_reshape",
]


class OpContext(Protocol[T]):
    """The autograd context of an op of ours: the tensors that its backward reads, and what it needs besides."""

    besides: T
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class NotOnParts(PaseError):
    """An op cannot be run on parts of its operands.

    The code that raises it gives only the reason, in ``what``. The walk over the graph adds the op and its place, and
    sets ``told``, so that an outer walk, for which the op is inside a loop's body, passes the error on unchanged.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "", told: bool = False) -> None:
        super().__init__(what, where=where, fix=fix)
        self.told = told


_THE_SAME = AxisLayout()


@dataclass(frozen=True, kw_only=True)
class RankValue:
    """A tensor of the traced graph on this rank.

    gradient_carrier: the tensor that receives its gradient, if that has another layout, ``gradient``. For example, a
    parameter whose optimizer state is split further has a gradient carrier.
    """

    array: Tensor
    tensor: str
    shape: Extents
    layout: AxisLayout
    gradient_carrier: Tensor | None = None
    gradient: AxisLayout = _THE_SAME

    def times(self, factor: float) -> RankValue:
        """The value multiplied by a number; itself if the number is 1."""
        if factor == 1:
            return self
        carrier = None if self.gradient_carrier is None else self.gradient_carrier * factor
        return replace(self, array=self.array * factor, gradient_carrier=carrier)


@dataclass(frozen=True)
class ReshapeStep:
    """The same elements in another shape."""

    shape: Extents
    new: Extents


@dataclass(frozen=True)
class ReorderStep:
    """The same elements, with the dims in another order."""

    order: tuple[int, ...]


Steps = tuple[ReshapeStep | ReorderStep, ...]
"""Views (reshapes and transposes) that make one value from another, in order."""


def steps_from(value: Value | list[Value | None] | None) -> Iterator[tuple[str, Steps]]:
    """The tensor that a value is, the tensor that it is a view of, the tensor that that is a view of, and so on.

    Each comes with the steps that lead from it to the value. The frontend recorded the views in ``Value.note``. No step
    repeats heads that queries share: only attention reads them through here, and it takes them as they are.
    """
    steps: Steps = ()
    while isinstance(value, Value):
        if value.tensor is not None:
            yield value.tensor.name, steps
        if (heads := shared_heads(value)) is not None:
            value = heads
            continue
        match value.note:
            case ("view", Value() as base):
                steps = (ReshapeStep(base.shape, value.shape), *steps)
            case ("transposed", Value() as base, order):
                steps = (ReorderStep(tuple(order)), *steps)
            case _:
                return
        value = base


def apply_views(x: Tensor, layout: AxisLayout, steps: Steps, mesh: Mesh) -> Tensor:
    """Apply views to a rank's part. Returns this rank's part of the result."""
    for step in steps:
        layout = _layout_after(layout, step, mesh)
        if isinstance(step, ReorderStep):
            x = x.permute(step.order)
        else:
            x = x.reshape(layout.local_shape(step.new, mesh))
    return x


def layout_through(layout: AxisLayout, steps: Steps, mesh: Mesh) -> AxisLayout:
    """The layout of the result of applying these views."""
    for step in steps:
        layout = _layout_after(layout, step, mesh)
    return layout


def _layout_after(layout: AxisLayout, step: ReshapeStep | ReorderStep, mesh: Mesh) -> AxisLayout:
    """``layout_through`` for one step."""
    if isinstance(step, ReshapeStep):
        return through_reshape(layout, step.shape, step.new, mesh)
    return layout.renumbered(step.order.index)


def inverse(steps: Steps) -> Steps:
    """The steps from the result of the views back to their source."""
    out: list[ReshapeStep | ReorderStep] = []
    for step in reversed(steps):
        if isinstance(step, ReorderStep):
            out.append(ReorderStep(tuple(step.order.index(i) for i in range(len(step.order)))))
        else:
            out.append(ReshapeStep(step.new, step.shape))
    return tuple(out)


def of_broadcast(shape: Extents, whole: Extents, layout: AxisLayout) -> AxisLayout:
    """The layout of an operand that is broadcast to a whole shape, of which each device has a part: a dim is split if
    it is not one that is repeated.

    shape: the operand's. layout: that of the whole.
    """
    lead = len(whole) - len(shape)
    repeated = {d for d in range(len(whole)) if d < lead or shape[d - lead] != whole[d]}
    return layout.summed.renumbered(lambda d: None if d in repeated else d - lead)


def through_reshape(layout: AxisLayout, shape: Extents, new: Extents, mesh: Mesh) -> AxisLayout:
    """The layout of a tensor after a reshape, such that each device keeps its elements.

    Raises NotOnParts if one axis would have to split several dims of the new shape.
    """
    after = layout.reshaped(shape, new, mesh)
    if after is None:
        raise NotOnParts(f"one mesh axis would split several dims of {list(new)}")
    return after
