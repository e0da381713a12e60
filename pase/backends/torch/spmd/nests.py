"""Runs loop nests in PyTorch on one rank's parts: the ops of the traced graph, one by one, from their functions and
access maps.

A composite op of PyTorch (a norm, a loss, a linear layer) is run this way if something is summed or resharded between
its parts. Otherwise PyTorch's own op runs (``rules``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pase.backends.torch.spmd.collectives import there_and_back
from pase.backends.torch.spmd.pairs import order_of
from pase.backends.torch.spmd.process_groups import AxisGroups
from pase.backends.torch.spmd.values import NotOnParts
from pase.frontends.torch.passed import passed_op
from pase.ir import Op
from pase.ir.functions import WINDOW_SUM
from pase.ir.maps import Window
from pase.local.functions import COMPUTED
from pase.local.halo import borders_of, widened, widened_back
from pase.local.reshard import places_of
from pase.local.types import Extents, LocalOp
from pase.tables.axis_layout import AxisLayout

if TYPE_CHECKING:
    from torch import Tensor

    from pase.ir.maps import Walk

__all__ = ["run_nest", "with_neighbours"]


_WITH_NUMBERS = frozenset({"add", "mul", "sub", "div", "pow", "integer_pow"})
"""The functions that PyTorch computes of a tensor and plain numbers after it, without a tensor for each number."""


def run_nest(
    op: Op,
    local: LocalOp | None,
    ins: Sequence[Tensor],
    shape: Extents,
    groups: AxisGroups,
) -> Tensor:
    """The op's result on this rank.

    op: the op as traced.
    local: how the program splits it; None if it is not split, because it reads constants only.
    shape: the shape of the result on this rank.
    """
    match op.kind:
        case "elementwise":
            return _elementwise(op, ins)
        case "reduce":
            return _reduce(op, ins[0])
        case "matmul":
            return _product(op, ins, shape)
        case "view" if op.name in ("reshape", "transpose", "broadcast"):
            return _view(op, ins[0], shape)
        case "gather" if local is not None:
            return _picked(op, local, ins, shape, groups)
        case "view" if op.name == "concatenate":
            return _joined(op, ins)
        case "window" if op.function is WINDOW_SUM:
            return _window_sum(op, local, ins[0], shape, groups)
    raise NotOnParts(f"'{op.name}' in it cannot be run separately from the rest")


def _elementwise(op: Op, ins: Sequence[Tensor]) -> Tensor:
    import torch

    name, numbers = op.function.name, op.numbers
    if name not in COMPUTED:
        raise NotOnParts(f"'{name}' in it cannot be run separately from the rest")
    if numbers is None:
        raise NotOnParts(f"a number that '{name}' in it needs is unknown")
    if name == "passed":
        return passed_op()(*ins)  # type: ignore[no-any-return]
    left, first = iter(ins), ins[0]
    plain = name in _WITH_NUMBERS and numbers[:1] == (None,)
    as_tensor = not plain and (first.is_floating_point() or name == "ne")
    given: list[Any] = [
        next(left) if n is None else first.new_full((), n) if as_tensor else n for n in numbers
    ]
    return COMPUTED[name](torch, *given)  # type: ignore[no-any-return]


def _reduce(op: Op, x: Tensor) -> Tensor:
    """Reduce over the dims that the result does not have. The caller sums partial results."""
    axes = tuple(
        i
        for i, w in enumerate(op.reads[0].map.walks)
        if w.dims and not set(w.dims) & set(op.writes[0].map.dims)
    )
    keep = len(op.writes[0].map.walks) == len(op.reads[0].map.walks)
    how = {"reduce_sum": "sum", "reduce_max": "amax", "reduce_min": "amin"}.get(op.function.name)
    if how is None:
        raise NotOnParts(f"'{op.function.name}' in it cannot be run separately from the rest")
    if axes and not keep and not op.writes[0].map.walks:
        whole: Tensor = getattr(x, how)()  # its derivative is one op, and no view follows
        return whole
    made = getattr(x, how)(axes, keepdim=True) if axes else x
    return made if keep else made.reshape(_kept(op, made))


def with_neighbours(
    x: Tensor,
    borders: Mapping[int, tuple[int, int]],
    layout: AxisLayout,
    edge: float | None,
    groups: AxisGroups,
) -> Tensor:
    """The operand of a window with the rows of other ranks that its windows read.

    borders: see ``pase.local.halo.widened``. layout: the operand's. edge: the value past the ends; None for zeros.
    """
    for dim in borders:
        axes = groups.wide(layout.axes_along(dim, groups.mesh))
        if list(axes) != sorted(axes, key=groups.mesh.names.index):
            raise NotOnParts("a dim along which its window moves is split in another order than the mesh's")
    return there_and_back(
        x,
        None,
        lambda x: widened(x, borders, layout, edge, groups),
        lambda g: widened_back(g, borders, layout, groups),
        "halo",
    )


def _window_sum(op: Op, local: LocalOp | None, x: Tensor, shape: Extents, groups: AxisGroups) -> Tensor:
    """The sums of an average pool, which divides them elsewhere. The dims along which the windows move are the last."""
    from torch.nn import functional

    walks = op.reads[0].map.walks
    moved = [i for i, w in enumerate(walks) if w.window is not None]
    count = max(2, x.dim() - min(moved, default=x.dim()))
    if count > 3:
        raise NotOnParts(f"'{op.name}' in it has windows over {count} dims")
    borders: Mapping[int, tuple[int, int]] = {}
    if local is not None:
        (of,) = local.operands
        split = [d for d, (n, whole) in enumerate(zip(x.shape, of.shape, strict=True)) if n != whole]
        borders = borders_of(op, split, x.dim())
        x = with_neighbours(x, borders, of.layout, None, groups)
    windows = [w.window or Window(extent=1) for w in walks[-count:]]
    before = [0 if x.dim() - count + i in borders else w.before for i, w in enumerate(windows)]
    sizes, made = x.shape[-count:], shape[-count:]
    after = [
        (m - 1) * w.stride + w.extent - b - n for w, b, n, m in zip(windows, before, sizes, made, strict=True)
    ]
    border = [max(n, 0) for both in zip(before[::-1], after[::-1], strict=True) for n in both]
    y = x.reshape(-1, 1, *sizes)
    y = functional.pad(y, border) if any(border) else y
    pool = functional.avg_pool2d if count == 2 else functional.avg_pool3d
    extents, strides = [w.extent for w in windows], [w.stride for w in windows]
    return pool(y, extents, strides, divisor_override=1).reshape(shape)


def _kept(op: Op, x: Tensor) -> list[int]:
    """The shape of a reduction's result without the reduced dims. Dims of size 1 that the result has are kept."""
    walked = [w.dims for w in op.reads[0].map.walks]
    out = []
    at = 0
    for w in op.writes[0].map.walks:
        if w.dims:
            at = walked.index(w.dims, at)
            out.append(x.shape[at])
            at += 1
        else:
            out.append(1)
    return out


