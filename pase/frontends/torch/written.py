"""PyTorch ops that are rewritten in terms of other ops, which have rules.

For example, recurrent layers become loops over time (PyTorch's own decomposition unrolls them), embedding bags become
lookups and sums, and assignments by a mask become ``where``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, TypeAlias

from pase.errors import PaseError
from pase.frontends.torch.passed import passed_op
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import arguments, known_size
from pase.pytree import Tree
from pase.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pase.frontends.torch.values import TorchOperand

__all__ = ["WRITTEN"]

WRITTEN: Registry[Callable[[FxNode], Callable[..., Tree] | None]] = Registry("op written out in others")
"""Op with its overload (``lstm.input``) -> a function of a call that returns how the call is rewritten.

The result computes the same as the call from the call's operands. It is None if the op's own rule handles the call. The
function raises PaseError for a call that is refused; the caller adds the call's place.
"""


def _always(*ops: str) -> Callable[[Callable[..., Tree]], Callable[..., Tree]]:
    """Decorator: the function computes the same as these ops for any operands."""

    def add(how: Callable[..., Tree]) -> Callable[..., Tree]:
        WRITTEN.register(*ops)(lambda n: how)
        return how

    return add


# Recurrent layers: torch.nn.LSTM, GRU and RNN.

RecurrentCell: TypeAlias = "Callable[..., tuple[Tensor, ...]]"
"""(input products [b gates·h], states [b h] …, state product [b gates·h], projection or None) -> the next states.

