"""PyTorch ops that are rewritten in terms of other ops, which have rules.

For example, recurrent layers become loops over time (PyTorch's own decomposition unrolls them), embedding bags become
lookups and sums, and assignments by a mask become ``where``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from pase.errors import PaseError
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import arguments
from pase.pytree import Tree
from pase.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

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
    return None if (at := _own_rows(n)) is None else partial(_own_rows_picked, at)


@WRITTEN.register("index_put.default")
def _put(n: FxNode) -> Callable[..., Tree] | None:
    """An assignment by a mask: all selected elements get one value, or all selected rows get one row."""
    x, indices, new, *_ = n.args
    at = next((i for i, m in enumerate(indices) if _is_mask(m)), None)
    if at is None:
        return None if (last := _own_rows(n)) is None else partial(_own_rows_put, last)
    behind = x.meta["val"].shape[at + indices[at].meta["val"].dim() :]
    shape = new.meta["val"].shape
    if any(m is not None for i, m in enumerate(indices) if i != at) or len(shape) > len(behind):
        raise PaseError(
            "the place that a value is written to depends on how many elements a mask selects before it",
            fix="give a value for every element, with torch.where or masked_scatter",
        )
    return partial(_where, len(behind))


# Indices that count the rows in all dims but the last one: ``x[torch.arange(len(x)), ids]``.


def _own_rows(n: FxNode) -> int | None:
    """The last indexed dim, if each row of the dims before it is indexed by its own ids; else None.

    Such an index is a gather. The dims before the last one can then be split without communication.
    """
    import torch

    x, indices = n.args[0].meta["val"], n.args[1]
    last = len(indices) - 1
    if last < 1 or any(m is None for m in indices):
        return None
    shape = torch.broadcast_shapes(*(m.meta["val"].shape for m in indices))
    if len(shape) < last or tuple(shape[:last]) != tuple(x.shape[:last]):
        return None
    for d, m in enumerate(indices[:last]):
        rows = _numbers(m)
        counted = torch.arange(x.shape[d]).view(-1, *[1] * (len(shape) - 1 - d))
        if rows is None or not torch.equal(rows.expand(shape), counted.expand(shape)):
            return None
    return last


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


def _own_ids(x: Tensor, indices: Sequence[Tensor], last: int) -> tuple[Tensor, tuple[int, ...]]:
    """The ids of the last indexed dim, [rows…, n, 1…] for gather and scatter, and the shape of all indices."""
    import torch

    shape = torch.broadcast_shapes(*(i.shape for i in indices))
    ids = indices[last].expand(shape).reshape(*shape[:last], -1)
    ids = torch.where(ids < 0, ids + x.shape[last], ids)
    behind = x.shape[last + 1 :]
    ids = ids.reshape(*ids.shape, *[1] * len(behind)).expand(*ids.shape, *behind)
    return ids, tuple(shape)


def _own_rows_picked(last: int, x: Tensor, indices: Sequence[Tensor]) -> Tensor:
    ids, shape = _own_ids(x, indices, last)
    return x.gather(last, ids).reshape(*shape, *x.shape[last + 1 :])


def _own_rows_put(
    last: int, x: Tensor, indices: Sequence[Tensor], new: Tensor, accumulate: bool = False
) -> Tensor:
    ids, shape = _own_ids(x, indices, last)
    new = new.expand(*shape, *x.shape[last + 1 :]).reshape(ids.shape)
    return x.scatter_add(last, ids, new) if accumulate else x.scatter(last, ids, new)


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

    mask = mask.expand_as(x)
    rows = mask.reshape(x.shape[0], -1).long()
    many = rows.sum(1)
    before = many.cumsum(0) - many
    at = (rows.cumsum(1) + before[:, None] - 1).clamp(min=0)
    return torch.where(mask, source.reshape(-1)[at].view(x.shape), x)


# Complex numbers.


@_always("polar.default")
def _polar(size: Tensor, angle: Tensor) -> Tensor:
    import torch

    return torch.complex(size * angle.cos(), size * angle.sin())


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
    import math

    import torch

    if x.is_complex():
        return torch.atan2(x.imag, x.real)
    return torch.where(x < 0, x.detach() * 0 + math.pi, x.detach() * 0)


@_always("bilinear.default")
def _bilinear(x1: Tensor, x2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    import torch

    made = torch.einsum("...i,oij,...j->...o", x1, weight, x2)
    return made if bias is None else made + bias


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


@WRITTEN.register("as_strided.default")
def _as_strided(n: FxNode) -> Callable[..., Tree] | None:
    def how(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tree:
        return x.reshape(-1).index_select(0, _strided(x, size, stride, storage_offset)).reshape(size)

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
        at = _strided(x, size, stride, storage_offset)
        return x.reshape(-1).index_copy(0, at, src.reshape(-1)).reshape(x.shape)

    return how if _in_order_of_storage(n) else None