def _product(op: Op, ins: Sequence[Tensor], shape: Extents) -> Tensor:
    """Compute a product from its maps, as an einsum. Dims of size 1 get no letter. A product of rows with a matrix is
    PyTorch's own op, which does not permute its operands."""
    import torch

    letters: dict[str, int] = {}

    def term(x: Tensor, walks: Sequence[Walk]) -> tuple[Tensor, list[int]]:
        kept = [i for i, w in enumerate(walks) if w.dims]
        names = [letters.setdefault(d, len(letters)) for i in kept for d in walks[i].dims]
        return x.reshape([x.shape[i] for i in kept]), names

    terms: list[Any] = [t for x, a in zip(ins, op.reads, strict=True) for t in term(x, a.map.walks)]
    out = [letters[d] for w in op.writes[0].map.walks for d in w.dims]
    if len(terms) == 4 and len(terms[3]) == 2:
        x, rows, w, of = terms
        if rows[:-1] and out[:-1] == rows[:-1] and of == [rows[-1], out[-1]]:
            return torch.matmul(x, w).reshape(shape)
        if rows[:-1] and out[:-1] == rows[:-1] and of == [out[-1], rows[-1]]:
            return torch.nn.functional.linear(x, w).reshape(shape)
    return torch.einsum(*terms, out).reshape(shape)


def _view(op: Op, x: Tensor, shape: Extents) -> Tensor:
    read, written = op.reads[0].map.walks, op.writes[0].map.walks
    if op.name == "transpose":
        return x.permute(order_of(op))
    if op.name == "broadcast":
        place = {w.dims: i for i, w in enumerate(read) if w.dims}
        seen = [x.shape[place[w.dims]] if w.dims in place else 1 for w in written]
        return x.reshape(seen).expand(shape)
    return x.reshape(shape)


def _joined(op: Op, ins: Sequence[Tensor]) -> Tensor:
    """Concatenate along the dim that the result indexes differently from the operands."""
    import torch

    read, written = op.reads[0].map.walks, op.writes[0].map.walks
    apart = [i for i, (r, w) in enumerate(zip(read, written, strict=True)) if r != w]
    if len(apart) != 1:
        raise NotOnParts("a concatenation in it cannot be run separately from the rest")
    return torch.cat(list(ins), apart[0])


def _picked(op: Op, local: LocalOp, ins: Sequence[Tensor], shape: Extents, groups: AxisGroups) -> Tensor:
    """Look up elements of a table by vectors of indices. The indices select in the dims that the result does not have.
    An element that another rank has is zero here.

    If the indices share a dim with the table, each vector is looked up at its own position in that dim.
    """
    import torch

    x, ids = ins
    walks, of_ids = (r.map.walks for r in op.reads)
    written = op.writes[0].map.walks
    made = {d for w in written for d in w.dims}
    looked_up = [i for i, w in enumerate(walks) if w.dims and not set(w.dims) & made]
    shared = {i: k for k, v in enumerate(of_ids[:-1]) for i, w in enumerate(walks) if w.dims and w == v}
    if len(looked_up) != ids.shape[-1]:
        raise NotOnParts("a lookup in it cannot be run separately from the rest")
    table, lead = local.operands[0], ids.shape[:-1]
    index, mine = {}, torch.ones(lead, dtype=torch.bool, device=x.device)
    for column, dim in enumerate(looked_up):
        index[dim], here = places_of(ids[..., column], dim, table.shape, table.layout, groups)
        mine = mine & here
    for dim, k in shared.items():
        along = torch.arange(x.shape[dim], device=x.device)
        index[dim] = along.reshape([-1 if i == k else 1 for i in range(len(lead))])
    rest = [i for i in range(x.dim()) if i not in index]
    order = sorted(index)
    found = x.permute(*order, *rest)[tuple(index[i] for i in order)]
    found = torch.where(mine.reshape(*lead, *[1] * len(rest)), found, found.new_zeros(()))
    return _ordered(found, [*of_ids[:-1], *(walks[i] for i in rest)], written).reshape(shape)


def _ordered(x: Tensor, stands: Sequence[Walk], wanted: Sequence[Walk]) -> Tensor:
    """Permute the dims into the wanted order. A later reshape adds the dims of size 1."""
    kept = [i for i, w in enumerate(stands) if w.dims]
    x = x.reshape([x.shape[i] for i in kept])
    names = [stands[i] for i in kept]
    return x.permute([names.index(w) for w in wanted if w.dims])