The first of the next states is the output.
"""


def _lstm(x: Tensor, h: Tensor, c: Tensor, back: Tensor, project: Tensor | None) -> tuple[Tensor, ...]:
    from torch.nn.functional import linear

    enter, forget, new, leave = (x + back).chunk(4, -1)
    c = forget.sigmoid() * c + enter.sigmoid() * new.tanh()
    h = leave.sigmoid() * c.tanh()
    return (h if project is None else linear(h, project)), c


def _gru(x: Tensor, h: Tensor, back: Tensor, project: None) -> tuple[Tensor, ...]:
    (reset, update, new), (of_reset, of_update, of_new) = x.chunk(3, -1), back.chunk(3, -1)
    new = (new + (reset + of_reset).sigmoid() * of_new).tanh()
    return ((h - new) * (update + of_update).sigmoid() + new,)


def _tanh(x: Tensor, h: Tensor, back: Tensor, project: None) -> tuple[Tensor, ...]:
    return ((x + back).tanh(),)


def _relu(x: Tensor, h: Tensor, back: Tensor, project: None) -> tuple[Tensor, ...]:
    return ((x + back).relu(),)


_CELLS: dict[str, RecurrentCell] = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _tanh, "rnn_relu": _relu}


def _over_time(
    cell: RecurrentCell, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], bias: bool
) -> tuple[Tensor, Sequence[Tensor]]:
    """The outputs of all time steps [s b h], and the last states.

    x: products of the inputs with their weights, [s b gates·h]. weights: the weight of the state, the bias if there is
    one, and the weight of the projection if there is one.
    """
    import torch
    from torch.nn.functional import linear

    n = len(states)

    def step(*given: Tensor) -> list[Tensor]:
        (h, *_), entering, (weight, *rest) = given[:n], given[n], given[n + 1 :]
        back = linear(h, weight, rest[0] if bias else None)
        project = rest[-1] if len(rest) > bias else None
        new = cell(entering, *given[:n], back, project)
        return [*new, new[0].clone()]

    *last, out = torch.ops.higher_order.scan(step, list(states), [x], tuple(weights))
    return out, last


def _recurrent(
    cell: RecurrentCell,
    x: Tensor,
    states: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Tree:
    """A recurrent layer. The operands are those of ATen's op.

    The product of a layer's inputs with their weights is computed for all time steps at once, before the loop. The
    other direction of a bidirectional layer is a loop over the reversed steps.
    """
    import torch
    from torch.nn.functional import linear

    states = [states] if isinstance(states, torch.Tensor) else states
    ways = 2 if bidirectional else 1
    each = len(params) // (num_layers * ways)
    x = x.transpose(0, 1) if batch_first else x
    ends = []
    for layer in range(num_layers):
        made = []
        for way in range(ways):
            k = layer * ways + way
            inside, again, *rest = params[k * each : (k + 1) * each]
            enters = linear(x, inside, rest.pop(0) if has_biases else None)
            enters = enters.flip(0) if way else enters
            y, last = _over_time(cell, enters, [s[k] for s in states], [again, *rest], has_biases)
            made.append(y.flip(0) if way else y)
            ends.append(last)
        x = torch.cat(made, -1) if bidirectional else made[0]
        if train and dropout and layer < num_layers - 1:
            x = torch.ops.aten.native_dropout(x, dropout, True)[0]
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.stack(s) for s in zip(*ends, strict=True))


for _name, _cell in _CELLS.items():
    _always(f"{_name}.input")(partial(_recurrent, _cell))


# Embedding bags: sums, means and maxima of rows of a table.

_SUM, _MEAN, _MAX = range(3)


@WRITTEN.register("embedding_bag", "embedding_bag.padding_idx")
def _bags(n: FxNode) -> Callable[..., Tree]:
    """Rows of a table, looked up and combined per bag."""
    given = arguments(n.target, n.args, n.kwargs)
    if given["scale_grad_by_freq"]:
        raise PaseError(
            "pase does not divide the gradient of a row by how often the row occurs",
            fix="use scale_grad_by_freq=False",
        )
    return partial(_in_bags, _bag_size(given["indices"], given["offsets"]))


def _bag_size(indices: FxNode, offsets: FxNode) -> int | None:
    """The number of rows per bag if all bags have equally many (a table of bags [n k]); None if it depends on data."""
    if str(offsets.target) != "aten.arange.start_step":
        return None
    start, stop, step = offsets.args
    return step if start == 0 and stop == indices.meta["val"].numel() and stop % step == 0 else None


def _in_bags(
    size: int | None,
    table: Tensor,
    ids: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tree:
    """An embedding bag. size: rows per bag if all have equally many. The other operands are those of ATen's op.

    Only the first of the op's results is computed, which is the one that PyTorch's modules return.
    """
    import torch
    from torch.nn.functional import embedding

    ids = ids if size is None else ids.view(-1, size)
    rows = embedding(ids, table)
    if weights is not None:
        rows = rows * weights.view(*ids.shape, 1)
    counts = torch.ones_like(ids)
    nothing = -torch.inf if mode == _MAX else 0.0
    if padding_idx is not None:
        counts = (ids != padding_idx % table.shape[0]).to(ids.dtype)
        rows = rows.masked_fill((counts == 0)[..., None], nothing)
    if size is not None:
        many, out = counts.sum(1), rows.max(1).values if mode == _MAX else rows.sum(1)
    else:
        bags, bag = offsets.shape[0] - include_last_offset, _bag_of(ids, offsets)
        many, out = (
            counts.new_zeros(bags).index_add(0, bag, counts),
            rows.new_full((bags, rows.shape[1]), nothing),
        )
        if mode == _MAX:
            out = out.scatter_reduce(0, bag[:, None].expand_as(rows), rows, "amax")
        else:
            out = out.index_add(0, bag, rows)
    if mode == _MEAN:
        out = out / many.clamp(min=1)[:, None]
    elif mode == _MAX:
        out = out.masked_fill((many == 0)[:, None], 0.0)
    return out, None, None, None


def _bag_of(ids: Tensor, offsets: Tensor) -> Tensor:
    """The bag of each row: the number of bags that begin at or before the row, minus one."""
    import torch

    begun = offsets.new_zeros(ids.shape[0] + 1).index_add(0, offsets, torch.ones_like(offsets))
    return begun.cumsum(0)[:-1] - 1


# Masks as indices.


@WRITTEN.register("index.Tensor", "_unsafe_index.Tensor")
def _selected(n: FxNode) -> Callable[..., Tree] | None:
    if any(map(_is_mask, n.args[1])):
        raise PaseError(
            "the number of elements that a mask selects as an index depends on the data",
            fix="keep all elements and mask them (torch.where; in a loss, labels of ignore_index), or select a fixed "
            "number of them (topk of the mask)",
        )
    return None if (own := _own_rows(n)) is None else partial(_own_rows_picked, own)


@WRITTEN.register("index_put.default", "_unsafe_index_put.default")
def _put(n: FxNode) -> Callable[..., Tree] | None:
    """An assignment by a mask: all selected elements get one value, or all selected rows get one row."""
    x, indices, new, *_ = n.args
    at = next((i for i, m in enumerate(indices) if _is_mask(m)), None)
    if at is None:
        return None if (own := _own_rows(n)) is None else partial(_own_rows_put, own)
    behind = x.meta["val"].shape[at + indices[at].meta["val"].dim() :]
    shape = new.meta["val"].shape
    if any(m is not None for i, m in enumerate(indices) if i != at) or len(shape) > len(behind):
        raise PaseError(
            "the place that a value is written to depends on how many elements a mask selects before it",
            fix="give a value for every element, with torch.where or masked_scatter",
        )
    return partial(_where, len(behind))


# Indices that count the rows of the first dims: ``x[torch.arange(len(x)), ids]``, and the pixels of ``grid_sample``.


def _own_rows(n: FxNode) -> int | None:
    """The first indexed dim behind those whose rows are counted: each row of them is indexed by its own ids. None if
    the rows of no dim are counted.

    Such an index is a gather. The dims whose rows are counted can then be split without communication.
    """
    import torch

    x, indices = n.args[0].meta["val"], n.args[1]
    if len(indices) < 2 or any(m is None for m in indices):
        return None
    shape = torch.broadcast_shapes(*(m.meta["val"].shape for m in indices))
    own = 0
    for d, m in enumerate(indices[: min(len(indices) - 1, len(shape))]):
        rows = _numbers(m) if shape[d] == x.shape[d] == _size_at(m, d, len(shape)) else None
        counted = torch.arange(x.shape[d]).view(-1, *[1] * (len(shape) - 1 - d))
        if rows is None or bool(
            (rows != counted).any()
        ):  # in the index's own shape: all of them may be an image
            break
        own += 1
    return own or None


def _size_at(m: FxNode, d: int, rank: int) -> int:
    """The size of an index along a dim of all indices together, which have this rank."""
    shape = m.meta["val"].shape
    at = d - (rank - len(shape))
    return shape[at] if at >= 0 else 1


def _numbers(n: FxNode) -> Tensor | None:
    """The value of a tensor that is computed from numbers alone; None if it depends on data."""
    import torch

    if n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload):
        return None
    if torch.Tag.nondeterministic_seeded in n.target.tags:
        return None
    made = {m: _numbers(m) for m in n.all_input_nodes}
    if any(x is None for x in made.values()):
        return None
    args, kwargs = torch.fx.map_arg((n.args, n.kwargs), lambda m: made[m])
    return n.target(*args, **{**kwargs, **({"device": "cpu"} if "device" in kwargs else {})})  # type: ignore[no-any-return]


def _own_ids(x: Tensor, indices: Sequence[Tensor], own: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """The tensor with the indexed dims from ``own`` on joined to one, [rows…, joined, …]; the ids in it, [rows…, n, …];
    and the shape of all indices. An index out of range is one in the joined dim too."""
    import torch

    shape = torch.broadcast_shapes(*(i.shape for i in indices))
    sizes = x.shape[own : len(indices)]
    each = [torch.where(at < 0, at + n, at) for n, at in zip(sizes, indices[own:], strict=True)]
    ids, *others = each
    if others:
        outside = reduce(or_, ((at < 0) | (at >= n) for n, at in zip(sizes, each, strict=True)))
        for n, at in zip(sizes[1:], others, strict=True):
            ids = ids * n + at
        ids = torch.where(outside, math.prod(sizes), ids)
    joined = x.flatten(own, len(indices) - 1) if others else x
    behind = x.shape[len(indices) :]
    ids = ids.expand(shape).reshape(*shape[:own], -1, *[1] * len(behind))
    return joined, ids.expand(*ids.shape[: own + 1], *behind), tuple(shape)


def _own_rows_picked(own: int, x: Tensor, indices: Sequence[Tensor]) -> Tensor:
    joined, ids, shape = _own_ids(x, indices, own)
    return joined.gather(own, ids).reshape(*shape, *x.shape[len(indices) :])


def _own_rows_put(
    own: int, x: Tensor, indices: Sequence[Tensor], new: Tensor, accumulate: bool = False
) -> Tensor:
    joined, ids, shape = _own_ids(x, indices, own)
    new = new.expand(*shape, *x.shape[len(indices) :]).reshape(ids.shape)
    put = joined.scatter_add if accumulate else joined.scatter
    return put(own, ids, new).reshape(x.shape)


def _is_mask(m: FxNode | None) -> bool:
    return m is not None and str(m.meta["val"].dtype) in ("torch.bool", "torch.uint8")


def _where(
    behind: int, x: Tensor, indices: Sequence[Tensor | None], new: Tensor, accumulate: bool = False
) -> Tensor:
    """An assignment by a mask. behind: the number of dims after those of the mask."""
    import torch

    (mask,) = (m for m in indices if m is not None)
    mask = mask.bool().view(*mask.shape, *[1] * behind)
    return torch.where(mask, x + new if accumulate else new, x)


@_always("masked_scatter.default")
def _in_order(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The elements that a mask selects become the elements of the source, in order."""
    import torch

    x, mask = torch.broadcast_tensors(x, mask)
    rows = mask.reshape(x.shape[0], -1).long()
    many = rows.sum(1)
    before = many.cumsum(0) - many
    at = (rows.cumsum(1) + before[:, None] - 1).clamp(min=0)
    return torch.where(mask, source.reshape(-1)[at].view(x.shape), x)


