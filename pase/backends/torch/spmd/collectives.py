"""The reshard steps of a local program on local PyTorch tensors: views and collectives.

Each edge is one ``autograd.Function``. The plan gives the reshard steps of both its forward and its backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce
from typing import TYPE_CHECKING, Any, TypeAlias

from pase.backends.torch.spmd.process_groups import AxisGroups
from pase.backends.torch.spmd.record import whole
from pase.errors import PaseError
from pase.local.exchange import nests
from pase.local.parts import WireView, digits, held, pairs, view
from pase.local.types import Combine, Extents, Layout, LocalReshardStep, local_shape

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor
    from torch.autograd import Function as TorchFunction

__all__ = ["EdgeCall", "part", "places_of", "positions", "resharded", "summed", "there_and_back"]

Way: TypeAlias = "Callable[[Tensor], Tensor]"


@cache
def _functions() -> tuple[type[TorchFunction], type[TorchFunction]]:
    """The two autograd classes of an edge. They are created on first use, because they need PyTorch."""
    import torch

    class Edge(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, there: Way, back: Way) -> Tensor:
            ctx.back = back
            made = there(x)
            return made.view_as(made) if made is x else made

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
            return ctx.back(g), None, None

    class OntoCarrier(torch.autograd.Function):
        """Sends the gradient to another tensor than the value, its gradient carrier."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, gradient_carrier: Tensor, there: Way, back: Way) -> Tensor:
            ctx.back = back
            made = there(x)
            return made.view_as(made) if made is x else made

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
            return None, ctx.back(g), None, None

    return Edge, OntoCarrier


def there_and_back(
    value: Tensor,
    gradient_carrier: Tensor | None,
    there: Way,
    back: Way | None,
    name: str = "edge",
    *,
    anyshape: bool = False,
) -> Tensor:
    """Returns ``there(value)``. The gradient, ``back`` of the incoming gradient, goes to ``gradient_carrier`` if that
    is given, else to ``value``.

    gradient_carrier: a tensor in the layout in which the gradient arrives, if that is not the value's layout.
    back: None means that no gradient passes.
    name: in a recorded program.
    anyshape: see ``EdgeCall``.
    """
    if back is None or not (value.is_floating_point() or value.is_complex()):
        return there(value.detach() if value.requires_grad else value)
    carriers = () if gradient_carrier is None else (gradient_carrier,)
    return whole(EdgeCall(there, back, anyshape), value, *carriers, name=name)


@dataclass(frozen=True)
class EdgeCall:
    """An edge, as one call with a derivative of its own.

    anyshape: whether it passes the value on, and does the same to each element of the gradient.
    """

    there: Way
    back: Way
    anyshape: bool = False

    def __call__(self, value: Tensor, gradient_carrier: Tensor | None = None) -> Tensor:
        edge, onto_carrier = _functions()
        if gradient_carrier is None:
            return edge.apply(value, self.there, self.back)
        return onto_carrier.apply(value.detach(), gradient_carrier, self.there, self.back)


def resharded(
    x: Tensor, steps: Sequence[LocalReshardStep], shape: Extents, combine: Combine, groups: AxisGroups
) -> Tensor:
    """The value after these reshard steps. shape: the shape of the whole tensor."""
    return reduce(lambda now, step: _step(now, step, shape, combine, groups), steps, x)


def _step(x: Tensor, step: LocalReshardStep, shape: Extents, combine: Combine, groups: AxisGroups) -> Tensor:
    mesh, axes = groups.mesh, groups.wide(step.axes)
    match step.kind:
        case "all_reduce":
            return groups.all_reduce(x, axes, combine)
        case "permute" | "all_to_all" if not nests(step, shape, mesh):
            sent = partial(_exchanged, step=step, shape=shape, axes=axes, groups=groups)
            return whole(sent, x, name="exchange")
        case "permute":
            return groups.permute(x, axes, pairs(step, shape, mesh))
        case "own":
            return x if groups.first(axes) else x.new_zeros(x.shape)
        case "slice":
            return _sliced(x, view(step, shape, mesh), axes, groups)
        case "reduce_scatter":
            if combine != "sum":
                raise PaseError(
                    f"partial results that are combined by {combine} cannot be reduce-scattered",
                    where=f"reduce-scatter over {', '.join(axes)}",
                    fix="compile with another mesh or strategy",
                )
            v = view(step, shape, mesh)
            return _shaped(groups.reduce_scatter(_to_front(x, v), axes), v.shape)
        case "all_gather":
            v = view(step, shape, mesh)
            return _from_front(groups.all_gather(_shaped(x, v.seen), axes), v)
        case _:
            assert step.kind == "all_to_all"
            v = view(step, shape, mesh)
            return _from_front(groups.all_to_all(_to_front(x, v), axes), v)


def _exchanged(
    x: Tensor, step: LocalReshardStep, shape: Extents, axes: Sequence[str], groups: AxisGroups
) -> Tensor:
    """A reshard step between parts that do not nest: one all-to-all of uneven parts sends each element to its owner."""
    ranks = _places(axes, groups)
    had, has = ([held(shape, s, p, groups.mesh) for p in ranks] for s in (step.before, step.after))
    me = groups.number(axes)
    mine, wanted = had[me], has[me]
    received = groups.exchanged(
        [x[_grid(mine, _common(mine, w), x)] for w in has],
        [tuple(map(len, _common(h, wanted))) for h in had],
        axes,
    )
    out = x.new_zeros(tuple(map(len, wanted)))
    for part, h in zip(received, had, strict=True):
        if part.numel():
            out[_grid(wanted, _common(h, wanted), x)] = part
    return out


