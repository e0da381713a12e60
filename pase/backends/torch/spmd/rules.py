"""Rules for ATen ops that run differently on a part than on the whole tensor.

Most ops do the same on a part as on the whole. An op that depends on the position of the part has a rule here: lookups
and scattered updates by index, slices, random ops, maxima over several ranks, attention with split queries, groups.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pase.backends.torch.spmd.collectives import positions
from pase.backends.torch.spmd.picks import attained, elements, rows
from pase.backends.torch.spmd.process_groups import AxisGroups
from pase.backends.torch.spmd.record import seed_of
from pase.backends.torch.spmd.ring_attention import RowAttention, ring_attention
from pase.backends.torch.spmd.values import NotOnParts, of_broadcast
from pase.frontends.torch.values import TorchOperand
from pase.local.reshard import part, places_of
from pase.local.ring import RingAttention
from pase.local.types import Extents, LocalOp
from pase.pytree import Tree
from pase.registry import Registry
from pase.tables.axis_layout import AxisLayout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pase.backends.torch.spmd.masks import MaskForm

__all__ = [
    "RANK_RULES",
    "SEED",
    "SEEDS_APART",
    "RankCall",
    "ShapeAndLayout",
    "evaluate",
    "random_state",
    "seeded",
]

ShapeAndLayout = tuple[Extents, AxisLayout]
"""The shape of a whole tensor, and its layout."""


@dataclass(frozen=True, kw_only=True)
class RankCall:
    """A call of an ATen op, which stands for one or several ops of the local program. Only the last may be partial.

    given: the operands by their names in the op's schema; tensors are this rank's parts.
    layouts: the whole shapes and layouts of operands that are tensors.
    outs: the whole shapes and layouts that the results must have; None if nothing reads a result.
    seed: the seed of random values drawn here.
    whole: the whole results, as fake tensors.
    mask: for attention, the form of its mask, if that is known.
    """

    target: Callable[..., Tree]
    ops: Sequence[LocalOp]
    given: Mapping[str, TorchOperand]
    layouts: Mapping[str, ShapeAndLayout]
    outs: Sequence[ShapeAndLayout | None]
    groups: AxisGroups
    seed: int
    whole: Sequence[Tensor]
    mask: MaskForm | None = None

    def run(self, /, **changes: TorchOperand) -> Tree:
        """Run the op itself, with some operands replaced."""
        return self.target(**{**self.given, **changes})

    def out(self, i: int = 0) -> Extents:
        """The shape of a result on this rank."""
        wanted = self.outs[i]
        if wanted is None:
            raise NotOnParts(f"nothing reads its result {i}, so the plan has no layout for it")
        shape, layout = wanted
        return layout.local_shape(shape, self.groups.mesh)

    def split(self, name: str = "self") -> set[int]:
        """The dims of an operand that are split."""
        shape, layout = self.layouts[name]
        here = layout.local_shape(shape, self.groups.mesh)
        return {d for d, (n, whole) in enumerate(zip(here, shape, strict=True)) if n != whole}

    def places(self, name: str, dim: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Translate indices into a whole dim of an operand: (indices into this rank's part, whether they are in it)."""
        return places_of(ids, dim, *self.layouts[name], self.groups)

    def own(self, dim: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """``places`` in the operand ``self``, of indices that may count from the end."""
        return self.places("self", dim, ids + self.layouts["self"][0][dim] * (ids < 0))


RankRule = Callable[[RankCall], Tree]
RANK_RULES: Registry[RankRule] = Registry("local rule for ATen op")
"""Name of an op -> its rule, for ops that run differently on a part than on the whole tensor."""


def evaluate(name: str, call: RankCall) -> list[Tensor]:
    """The op's results on this rank. Raises NotOnParts if the op cannot run on parts."""
    rule = RANK_RULES.get(name)
    if rule is None and any(o.halo for op in call.ops for o in op.operands):
        raise NotOnParts("a dim along which its window moves is split")
    made = call.run() if rule is None else rule(call)
    return list(made) if isinstance(made, (tuple, list)) else [made]


def _dim(call: RankCall, name: str = "dim", operand: str = "self") -> int:
    return int(call.given[name]) % max(len(call.layouts[operand][0]), 1)


@RANK_RULES.register("copy")
def _copy(call: RankCall) -> Tensor:
    """Only the dtype of the overwritten tensor matters."""
    return call.given["src"].to(call.whole[0].dtype)


@RANK_RULES.register("type_as")
def _type_as(call: RankCall) -> Tensor:
    """Only the dtype of the other tensor matters. That tensor may be on another rank."""
    return call.given["self"].to(call.whole[0].dtype)


# Parts of a tensor. A split dim is either not sliced, or sliced in the same way on all ranks.


@RANK_RULES.register("slice", "narrow", "select")
def _slice(call: RankCall) -> Tensor:
    x, dim = call.given["self"], _dim(call)
    if dim not in call.split():
        return call.run()
    whole, here = call.layouts["self"][0][dim], x.shape[dim]
    if call.given.get("step", 1) != 1 or "index" in call.given or "length" in call.given:
        raise NotOnParts("it takes a part of a split dim")
    start, stop, _ = slice(call.given["start"], call.given["end"]).indices(whole)
    return x.narrow(dim, start * here // whole, (stop - start) * here // whole)


@RANK_RULES.register("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split")
def _split(call: RankCall) -> Tensor:
    x, dim = call.given["self"], _dim(call)
    if dim not in call.split():
        return call.run()
    here, whole = x.shape[dim], call.layouts["self"][0][dim]
    sizes = [t.shape[dim] * here // whole for t in call.whole]
    if sum(sizes) != here:
        raise NotOnParts("it cuts a split dim into unequal parts")
    return x.split(sizes, dim)


@RANK_RULES.register("tril", "triu")
def _triangle(call: RankCall) -> Tensor:
    """Masks by the positions in the last two dims."""
    shape, layout = call.layouts["self"]
    x, rank, k = call.given["self"], len(shape), call.given.get("diagonal", 0)
    down, across = (positions(d, shape, layout, call.groups, x.device) for d in (rank - 2, rank - 1))
    ahead = across[None, :] - down[:, None]
    keep = ahead <= k if "tril" in str(call.target) else ahead >= k
    return x.where(keep, x.new_zeros(()))


@RANK_RULES.register("one_hot")
def _one_hot(call: RankCall) -> Tensor:
    wanted = call.outs[0]
    made = call.run()
    return made if wanted is None else _last(made, wanted, call.groups)


def _last(x: Tensor, wanted: ShapeAndLayout, groups: AxisGroups) -> Tensor:
    """This rank's part of a last dim that was computed whole."""
    shape, layout = wanted
    last = len(shape) - 1
    along = layout.within(lambda dim: dim == last)
    return part(x, (*x.shape[:-1], shape[-1]), along, groups)


# Maxima and minima over several ranks.


JOINING = frozenset({"amax", "amin", "max", "min", "any", "all"})
"""Ops whose rule combines the parts of several ranks, which are not summed."""


@RANK_RULES.register("any", "all")
def _any(call: RankCall) -> Tensor:
    import torch

    here, (result,) = call.run(), call.ops[-1].results
    over = result.summed
    if not over:
        return here
    return call.groups.all_reduce(here.to(torch.uint8), over, call.ops[-1].combine).bool()


@RANK_RULES.register("amax", "amin", "max", "min")
def _extreme(call: RankCall) -> Tree:
    """All elements that attain the extreme share its gradient, as on one rank."""
    import torch

    x, dim = call.given["self"], call.given.get("dim")
    if "other" in call.given:
        return call.run()
    if isinstance(dim, int):  # the extreme and its index
        if dim % max(x.dim(), 1) in call.split():
            raise NotOnParts("it needs the index of an extreme along a split dim")
        return call.run()
    axes = {d % x.dim() for d in dim or range(x.dim())} if x.dim() else set()
    if not call.split() & axes:
        return call.run()
    (result,) = call.ops[-1].results
    combine, groups = call.ops[-1].combine, call.groups
    here = call.run()
    if not result.summed and not x.requires_grad:  # the edge to the reader combines the parts
        return here
    over = result.partial_over(groups.mesh)  # every rank needs the extreme, to know which elements attain it
    top = groups.all_reduce(here.detach(), over, combine)
    if not x.requires_grad:
        return top
    whole = top if call.given.get("keepdim") else _unsqueezed(top, sorted(axes))
    reached = x.detach() == whole
    counts = torch.promote_types(x.dtype, torch.float32)
    shares = groups.all_reduce(reached.sum(sorted(axes), keepdim=True).to(counts), over)
    return attained(x, top, reached, shares)


def _unsqueezed(x: Tensor, axes: Sequence[int]) -> Tensor:
    for a in axes:
        x = x.unsqueeze(a)
    return x


# Lookups by index. In a split dim, each rank looks up its own rows and has zeros for the others, and a sum follows.


@RANK_RULES.register("embedding")
def _embedding(call: RankCall) -> Tensor:
    if call.given.get("scale_grad_by_freq") and (call.split("weight") | call.split("indices")):
        raise NotOnParts("it divides gradients by how often an index occurs in the whole batch")
    if 0 not in call.split("weight"):
        return call.run()
    ids, pad = call.given["indices"], call.given.get("padding_idx", -1)
    here, mine = call.places("weight", 0, ids)
    return rows(call.given["weight"], here, mine, None if pad < 0 else ids == pad)


@RANK_RULES.register("index_select")
def _index_select(call: RankCall) -> Tensor:
    dim = _dim(call)
    if dim not in call.split():
        return call.run()
    return _taken(call, dim, call.given["index"])


def _taken(call: RankCall, dim: int, ids: Tensor) -> Tensor:
    """x at these indices of a split dim. The shape of the indices replaces the dim."""
    import torch

    x = call.given["self"]
    here, mine = call.own(dim, ids)
    found = x.index_select(dim, here.reshape(-1)).reshape(*x.shape[:dim], *ids.shape, *x.shape[dim + 1 :])
    mask = mine.reshape(*ids.shape, *[1] * (x.dim() - dim - 1))
    return torch.where(mask, found, found.new_zeros(()))


@RANK_RULES.register("index", "_unsafe_index")
def _index(call: RankCall) -> Tensor:
    at = [i for i, v in enumerate(call.given["indices"]) if v is not None]
    if len(at) > 1:
        return _taken_of_several(call, at)
    return _taken(call, at[0], call.given["indices"][at[0]]) if set(at) & call.split() else call.run()


def _taken_of_several(call: RankCall, at: Sequence[int]) -> Tensor:
    """x at indices of several dims. An index in another rank's part gives zero."""
    import torch

    given, mine = _parts_of_indices(call, at), None
    for d in sorted(set(at) & call.split()):
        given[d], here = call.own(d, given[d])
        mine = here if mine is None else mine & here
    found: Tensor = call.run(indices=given)
    if mine is None:
        return found
    first = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    dims = max(x.dim() for x in given if x is not None)
    return torch.where(
        mine.reshape(*mine.shape, *[1] * (found.dim() - first - dims)), found, found.new_zeros(())
    )


def _parts_of_indices(call: RankCall, at: Sequence[int]) -> list[Tensor | None]:
    """The indices of several dims on this rank: an index that does not depend on data is whole until here."""
    given = list(call.given["indices"])
    joined = call.ops[-1].operands[1]  # [the indices' dims…, one index per indexed dim]
    for d in at:
        shape = tuple(given[d].shape)
        given[d] = part(given[d], shape, of_broadcast(shape, joined.shape[:-1], joined.layout), call.groups)
    return given


@RANK_RULES.register("gather")
def _gather(call: RankCall) -> Tensor:
    x, dim, ids = call.given["self"], _dim(call), call.given["index"]
    if dim in call.split():
        return elements(x, dim, *call.places("self", dim, ids))
    return call.run() if call.given.get("sparse_grad") else elements(x, dim, ids, None)


@RANK_RULES.register(
    "index_put", "_unsafe_index_put", "index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce"
)
def _scatter(call: RankCall) -> Tensor:
    """If the result is a partial sum, only the first rank adds the updates to the operand; the others add to zeros."""
    import torch

    x = call.given["self"]
    if "indices" in call.given:
        at = {i for i, v in enumerate(call.given["indices"]) if v is not None}
        if len(at) > 1:
            call = replace(call, given={**call.given, "indices": _parts_of_indices(call, sorted(at))})
    else:
        at = {_dim(call)}
    parted = at & call.split()
    if parted and not ("indices" in call.given or "source" in call.given):
        raise NotOnParts("it updates a split dim")
    (result,) = call.ops[-1].results
    partial = result.partial_over(call.groups.mesh)
    if partial and call.groups.number(partial):
        # Backward passes here on every rank, because it sends. A product with zero would not be zero of infinity.
        x = x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)
    return _put(call, x, sorted(parted)) if parted else call.run(self=x)


def _put(call: RankCall, x: Tensor, parted: Sequence[int]) -> Tensor:
    """Update a tensor that is split along some of the indexed dims. Updates for other ranks go to an extra row behind
    this rank's part, which is cut off afterwards."""
    import torch

    several = "indices" in call.given
    given: TorchOperand = (
        list(call.given["indices"]) if several else [None] * parted[0] + [call.given["index"]]
    )
    mine = torch.ones((), dtype=torch.bool, device=x.device)
    for d in parted:
        given[d], here = call.own(d, given[d])
        mine = mine & here
    first = parted[0]
    behind = x.shape[first]
    given[first] = torch.where(mine, given[first], behind)
    wider = torch.cat([x, x.narrow(first, 0, 1)], first)
    changes = {"indices": given} if several else {"index": given[first]}
    return call.run(self=wider, **changes).narrow(first, 0, behind)


# Attention and norms: operands that are sizes become the sizes of parts.


@RANK_RULES.register("_grouped_mm", "transformers::grouped_mm_fallback")
def _grouped(call: RankCall) -> Tensor:
    """The rank's rows that belong to its groups, sorted by group; zeros for its other rows."""
    import torch

    rows_of, weights_of = ("input", "weight") if "input" in call.given else ("self", "mat2")
    x, w, ends = call.given[rows_of], call.given[weights_of], call.given["offs"]
    if not (0 in call.split(rows_of) or 0 in call.split(weights_of)):
        return call.run()
    numbers = positions(0, *call.layouts[rows_of], call.groups, x.device)
    here, mine = call.places(weights_of, 0, torch.searchsorted(ends, numbers, right=True))
    group = torch.where(mine, here, w.shape[0])
    order = group.argsort(stable=True)
    own = torch.arange(w.shape[0], device=x.device)
    until = torch.searchsorted(group[order], own, right=True, out_int32=True)
    reached = (mine[order])[:, None]  # PyTorch leaves the results and gradients of other rows uninitialised
    zero = x.new_zeros(())
    made = call.run(**{rows_of: torch.where(reached, x[order], zero), "offs": until})
    return torch.where(reached, made, zero.to(made.dtype))[order.argsort()]


@RANK_RULES.register("scaled_dot_product_attention")
def _attention(call: RankCall) -> Tensor:
    """Each rank has a part of the batch, heads and queries. Keys are whole, or split like the queries (a ring)."""
    if call.mask is not None:
        plain = {"attn_mask": None, "is_causal": call.mask == "causal"}
        call = replace(call, given={**call.given, **plain}, mask=None)
    q, k = call.given["query"], call.given["key"]
    whole = call.layouts["key"][0]
    if k.shape[-2] != whole[-2] and k.shape[-1] == whole[-1]:
        return _ring(call)
    if k.shape[-2:] != whole[-2:] or (q.dim() > 3 and q.shape[-3] % k.shape[-3]):
        raise NotOnParts("attention cannot be computed on such parts of its keys or heads")
    changes: dict[str, TorchOperand] = {}
    shape, layout = call.layouts["query"]
    if call.given.get("is_causal") and q.shape[-2] != shape[-2]:
        queries = positions(len(shape) - 2, shape, layout, call.groups, q.device)
        keys = positions(len(whole) - 2, whole, AxisLayout.whole(call.groups.mesh), call.groups, q.device)
        changes |= {"is_causal": False, "attn_mask": keys[None, :] <= queries[:, None]}
    if q.dim() > 3 and q.shape[-3] != k.shape[-3]:
        changes |= _shared_heads(replace(call, given={**call.given, **changes}))
    if not call.given.get("dropout_p"):
        return call.run(**changes)
    where = sum(
        call.groups.place[i] * 7919**i for i, _ in layout.digits
    )  # ranks with different parts draw different values, and ranks with the same part draw the same
    with seeded(call.seed + where, q.device):
        return call.run(**changes)


def _shared_heads(call: RankCall) -> dict[str, TorchOperand]:
    """Operands of attention in which several query heads share one of keys and values.

    Where the user has repeated these, they are repeated only for kernels that do not take them otherwise: on a GPU,
    those for 16-bit numbers without a mask do.
    """
    import torch

    q, k, v = (call.given[n] for n in ("query", "key", "value"))
    taken = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] == v.shape[-1] <= 256
    taken = taken and call.given.get("attn_mask") is None
    if taken or call.given.get("enable_gqa") or q.device.type == "cpu":
        return {"enable_gqa": True}
    return {n: x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for n, x in (("key", k), ("value", v))}


def _ring(call: RankCall) -> Tensor:
    q, k, v = (call.given[n] for n in ("query", "key", "value"))
    names = call.groups.mesh.names
    axes, of_queries = (
        call.layouts[n][1].axes_along(len(call.layouts[n][0]) - 2, call.groups.mesh) for n in ("key", "query")
    )
    if axes != of_queries:
        raise NotOnParts("its keys are split, but its queries are not split in the same way")
    if call.given.get("is_causal") and q.shape[-2] != k.shape[-2]:
        raise NotOnParts(
            "its keys are split, it is causal, and it has another number of queries than of keys"
        )
    if call.given.get("attn_mask") is not None or call.given.get("dropout_p") or q.dim() < 3:
        raise NotOnParts("its keys are split, and it has a mask or dropout")
    if q.shape[-3] % k.shape[-3] or list(axes) != sorted(axes, key=names.index):
        raise NotOnParts("its keys are split, and a ring needs other heads, or another order of mesh axes")
    scale = call.given.get("scale")
    ring = RingAttention(
        arrays=call.groups,
        kernel=RowAttention(),
        axes=axes,
        causal=bool(call.given.get("is_causal")),
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        positions=q.dim() - 2,
    )
    return ring_attention(ring, q, k, v)


@RANK_RULES.register("group_norm", "native_group_norm")
def _group_norm(call: RankCall) -> Tensor:
    x, whole = call.given["input"], call.layouts["input"][0]
    name = "num_groups" if "num_groups" in call.given else "group"
    changes = {name: call.given[name] * x.shape[1] // whole[1]}
    if name == "group":
        changes |= {"N": x.shape[0], "C": x.shape[1], "HxW": x[0, 0].numel()}
    return call.run(**changes)


# Random ops: every rank draws the whole tensor from one seed, and takes its part of it.

_DRAWING = threading.Lock()
SEED = "pase_seed"
"""The key of the seed in the notes of a traced node that draws random values."""
SEEDS_APART = 1_000_003
"""The difference between the seeds of one place in two consecutive steps."""


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed PyTorch's generators, so that values drawn here are the same on every rank and when they are recomputed.

    Afterwards the program's own random state is restored.
    """
    import torch
    from torch.fx.traceback import annotate

    devices = [device] if device.type == "cuda" else []
    with _DRAWING, torch.random.fork_rng(devices=devices), annotate({SEED: seed}):
        torch.manual_seed(seed % 2**63)
        with seed_of(seed, seeded):
            yield


def random_state(device: torch.device) -> Callable[[], None]:
    """Returns a function that restores the present state of PyTorch's generators, on the CPU and on the device."""
    import torch

    with _DRAWING:
        cpu = torch.get_rng_state()
        own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back() -> None:
        with _DRAWING:
            torch.set_rng_state(cpu)
            if own is not None:
                torch.cuda.set_rng_state(own, device)

    return put_back


@RANK_RULES.register("native_dropout", "dropout")
def _dropout(call: RankCall) -> Tensor | tuple[Tensor, ...]:
    import torch

    x = call.given["input"]
    wanted = call.outs[0] or call.layouts["input"]
    p = float(call.given["p"])
    with seeded(call.seed, x.device):
        keep = torch.rand(wanted[0], device=x.device) >= p
    keep = part(keep, *wanted, call.groups)
    y = x * keep / (1.0 - p) if p < 1.0 else torch.zeros_like(x)
    return y if "train" in call.given and str(call.target) == "aten.dropout.default" else (y, keep)