# Complex numbers.


@WRITTEN.register("instance_norm.default")
def _instance_norm(n: FxNode) -> Callable[..., Tree] | None:
    """With running statistics, in evaluation, it is a batch norm; in training, it writes them although its schema does
    not say so, and so an exported program does not."""
    given = arguments(n.target, n.args, n.kwargs)
    if given.get("running_mean") is None:
        return None
    if given["use_input_stats"]:
        raise PaseError(
            "it updates running statistics, which torch.export does not record",
            fix="use track_running_stats=False, which normalizes in the same way in training",
        )
    return _by_running_statistics


def _by_running_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, *options: Tree
) -> Tensor:
    import torch

    _, momentum, epsilon, _ = options
    return torch.nn.functional.batch_norm(x, mean, variance, weight, bias, momentum=momentum, eps=epsilon)


@_always("polar.default")
def _polar(size: Tensor, angle: Tensor) -> Tensor:
    import torch

    return torch.complex(size * angle.cos(), size * angle.sin())


@WRITTEN.register("slice_scatter.default", "select_scatter.default")
def _complex_part(n: FxNode) -> Callable[..., Tree] | None:
    """A part of an array replaced. PyTorch has no derivative of these two ops for complex numbers."""
    import torch

    def how(x: Tensor, src: Tensor, *place: Tree, **named: Tree) -> Tensor:
        real, imaginary = (
            n.target(*parts, *place, **named) for parts in ((x.real, src.real), (x.imag, src.imag))
        )
        return torch.complex(real, imaginary)

    return how if n.meta["val"].is_complex() else None