ElementSets: TypeAlias = "tuple[np.ndarray, ...]"
"""For each dim, indices of elements of the whole tensor, int64, ascending."""


def _places(axes: Sequence[str], groups: AxisGroups) -> list[tuple[int, ...]]:
    """The ranks of this rank's group over these axes, in order. Each is given by its index along every mesh axis."""
    names = groups.mesh.names
    ways = [range(groups.ways([a])) for a in axes]
    return [
        tuple(at[axes.index(n)] if n in axes else here for n, here in zip(names, groups.place, strict=True))
        for at in itertools.product(*ways)
    ]


def _common(a: ElementSets, b: ElementSets) -> ElementSets:
    import numpy as np

    return tuple(np.intersect1d(x, y, assume_unique=True) for x, y in zip(a, b, strict=True))


def _grid(have: ElementSets, wanted: ElementSets, x: Tensor) -> tuple[Tensor, ...]:
    """Where the wanted elements are in a rank's part, as index tensors that broadcast against each other."""
    import torch

    rank = len(have)
    return tuple(
        # Built from a list, because a trace on fake tensors takes that as a constant.
        torch.tensor(h.searchsorted(w).tolist(), dtype=torch.int64, device=x.device).reshape(
            [-1 if i == d else 1 for i in range(rank)]
        )
        for d, (h, w) in enumerate(zip(have, wanted, strict=True))
    )


def _sliced(x: Tensor, v: WireView, axes: Sequence[str], groups: AxisGroups) -> Tensor:
    x = _shaped(x, v.seen)
    for axis, at in zip(axes, v.leaving, strict=True):
        x = x.narrow(at, groups.index(axis), 1)
    return _shaped(x, v.shape)


def _to_front(x: Tensor, v: WireView) -> Tensor:
    """Move the outgoing digits into the first dim; the other dims keep their order."""
    order = tuple(v.to_front)
    rest = [v.seen[i] for i in order[len(v.leaving) :]]
    return _shaped(_permuted(x, v.seen, order), (math.prod(v.ways), *rest))


def _from_front(x: Tensor, v: WireView) -> Tensor:
    """Distribute the first dim to the arriving digits, each in its place."""
    assert v.arriving is not None
    return _shaped(_permuted(x, (*v.ways, *x.shape[1:]), v.arriving), v.shape)


def _shaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor in a shape. A view that changes nothing is not made, because each is an op."""
    return x if tuple(x.shape) == tuple(shape) else x.reshape(shape)


def _permuted(x: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    """The tensor, seen in a shape, with its dims in an order. In the present order, its shape stays as it is."""
    return x if tuple(order) == tuple(range(len(shape))) else _shaped(x, shape).permute(order)


def summed(x: Tensor, axes: tuple[str, ...], groups: AxisGroups) -> Tensor:
    """All-reduce a result whose reader belongs to the same node. Every summand gets the gradient of the sum."""
    if not x.is_floating_point():
        return groups.all_reduce(x, axes)
    return there_and_back(x, None, lambda y: groups.all_reduce(y, axes), lambda g: g, "all_reduce")


def part(x: Tensor, shape: Extents, layout: Layout, groups: AxisGroups) -> Tensor:
    """This rank's part of a replicated tensor. A dim of size 1 that is larger in the whole tensor is not split."""
    mesh = groups.mesh
    states = tuple(s if isinstance(s, tuple) and x.shape[s[0]] != 1 else None for s in layout)
    axes = tuple(name for name, s in zip(mesh.names, states, strict=True) if s is not None)
    full = tuple(x.shape)
    if not axes or local_shape(full, states, mesh) == full:
        return x
    if any(full[s[0]] != shape[s[0]] for s in states if s is not None):
        raise PaseError(
            f"a tensor of shape {list(full)} does not have the whole shape {list(shape)}", where="operand"
        )
    step = LocalReshardStep(kind="slice", axes=axes, before=(None,) * len(states), after=states)
    return resharded(x, [step], full, "sum", groups)


def places_of(
    ids: Tensor, dim: int, shape: Extents, layout: Layout, groups: AxisGroups
) -> tuple[Tensor, Tensor]:
    """Translate indices into a whole tensor dim: (indices into this rank's part, whether they are in this part)."""
    here, mine, stride = ids.new_zeros(ids.shape), (ids >= 0) & (ids < shape[dim]), 1
    for d in reversed([d for d in digits(shape, layout, layout, groups.mesh) if d.dim == dim]):
        index = ids.div(d.stride, rounding_mode="floor") % d.size
        if d.before is None:
            here, stride = here + index * stride, stride * d.size
        else:
            mine = mine & (index == groups.place[d.before])
    return here, mine


def positions(dim: int, shape: Extents, layout: Layout, groups: AxisGroups, device: torch.device) -> Tensor:
    """Which elements of a whole tensor dim are in this rank's part: int64 [elements on this rank]."""
    import torch

    every = torch.arange(shape[dim], device=device)
    lead = (None,) * len(layout)
    along = tuple(
        (0, s[1]) if isinstance(s, tuple) and s[0] == dim else n for s, n in zip(layout, lead, strict=True)
    )
    return part(every, (shape[dim],), along, groups)