@WRITTEN.register("bincount.default")
def _counts(n: FxNode) -> Callable[..., Tree] | None:
    """Counts of a known number of values. PyTorch's op makes one more for each value that is larger."""
    many = known_size(n.meta["val"].shape[0])
    if many is None:
        return None

    def how(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        import torch

        ones = torch.ones_like(x, dtype=torch.long) if weights is None else weights
        return ones.new_zeros(many).index_add(0, x.long(), ones)

    return how


@WRITTEN.register("cat.default")
def _cat_without_empty(n: FxNode) -> Callable[..., Tree] | None:
    """Operands without elements are left out: no device has a part of them."""
    if all(m.meta["val"].numel() for m in n.args[0]) or not n.meta["val"].numel():
        return None

    def how(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
        import torch

        return torch.cat([x for x in tensors if x.numel()], dim)

    return how


# Distances, diagonals and other functions.


@_always("_cdist_forward.default")
def _cdist(x1: Tensor, x2: Tensor, p: float, compute_mode: int | None) -> Tensor:
    import torch

    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


@_always("_pdist_forward.default")
def _pdist(x: Tensor, p: float = 2.0) -> Tensor:
    import torch

    i, j = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device).unbind(0)
    return torch.linalg.vector_norm(x.index_select(0, i) - x.index_select(0, j), p, -1)


@_always("diagonal_scatter.default")
def _diagonal_put(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    import torch
    from torch.nn.functional import pad

    x = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = (torch.arange(n, device=x.device) for n in x.shape[-2:])
    there = columns[None, :] == rows[:, None] + offset
    first = max(0, -offset)
    each = pad(src, (first, x.shape[-2] - first - src.shape[-1]))[..., None]
    return torch.where(there, each, x).movedim((-2, -1), (dim1, dim2))


@WRITTEN.register("index_fill.int_Tensor")
def _index_fill(n: FxNode) -> Callable[..., Tree] | None:
    """With a value that is a tensor. In PyTorch's decomposition, its derivative counts an index that occurs twice
    twice."""

    def how(x: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
        import torch

        dim = dim % x.dim()
        rows = torch.arange(x.shape[dim], device=x.device)[:, None]
        filled = ((rows == index) | (rows == index + x.shape[dim])).any(-1)
        return torch.where(filled.view(-1, *[1] * (x.dim() - 1 - dim)), value.to(x.dtype), x)

    return how if n.args[0].meta["val"].dim() else None


@_always("index_reduce.default")
def _index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    at = index.view(-1, *[1] * (x.dim() - 1 - dim % x.dim())).expand_as(source)
    return x.scatter_reduce(dim, at, source, reduce, include_self=include_self)


@_always("addbmm.default")
def _added_products(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    import torch

    return beta * x + alpha * torch.bmm(a, b).sum(0)


@WRITTEN.register("linalg_vector_norm.default")
def _norm(n: FxNode) -> Callable[..., Tree] | None:
    """A norm by powers. PyTorch's decomposition of the others (maxima, counts, single numbers) has its derivatives."""
    given = arguments(n.target, n.args, n.kwargs)
    x = given["self"].meta["val"]
    single = x.dim() and x.numel() == n.meta["val"].numel()
    return None if single or given["ord"] in (0, math.inf, -math.inf) else _norm_by_powers


def _norm_by_powers(
    x: Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """As in PyTorch, the derivative is zero where the norm is zero, and at elements that are zero if the power is less
    than one. The derivatives of the powers and of the root are infinite there, and backward would give NaN."""
    import torch

    x = x.abs() if x.is_complex() or ord % 2 else x
    kept = dtype or x.dtype
    x = x.to(torch.float32 if kept.itemsize < 4 else kept)
    if ord < 1:
        zero = x == 0
        powers = (x.masked_fill(zero, 1.0) ** ord).masked_fill(zero, 0.0 if ord > 0 else math.inf)
    else:
        powers = x**ord
    total = powers.sum(dim if dim is None else list(dim), keepdim)
    if ord < 0:
        return (total ** (1 / ord)).to(kept)
    zero = total == 0
    return (total.masked_fill(zero, 1.0) ** (1 / ord)).masked_fill(zero, 0.0).to(kept)


@_always("sinc.default")
def _sinc(x: Tensor) -> Tensor:
    """Zero is left out before the division: the derivative of 0 / 0 is NaN, also where another value is taken."""
    zero = x == 0
    angle = math.pi * x.masked_fill(zero, 1)
    return (angle.sin() / angle).masked_fill(zero, 1.0)


@_always("binary_cross_entropy.default")
def _binary_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    """PyTorch bounds the logarithms, and, in the derivative, what it divides by. The derivatives of bounded logarithms
    of 0 are not numbers."""
    zero, one = x.log().clamp(min=-100), (-x).log1p().clamp(min=-100)
    slope, slope_of_target = (x - target) / (x * (1 - x)).clamp(min=1e-12), (1 - x).log() - x.log()
    made = passed_op()(
        (target - 1) * one - target * zero, slope.detach() * x + slope_of_target.detach() * target
    )
    made = made if weight is None else made * weight
    return (made, made.mean(), made.sum())[reduction]


@_always("diagonal.default")
def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """A diagonal as a sum over masked rows, because a sum may be split."""
    import torch

    x = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = (torch.arange(n, device=x.device) for n in x.shape[-2:])
    there = columns[None, :] == rows[:, None] + offset
    first = max(0, -offset)
    many = max(0, min(x.shape[-2] - first, x.shape[-1] - max(0, offset)))
    return torch.where(there, x, x.new_zeros(())).sum(-1).narrow(-1, first, many)


@_always("hypot.default")
def _hypot(x: Tensor, y: Tensor) -> Tensor:
    return (x * x + y * y).sqrt()


@_always("copysign.Tensor")
def _copysign(x: Tensor, y: Tensor) -> Tensor:
    import torch

    negative = (y < 0) | ((y == 0) & (y.reciprocal() < 0))
    return torch.where(negative, -x.abs(), x.abs())


@_always("angle.default")
def _angle(x: Tensor) -> Tensor:

    import torch

    if x.is_complex():
        return torch.atan2(x.imag, x.real)
    return torch.where(x < 0, x.detach() * 0 + math.pi, x.detach() * 0)


@_always("bilinear.default")
def _bilinear(x1: Tensor, x2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    import torch

    made = torch.einsum("...i,oij,...j->...o", x1, weight, x2)
    return made if bias is None else made + bias


@_always("conv1d.padding", "conv2d.padding", "conv3d.padding")
def _padded_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: str = "valid",
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Tensor:
    """A convolution whose padding is named. Where its ends differ, PyTorch pads the end by one more."""
    from torch.nn.functional import conv1d, conv2d, conv3d, pad

    n = weight.dim() - 2
    every = list(dilation) * (n if len(dilation) == 1 else 1)
    overlap = [d * (k - 1) * (padding == "same") for d, k in zip(every, weight.shape[2:], strict=True)]
    if any(rows % 2 for rows in overlap):
        x = pad(x, [more for rows in reversed(overlap) for more in (0, rows % 2)])
    convolution = (conv1d, conv2d, conv3d)[n - 1]
    return convolution(x, weight, bias, stride, [rows // 2 for rows in overlap], dilation, groups)


# Pooling by maxima whose places are read.


@WRITTEN.register("max_pool2d_with_indices.default")
def _max_pool_with_places(n: FxNode) -> Callable[..., Tree] | None:
    """The op itself gives no places: they are found in the windows, written out, if anything reads them."""
    if not any(u.args[1] == 1 and u.users for u in n.users):
        return None
    given = arguments(n.target, n.args, n.kwargs)
    if given["ceil_mode"]:
        raise PaseError(
            "the places of its maxima are read, which pase does not find in windows that reach over the edge",
            fix="pool with ceil_mode=False, and pad the input instead",
        )

    def pair(name: str, default: Sequence[int] = ()) -> tuple[int, int]:
        first, *rest = given[name] or default
        return first, rest[0] if rest else first

    window = pair("kernel_size")
    stride, padding, dilation = pair("stride", window), pair("padding"), pair("dilation")
    return partial(_windows_max, window, stride, padding, dilation)


def _windows_max(
    window: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    x: Tensor,
    *_: TorchOperand,
    **named: TorchOperand,
) -> tuple[Tensor, Tensor]:
    """The maxima, [n c h w], and their places in the flattened image, as PyTorch counts them."""
    import torch
    from torch.nn.functional import pad, unfold

    image = x if x.dim() == 4 else x[None]
    (above, left), size = padding, image.shape[2:]
    wide = pad(image, (left, left, above, above), value=-math.inf)
    found = unfold(wide, window, dilation, 0, stride).unflatten(1, (image.shape[1], -1)).max(2)
    rows, columns = (
        (n + 2 * p - d * (w - 1) - 1) // s + 1
        for n, p, d, w, s in zip(size, padding, dilation, window, stride, strict=True)
    )
    row = (torch.arange(rows, device=x.device) * stride[0] - above)[:, None]
    column = torch.arange(columns, device=x.device) * stride[1] - left
    at = found.indices.unflatten(-1, (rows, columns))
    row = row + at // window[1] * dilation[0]
    places = row * size[1] + column + at % window[1] * dilation[1]
    maxima = found.values.unflatten(-1, (rows, columns))
    return (maxima, places) if x.dim() == 4 else (maxima[0], places[0])


@_always("max_unpool2d.default", "max_unpool3d.default")
def _unpooled(x: Tensor, indices: Tensor, output_size: Sequence[int], *_: TorchOperand) -> Tensor:
    n = len(output_size)
    empty = x.new_zeros((*x.shape[:-n], math.prod(output_size)))
    return empty.scatter(-1, indices.flatten(-n), x.flatten(-n)).unflatten(-1, tuple(output_size))


@WRITTEN.register("rrelu.default")
def _rrelu(n: FxNode) -> Callable[..., Tree] | None:
    """Outside of training, the op draws no random numbers and is a leaky ReLU."""
    given = arguments(n.target, n.args, n.kwargs)
    if given["training"]:
        return None
    from torch.nn.functional import leaky_relu

    slope = (given["lower"] + given["upper"]) / 2
    return lambda x, *rest, **named: leaky_relu(x, slope)


def _in_order_of_storage(n: FxNode) -> bool:
    """Whether the operand is contiguous from the start of its storage, so that strides index its elements directly."""
    held = arguments(n.target, n.args, n.kwargs)["self"].meta["val"]
    return held.is_contiguous() and not held.storage_offset()


def _strided(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Tensor:
    """The indices into flattened x of the elements that a view with this size and stride has."""
    import torch

    at = torch.full((1,), offset or 0, device=x.device)
    for n, step in zip(size, stride, strict=True):
        at = (at[:, None] + torch.arange(n, device=x.device) * step).reshape(-1)
    return at


def _by_rows(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> int:
    """How many first dims a strided view shares with its array: each of their rows has its own part of the view, so
    that they can be split."""
    own = 0
    for n, m, step, own_step in zip(size, x.shape, stride, x.stride(), strict=False):
        if (n, step) != (m, own_step):
            break
        own += 1
    while own and (offset or 0) + _reach(size[own:], stride[own:]) >= math.prod(x.shape[own:]):
        own -= 1
    return own


def _reach(size: Sequence[int], stride: Sequence[int]) -> int:
    """How far the last element of a strided view is behind its first."""
    return sum((n - 1) * step for n, step in zip(size, stride, strict=True))


@WRITTEN.register("as_strided.default")
def _as_strided(n: FxNode) -> Callable[..., Tree] | None:
    def how(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tree:
        own = _by_rows(x, size, stride, storage_offset)
        at = _strided(x, size[own:], stride[own:], storage_offset)
        return x.reshape(*x.shape[:own], -1).index_select(own, at).reshape(size)

    return how if _in_order_of_storage(n) else None


@WRITTEN.register("as_strided_scatter.default")
def _as_strided_scatter(n: FxNode) -> Callable[..., Tree] | None:
    def how(
        x: Tensor,
        src: Tensor,
        size: Sequence[int],
        stride: Sequence[int],
        storage_offset: int | None = None,
    ) -> Tree:
        own = _by_rows(x, size, stride, storage_offset)
        at = _strided(x, size[own:], stride[own:], storage_offset)
        lead = x.shape[:own]
        return x.reshape(*lead, -1).index_copy(own, at, src.reshape(*lead, -1)).reshape(x.shape)

    return how if _in_order_of_storage(n) else None


@WRITTEN.register("unfold.default")
def _unfolded(n: FxNode) -> Callable[..., Tree] | None:
    """Windows of a dim. Those that do not overlap are a view."""

    def how(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
        import torch

        dim = dimension % x.dim()
        many = (x.shape[dim] - size) // step + 1
        if size == step:
            windows = x.narrow(dim, 0, many * size)
        else:
            at = torch.arange(many, device=x.device)[:, None] * step + torch.arange(size, device=x.device)
            windows = x.index_select(dim, at.reshape(-1))
        return windows.unflatten(dim, (many, size)).movedim(dim + 1, -1)

    return how if n.args[0].meta["val"].dim() else None
